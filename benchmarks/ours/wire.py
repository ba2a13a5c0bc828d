"""A node reduced to its control stream, to see when a coordinator gives it work."""

import queue
from collections.abc import Iterator

import grpc

from hypergpu.ids import NodeId
from hypergpu.v1 import node_pb2, node_pb2_grpc
from hypergpu.wire.protocol import PROTOCOL, PROTOCOL_ENTRY

_DEADLINE_S = 60.0
_OPTIONS = (
    # Dial again at once: what is waited for is the other side.
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.min_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 20),
)


def assigned_round(address: str, node: NodeId, workload: tuple[str, int]) -> int:
    """Dial until the plaintext listener answers, say hello and wait for an assignment.

    Raises:
        grpc.RpcError: The coordinator refuses, or gives no work within a minute.
    """
    name, version = workload
    capabilities = node_pb2.Capabilities(
        workloads=[node_pb2.WorkloadVersion(name=name, version=version)]
    )
    spoken = node_pb2.Version(protocol=PROTOCOL, software="benchmark")
    hello = node_pb2.Hello(version=spoken, capabilities=capabilities)
    said: queue.SimpleQueue[node_pb2.ControlRequest | None] = queue.SimpleQueue()
    said.put(node_pb2.ControlRequest(hello=hello))
    metadata = (PROTOCOL_ENTRY, ("hypergpu-node", node))
    with grpc.insecure_channel(address, options=_OPTIONS) as channel:
        stub = node_pb2_grpc.NodeServiceStub(channel)
        call = stub.Control(
            _requests(said), metadata=metadata, timeout=_DEADLINE_S, wait_for_ready=True
        )
        try:
            for message in call:
                if message.HasField("assignment"):
                    return int(message.assignment.lease.round)
        finally:
            said.put(None)
    raise RuntimeError("the coordinator closed the stream without an assignment")


def _requests(
    said: "queue.SimpleQueue[node_pb2.ControlRequest | None]",
) -> Iterator[node_pb2.ControlRequest]:
    while (message := said.get()) is not None:
        yield message
