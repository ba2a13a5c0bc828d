"""Bytes of FlowerTune's loop: both factors of an adapter as float32, there and back in each round.

Flower's server and nodes run; counted are the messages that its strategy sends and gets, without
gRPC's framing. Nodes return arrays of their own, and train nothing.
"""

import json
from typing import Any

import flwr
import numpy as np
from flwr.common.serde import fit_ins_to_proto, fit_res_to_proto

from benchmarks.peers.flower_lean import MESSAGE_LIMIT, LeanNode
from benchmarks.peers.measured import LOOPBACK, arguments, free_port, running, same_script


class CountedAverage(flwr.server.strategy.FedAvg):
    """Federated averaging that counts its messages' bytes."""

    bytes_both_ways = 0

    def configure_fit(self, *round_: Any, **named: Any) -> Any:
        """Count what is about to be sent."""
        orders = super().configure_fit(*round_, **named)
        self.bytes_both_ways += sum(fit_ins_to_proto(order).ByteSize() for _, order in orders)
        return orders

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """Count what came."""
        self.bytes_both_ways += sum(fit_res_to_proto(result).ByteSize() for _, result in results)
        return super().aggregate_fit(server_round, results, failures)


def serve(parameters: int, nodes: int, rounds: int, address: str) -> int:
    """Run the rounds; the bytes of their messages."""
    strategy = CountedAverage(
        fraction_evaluate=0.0,
        min_fit_clients=nodes,
        min_available_clients=nodes,
        initial_parameters=flwr.common.ndarrays_to_parameters([np.zeros(parameters, np.float32)]),
    )
    flwr.server.start_server(
        server_address=address,
        config=flwr.server.ServerConfig(num_rounds=rounds),
        strategy=strategy,
        grpc_max_message_length=MESSAGE_LIMIT,
    )
    return strategy.bytes_both_ways


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
        moved_bytes = serve(options.parameters, options.nodes, options.rounds, address)
        print(json.dumps({"bytes_both_ways": moved_bytes}), flush=True)


if __name__ == "__main__":
    main()
