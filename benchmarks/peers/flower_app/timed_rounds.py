"""Flower's server and client apps for `flower_deployed.py`: rounds of fresh arrays, no training."""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

server_app = ServerApp()
client_app = ClientApp()


class DeployedTimedAverage(FedAvg):
    """Federated averaging that writes down when each aggregate was ready."""

    ends_path: Path

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Average as usual."""
        aggregate = super().aggregate_train(server_round, replies)
        with self.ends_path.open("a", encoding="utf-8") as ends:
            ends.write(json.dumps(time.monotonic()) + "\n")
        return aggregate


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Run the rounds that the run's configuration asks for."""
    settings = context.run_config
    nodes = int(settings["nodes"])
    strategy = DeployedTimedAverage(
        fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes
    )
    strategy.ends_path = Path(str(settings["ends-path"]))
    model = np.zeros(int(settings["parameters"]), np.float32)
    strategy.start(grid, ArrayRecord([model]), num_rounds=int(settings["rounds"]))


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Answer with an array that no other node and no other round has."""
    seed = abs(hash((context.node_id, message.metadata.message_id)))
    update = np.random.default_rng(seed).random(int(context.run_config["parameters"]), np.float32)
    content = RecordDict(
        {"arrays": ArrayRecord([update]), "metrics": MetricRecord({"num-examples": 1})}
    )
    return Message(content=content, reply_to=message)
