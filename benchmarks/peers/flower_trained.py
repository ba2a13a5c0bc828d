"""Flower's FedAvg training a real network, over links that netsim holds open, or over loopback.

The path is that of `flower_lean`. Nodes train with the product's own trainer, on the shards that
the product would give them, so that only what moves the models differs. Flower's environment has
no torch: the product's packages come behind its own.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import flwr
import numpy as np

from benchmarks.peers.measured import DEADLINE_S, LOOPBACK, free_port, running

MESSAGE_LIMIT = (1 << 31) - 1
RANK = "FLOWER_RANK"
"""Set for nodes: which one it is, and where the hub is."""
ADDRESS = "FLOWER_ADDRESS"
LINKED_PORT = 9092
"""Of the hub, behind links of its own."""


class Task(NamedTuple):
    """What is trained; the fields are options of the command line."""

    packages: str
    """The product's site-packages."""
    job: str
    """A job file: model, batch, learning rate, inner steps and nodes are taken from it."""
    seed: int
    rounds: int
    floor_ms: int


class Training:
    """The product's workload, trainer and shards."""

    def __init__(self, task: Task) -> None:
        from coordinator.shell.evaluator.torch_judge import TorchJudge
        from hypergpu.catalogue.registry import build, find
        from hypergpu.jobfile import read_job_file

        self.spec = read_job_file(Path(task.job))
        self.workload = build(find(self.spec.workload), self.spec.options)
        self.judge = TorchJudge(self.workload, "")

    def flat(self, parameters: Any) -> Any:
        """A model of these parameters."""
        from hypergpu.layout import Flat

        model = Flat.empty(self.judge.layout)
        model.parameters[:] = parameters
        return model


class Node(flwr.client.NumPyClient):
    """Trains a shard a round."""

    def __init__(self, task: Task, rank: int) -> None:
        import torch

        from gpu_node.shell.worker.trainer.paced import Pace, PacedTrainer
        from gpu_node.shell.worker.trainer.torch_trainer import TorchTrainer
        from hypergpu.catalogue.networks.device import Device
        from hypergpu.units import Bytes

        torch.set_num_threads(1)
        self.task, self.rank = task, rank
        self.training = Training(task)
        samples = self.training.judge.dataset.train
        trainer = TorchTrainer(
            self.training.workload, Device("cpu", "CPU", Bytes(0), has_bf16=False), samples
        )
        batch = self.training.spec.training.batch_size
        self.trainer = PacedTrainer(trainer, Pace(task.floor_ms / 1000), batch)
        self.optimizer: Any = None

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        """Take the inner steps and answer with the parameters after them."""
        from gpu_node.shell.worker.trainer.interface import Start
        from hypergpu.layout import Flat

        spec = self.training.spec
        model = self.training.flat(parameters[0])
        self.trainer.begin(Start(model, self.task.seed, self.optimizer, spec.inner.weight_decay))
        for indices in self._batches(int(config["round"])):
            self.trainer.step(indices, spec.inner.learning_rate)
        after = Flat.empty(self.training.judge.layout)
        self.trainer.store(after)
        self.optimizer = {name: each.copy() for name, each in self.trainer.optimizer().items()}
        return [after.parameters], spec.training.inner_steps * spec.training.batch_size, {}

    def _batches(self, number: int) -> Any:
        from gpu_node.shell.worker.messages import PositionRange
        from hypergpu.dataset.sampling import stream_indices
        from hypergpu.units import Samples

        shape = self.training.spec.training
        shard = shape.inner_steps * shape.batch_size
        start = ((number - 1) * shape.nodes + self.rank) * shard
        members = np.arange(len(self.training.judge.dataset.train.labels), dtype=np.int64)
        ranges = [PositionRange(start, Samples(shard))]
        indices = stream_indices(members, 0, self.task.seed, ranges)
        return indices.reshape(shape.inner_steps, shape.batch_size)


class KeptAverage(flwr.server.strategy.FedAvg):
    """Federated averaging that keeps every aggregate, to be judged when the clock has stopped."""

    began_s: float
    ends_s: list[float]
    models: list[Any]

    def aggregate_fit(self, *updates: Any) -> Any:
        """Average as usual."""
        aggregate = super().aggregate_fit(*updates)
        self.ends_s.append(time.monotonic() - self.began_s)
        self.models.append(aggregate[0])
        return aggregate

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        """Note when the first round is opened, with all nodes there."""
        client_manager.wait_for(self.min_available_clients, DEADLINE_S)
        self.began_s = self.began_s or time.monotonic()
        return super().configure_fit(server_round, parameters, client_manager)


def serve(task: Task, training: Training, address: str) -> dict[str, Any]:
    """Run the rounds; what each took since the first was opened, and how good its model is."""
    initial = training.judge.initial(task.seed).parameters
    nodes = training.spec.training.nodes
    strategy = KeptAverage(
        fraction_evaluate=0.0,
        min_fit_clients=nodes,
        min_available_clients=nodes,
        initial_parameters=flwr.common.ndarrays_to_parameters([initial]),
        on_fit_config_fn=lambda number: {"round": number},
    )
    strategy.began_s, strategy.ends_s, strategy.models = 0.0, [], []
    flwr.server.start_server(
        server_address=address,
        config=flwr.server.ServerConfig(num_rounds=task.rounds),
        strategy=strategy,
        grpc_max_message_length=MESSAGE_LIMIT,
    )
    arrays = [flwr.common.parameters_to_ndarrays(each)[0] for each in strategy.models]
    judged = [training.judge.evaluate(training.flat(each)).metric("accuracy") for each in arrays]
    return {"ends_s": strategy.ends_s, "metrics": judged}


def commands(nodes: int) -> tuple[str, list[list[str]]]:
    """Where the hub listens, and what starts the nodes, each at its own end of its link."""
    this = [sys.executable, "-m", "benchmarks.peers.flower_trained", *sys.argv[1:]]
    sites = json.loads(os.environ.get("NETSIM_SITES") or "null")
    if sites is None:
        address = f"{LOOPBACK}:{free_port()}"
        return address, [_named(this, rank, address) for rank in range(nodes)]
    ends = [
        [*site.get("prefix", []), *_named(this, rank, f"{site['dials']}:{LINKED_PORT}")]
        for rank, site in enumerate(sites["nodes"].values())
    ]
    return f"{sites['coordinator']['dials']}:{LINKED_PORT}", ends[:nodes]


def _named(command: list[str], rank: int, address: str) -> list[str]:
    return ["env", f"{RANK}={rank}", f"{ADDRESS}={address}", *command]


def main() -> None:
    """Start the nodes and serve, or be one node."""
    parser = argparse.ArgumentParser()
    for name, kind in Task.__annotations__.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, required=True)
    task = Task(**vars(parser.parse_args()))
    sys.path.append(task.packages)
    if rank := os.environ.get(RANK):
        flwr.client.start_client(
            server_address=os.environ[ADDRESS],
            client=Node(task, int(rank)).to_client(),
            grpc_max_message_length=MESSAGE_LIMIT,
        )
        return
    training = Training(task)
    address, nodes = commands(training.spec.training.nodes)
    with running(nodes):
        print(json.dumps(serve(task, training, address)), flush=True)


if __name__ == "__main__":
    main()
