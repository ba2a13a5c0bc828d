"""Flower's server and client apps for `flower_trained_deployed.py`: federated averaging.

A node's optimizer goes from round to round in Flower's own state of the node, since Flower starts
its app anew for each.
"""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from benchmarks.peers.flower_task import FlowerTask, FlowerTraining, Learner

OPTIMIZER = "optimizer"

server_app = ServerApp()
client_app = ClientApp()


class KeptAverage(FedAvg):
    """Federated averaging that keeps every aggregate, to be judged when the clock has stopped."""

    folder: Path
    began_s = 0.0

    def configure_train(self, server_round: int, *rest: Any) -> Iterable[Message]:
        """As usual, which waits for all nodes; note when the first round is opened."""
        messages = list(super().configure_train(server_round, *rest))
        self.began_s = self.began_s or time.monotonic()
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        """Average as usual."""
        came = list(replies)
        arrays, metrics = super().aggregate_train(server_round, came)
        end_s = time.monotonic() - self.began_s
        if arrays is not None:
            (parameters,) = arrays.to_numpy_ndarrays()
            (self.folder / f"{server_round}.f32").write_bytes(parameters.tobytes())
        updates = sum(not each.has_error() for each in came)
        with (self.folder / "rounds").open("a", encoding="utf-8") as rounds:
            rounds.write(json.dumps([end_s, updates]) + "\n")
        return arrays, metrics


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Run the rounds that the task asks for, with all nodes in each."""
    training = training_of(context)
    nodes = training.spec.training.nodes
    strategy = KeptAverage(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    strategy.folder = Path(str(context.run_config["folder"]))
    strategy.start(grid, ArrayRecord([training.initial()]), num_rounds=training.task.rounds)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Take the inner steps and answer with the parameters after them."""
    learner = Learner(training_of(context), int(context.node_config["rank"]))
    if OPTIMIZER in context.state:
        optimizer_state = context.state[OPTIMIZER]
        learner.optimizer = {name: each.numpy() for name, each in optimizer_state.items()}
    (parameters,) = message.content["arrays"].to_numpy_ndarrays()
    after = learner.train(parameters, int(message.content["config"]["server-round"]))
    state = learner.optimizer or {}
    context.state[OPTIMIZER] = ArrayRecord({name: Array(each) for name, each in state.items()})
    weight = MetricRecord({"num-examples": learner.samples})
    content = RecordDict({"arrays": ArrayRecord([after]), "metrics": weight})
    return Message(content=content, reply_to=message)


def training_of(context: Context) -> FlowerTraining:
    """What the run is to train."""
    return FlowerTraining(FlowerTask(**json.loads(str(context.run_config["task"]))))
