"""A real HTTP server in front of a chain's RPC, which answers wrongly by script."""

import json
import threading
import types
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hypergpu.chain.ledger import LedgerCalls
from hypergpu.chain.rpc.errors import (
    RpcError,
    RpcGarbledError,
    RpcLimitedError,
    RpcRefusedError,
    RpcUnreachableError,
)

Script = Callable[[list[dict[str, Any]], bytes], "Answer | None"]
"""Given the calls of a request and the chain's own answer, what to say instead; None: the truth."""


class Answer:
    """What goes back."""

    def __init__(
        self,
        body: bytes = b"",
        *,
        status: int = 200,
        retry_after_s: int | None = None,
        is_cut_off: bool = False,
        is_silent: bool = False,
        instead: list[dict[str, Any]] | None = None,
    ) -> None:
        self.body = body
        self.status = status
        self.retry_after_s = retry_after_s
        self.is_cut_off = is_cut_off
        self.is_silent = is_silent
        self.instead = instead
        """Calls whose answers from the chain go back, in place of a body."""


class MisbehavingRpc:
    """Forwards to a chain, unless its script says otherwise."""

    def __init__(self, chain_url: str) -> None:
        self.script: Script = lambda _calls, _truth: None
        self.asked: list[list[str]] = []
        self._chain_url = chain_url
        self._released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """End; a caller that is kept waiting is let go."""
        self._released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        rpc = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Else each answer's body waits 40 ms for the caller to acknowledge its head.
            disable_nagle_algorithm = True

            def post(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                answer = rpc._answered(body)
                if answer.is_silent:
                    rpc._released.wait(30)
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                if answer.retry_after_s is not None:
                    self.send_header("Retry-After", str(answer.retry_after_s))
                length = len(answer.body) + (1_000 if answer.is_cut_off else 0)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                self.wfile.write(answer.body)
                self.close_connection = answer.is_cut_off

            def log_message(self, *_arguments: object) -> None:
                """Say nothing."""

        # The server's own name for it, which is not ours.
        return types.new_class("Posting", (Handler,), exec_body=_posting)

    def _answered(self, body: bytes) -> Answer:
        asked = json.loads(body)
        calls = asked if isinstance(asked, list) else [asked]
        self.asked.append([call["method"] for call in calls])
        truth = self._truth(body)
        answer = self.script(calls, truth) or Answer(truth)
        if answer.instead is None:
            return answer
        others = answer.instead if isinstance(asked, list) else answer.instead[0]
        return Answer(self._truth(json.dumps(others).encode()))

    def _truth(self, body: bytes) -> bytes:
        request = urllib.request.Request(  # noqa: S310  the address is the test's own
            self._chain_url, data=body, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
            content: bytes = response.read()
        return content


def _posting(names: dict[str, Any]) -> None:
    names["do_POST"] = lambda handler: handler.post()


@contextmanager
def misbehaving(chain_url: str) -> Iterator[MisbehavingRpc]:
    """A server for as long as the block lasts."""
    rpc = MisbehavingRpc(chain_url)
    rpc.start()
    try:
        yield rpc
    finally:
        rpc.stop()


def with_results(truth: bytes, change: Callable[[Any], Any]) -> Answer:
    """The truth with every result changed."""
    answers = json.loads(truth)
    for answer in answers if isinstance(answers, list) else [answers]:
        if answer.get("result") is not None:
            answer["result"] = change(answer["result"])
    return Answer(json.dumps(answers).encode())


class Behind:
    """A script: what is read from contracts comes from a replica some blocks behind the rest."""

    def __init__(self, blocks: int, *, knows_better: bool) -> None:
        """Know no block yet.

        Args:
            blocks: How far behind.
            knows_better: Whether it answers by its own newest block what it is asked of a newer
                one, which a sound one refuses.
        """
        self._blocks = blocks
        self._knows_better = knows_better
        self._numbers: dict[str, int] = {}

    def __call__(self, calls: list[dict[str, Any]], truth: bytes) -> "Answer | None":
        told = json.loads(truth)
        if calls[0]["method"] == "eth_getBlockByNumber":
            blocks = [one["result"] for one in (told if isinstance(told, list) else [told])]
            self._numbers |= {one["hash"]: int(one["number"], 16) for one in blocks if one}
        if calls[0]["method"] != "eth_call":
            return None
        own = max(0, max(self._numbers.values(), default=0) - self._blocks)
        if not self._knows_better and any(self._is_newer(call, own) for call in calls):
            refused = {"code": -32001, "message": "Resource not found"}
            answers = [{"jsonrpc": "2.0", "id": call["id"], "error": refused} for call in calls]
            return Answer(json.dumps(answers if isinstance(told, list) else answers[0]).encode())
        return Answer(
            instead=[
                call | {"params": [call["params"][0], hex(own)]}
                if call["params"][1] == "latest" or self._is_newer(call, own)
                else call
                for call in calls
            ]
        )

    def _is_newer(self, call: dict[str, Any], own: int) -> bool:
        at = call["params"][1]
        return isinstance(at, dict) and self._numbers[at["blockHash"]] > own


FORGED = "0x" + "ab" * 32


def lies_about(method: str, change: Any, *, like: tuple[str, ...] = ()) -> Script:
    """Another result of a method; of ``eth_call``, of these functions of the ledger alone."""
    selectors = {"0x" + LedgerCalls().abi.selector(name).hex() for name in like}

    def script(calls: list[dict[str, Any]], truth: bytes) -> Answer | None:
        is_meant = calls[0]["method"] == method
        if is_meant and selectors:
            is_meant = calls[0]["params"][0]["data"][:10] in selectors
        return with_results(truth, change) if is_meant else None

    return script


NOTHING_DONE = {"status": "0x0", "logs": []}


def once(script: Script) -> Script:
    """The first answer that a script would change, and no other."""
    changed: list[Answer] = []

    def first(calls: list[dict[str, Any]], truth: bytes) -> Answer | None:
        answer = None if changed else script(calls, truth)
        if answer is not None:
            changed.append(answer)
        return answer

    return first


def zeros(result: str) -> str:
    return "0x" + "0" * (len(result) - 2)


def renamed(field: str, value: object) -> Any:
    return lambda result: result | {field: value}


FAULTS: dict[str, tuple[Script, type[RpcError] | None, str]] = {
    "limited": (
        lambda _calls, _truth: Answer(status=429, retry_after_s=7),
        RpcLimitedError,
        "asks for fewer calls",
    ),
    "unavailable": (lambda _calls, _truth: Answer(status=503), RpcLimitedError, "HTTP 503"),
    "broken": (lambda _calls, _truth: Answer(b"oops", status=500), RpcUnreachableError, "HTTP 500"),
    "silent": (
        lambda _calls, _truth: Answer(is_silent=True),
        RpcUnreachableError,
        "no answer in time",
    ),
    "cut off": (
        lambda _calls, truth: Answer(truth, is_cut_off=True),
        RpcUnreachableError,
        "broke off",
    ),
    "no JSON": (lambda _calls, _truth: Answer(b"<html>"), RpcGarbledError, "no JSON-RPC"),
    "another block": (
        lies_about("eth_getBlockByNumber", renamed("number", "0xffff")),
        RpcGarbledError,
        "asked for block",
    ),
    "another transaction": (
        lies_about("eth_getTransactionReceipt", renamed("transactionHash", FORGED)),
        RpcGarbledError,
        "asked for transaction",
    ),
    "a failure that did something": (
        lies_about("eth_getTransactionReceipt", renamed("status", "0x0")),
        RpcGarbledError,
        r"failed, and gives \d+ events? of it",
    ),
    "a failure that is none in the next answer": (
        once(lies_about("eth_getTransactionReceipt", lambda told: told | NOTHING_DONE)),
        RpcGarbledError,
        r"failed in block \d+, and in its next answer something else",
    ),
    "a block that holds nothing": (
        lies_about("eth_getBlockByNumber", renamed("transactions", [])),
        RpcGarbledError,
        "which does not hold it",
    ),
    "another name": (
        lies_about("eth_sendRawTransaction", lambda _result: FORGED),
        RpcGarbledError,
        "calls it",
    ),
    "contracts that say nothing but zeros": (
        lies_about("eth_call", zeros),
        RpcGarbledError,
        "is coordinated by 0x0000",
    ),
    "shares and epochs that are all zeros": (
        lies_about("eth_call", zeros, like=("getContribution", "getEpoch")),
        None,
        "epoch 0 of job-00000000000a is open, and a block holds what it paid",
    ),
    "shares that are all zeros": (
        lies_about("eth_call", zeros, like=("getContribution",)),
        None,
        "4 nodes have no share in epoch 0 of job-00000000000a",
    ),
    "a replica that is behind": (
        Behind(4, knows_better=False),
        RpcRefusedError,
        "Resource not found",
    ),
    "a replica that is behind and answers all the same": (
        Behind(4, knows_better=True),
        None,
        "is open, and a block holds what it paid",
    ),
}
"""With what is raised, or None where its epoch alone waits, and what is said."""
