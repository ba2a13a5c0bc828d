"""How a command asks a chain, and what it says when that does not answer."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from hypergpu.chain.profiles import chain_profile
from hypergpu.chain.profiles.cautious import cautious_profile
from hypergpu.chain.rpc.client import Pace
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.cli.ledger.reading import ledger_at
from hypergpu.errors import HyperGPUError, Reason


def test_a_command_is_told_what_to_do_and_not_what_a_coordinator_does_meanwhile() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(HyperGPUError) as refused, ledger_at(url) as chain:
            chain.head()
    assert refused.value.reason is Reason.CHAIN_UNREACHABLE
    assert refused.value.detail.endswith("did not answer: nobody listens there")
    assert refused.value.fix == "start the chain, or correct the address of its RPC"


def test_what_is_no_rpc_and_hangs_up_is_told_in_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            server.accept()[0].close()

        listener = threading.Thread(target=hang_up, daemon=True)
        listener.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(HyperGPUError) as refused, ledger_at(url) as chain:
            chain.head()
        listener.join()
    assert "what listens there speaks no HTTP, or hung up" in refused.value.detail


class Chain(BaseHTTPRequestHandler):
    """An RPC that knows of which chain it is, and nothing else."""

    chain_id = 0

    def answer(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = {"jsonrpc": "2.0", "id": asked["id"], "result": hex(self.chain_id)}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


def asked_of(chain_id: int) -> Pace:
    """How a command asks an RPC on this machine of that chain."""
    # The server's own name for it, which is not ours.
    handler = type("ThatChain", (Chain,), {"chain_id": chain_id, "do_POST": Chain.answer})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with ledger_at(f"http://127.0.0.1:{server.server_port}") as chain:
            pace = chain.rpc.pace
        server.shutdown()
    return pace


def test_no_limit_is_assumed_of_an_rpc_on_this_machine() -> None:
    assert cautious_profile(424_242).pace.requests_per_s > 0
    assert asked_of(424_242) == cautious_profile(424_242).pace._replace(requests_per_s=0)


def test_a_limit_that_a_chains_profile_knows_holds_on_this_machine_too() -> None:
    known = chain_profile("base-sepolia")
    assert known.pace.requests_per_s > 0
    assert asked_of(known.chain_id) == known.pace


@pytest.mark.parametrize("host", ["127.0.0.1:8545", "user:key@localhost/v3", "[::1]:8545"])
def test_an_address_of_this_machine_is_known(host: str) -> None:
    assert HttpTransport(f"http://{host}").is_loopback


@pytest.mark.parametrize("host", ["a.org/127.0.0.1", "192.168.1.7:8545", "localhost.a.org"])
def test_an_address_elsewhere_is_no_loopback(host: str) -> None:
    assert not HttpTransport(f"http://{host}").is_loopback
