"""gRPC takes any option name without a word, and does nothing about one that it does not know."""

from importlib import import_module
from pathlib import Path

import pytest

from coordinator.shell.app import listeners
from gpu_node.shell.link import channels
from hypergpu.client import connection

Options = dict[str, str | int]
SERVED: Options = dict(listeners.OPTIONS)
DIALLED: dict[str, Options] = {
    "a node": dict(channels.OPTIONS),
    "a user": dict(connection.OPTIONS),
}


@pytest.fixture(scope="module")
def names_of_core() -> bytes:
    """The compiled core, which holds the names of its options as strings."""
    library = import_module("grpc._cython.cygrpc").__file__
    assert library is not None
    return Path(library).read_bytes()


@pytest.mark.parametrize("name", sorted({*SERVED, *DIALLED["a node"], *DIALLED["a user"]}))
def test_an_option_is_one_that_grpc_knows(name: str, names_of_core: bytes) -> None:
    assert name.encode() + b"\0" in names_of_core


def test_a_name_that_only_looks_right_is_found_out(names_of_core: bytes) -> None:
    assert b"grpc.http2.min_recv_ping_interval_without_data_ms\0" not in names_of_core


@pytest.mark.parametrize("who", DIALLED)
def test_pings_on_an_idle_stream_come_no_oftener_than_the_coordinator_allows(who: str) -> None:
    allowed_ms = int(SERVED["grpc.http2.min_ping_interval_without_data_ms"])
    assert int(DIALLED[who]["grpc.keepalive_time_ms"]) > allowed_ms
