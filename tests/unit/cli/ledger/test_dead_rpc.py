"""What a command says when the chain that it asks does not answer."""

import socket
import threading

import pytest

from hypergpu.cli.ledger.reading import ledger_at
from hypergpu.refusal import Reason, RefusalError


def test_a_command_is_told_what_to_do_and_not_what_a_coordinator_does_meanwhile() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RefusalError) as refused, ledger_at(url) as chain:
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
        with pytest.raises(RefusalError) as refused, ledger_at(url) as chain:
            chain.head()
        listener.join()
    assert "what listens there speaks no HTTP, or hung up" in refused.value.detail
