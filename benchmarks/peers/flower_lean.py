"""Flower's leanest path: `start_server` and `start_client`, resident processes, its old transport.

Deprecated by Flower, and the fastest that it has. The nodes do no training: each returns an array
of its own, so that nothing is de-duplicated.
"""

import time
from typing import Any

import flwr
import numpy as np

from benchmarks.peers.measured import (
    LOOPBACK,
    WARM_UP_ROUNDS,
    arguments,
    free_port,
    report,
    running,
    same_script,
)

MESSAGE_LIMIT = (1 << 31) - 1


class TimedAverage(flwr.server.strategy.FedAvg):
    """Federated averaging that notes when each aggregate was ready."""

    ends_s: list[float]

    def aggregate_fit(self, *updates: Any) -> Any:
        """Average as usual."""
        aggregate = super().aggregate_fit(*updates)
        self.ends_s.append(time.monotonic())
        return aggregate


class LeanNode(flwr.client.NumPyClient):
    """A node whose training takes no time."""

    def __init__(self, parameters: int, rank: int) -> None:
        self.update = np.random.default_rng(rank).random(parameters, np.float32)

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> Any:
        """Answer with this node's own update."""
        return [self.update], 1, {}


def serve(parameters: int, nodes: int, rounds: int, address: str) -> list[float]:
    """Run the rounds and return when each ended."""
    model = np.zeros(parameters, np.float32)
    strategy = TimedAverage(
        fraction_evaluate=0.0,
        min_fit_clients=nodes,
        min_available_clients=nodes,
        initial_parameters=flwr.common.ndarrays_to_parameters([model]),
    )
    strategy.ends_s = []
    flwr.server.start_server(
        server_address=address,
        config=flwr.server.ServerConfig(num_rounds=rounds),
        strategy=strategy,
        grpc_max_message_length=MESSAGE_LIMIT,
    )
    return strategy.ends_s


def main() -> None:
    """Start the nodes and serve, or be one node."""
    options = arguments()
    if options.rank >= 0:
        flwr.client.start_client(
            server_address=options.address,
            client=LeanNode(options.parameters, options.rank).to_client(),
            grpc_max_message_length=MESSAGE_LIMIT,
        )
        return
    address = f"{LOOPBACK}:{free_port()}"
    nodes = [same_script(options, rank, address) for rank in range(options.nodes)]
    with running(nodes):
        rounds = options.rounds + WARM_UP_ROUNDS
        report(serve(options.parameters, options.nodes, rounds, address))


if __name__ == "__main__":
    main()
