from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from hypergpu.chain.rpc.chain import EvmChain, Reception
from hypergpu.chain.rpc.client import REQUEST_BYTES_MAX, Call, HttpRpc, Pace
from hypergpu.chain.rpc.errors import (
    RpcGarbledError,
    RpcLimitedError,
    RpcRefusedError,
    RpcUnreachableError,
)
from hypergpu.chain.rpc.transport import HttpTransport, open_address

HASH = b"h" * 32
HEX = "0x" + HASH.hex()
BLOCK: dict[str, object] = {
    "number": "0x10",
    "hash": HEX,
    "parentHash": HEX,
    "timestamp": "0x64",
    "baseFeePerGas": "0x7",
    "gasLimit": "0x1c9c380",
    "transactions": [HEX],
}
RECEIPT: dict[str, object] = {
    "transactionHash": HEX,
    "blockNumber": "0x10",
    "blockHash": HEX,
    "status": "0x1",
    "gasUsed": "0x5208",
    "contractAddress": None,
    "logs": [],
}


class Answering:
    """A transport whose answers are computed from what was asked."""

    where = "http://chain.example"

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self._answer = answer
        self.bodies: list[bytes] = []

    def post(self, body: bytes) -> bytes:
        self.bodies.append(body)
        answer = self._answer(msgspec.json.decode(body))
        return answer if isinstance(answer, bytes) else msgspec.json.encode(answer)

    def close(self) -> None:
        """Nothing is held."""


def result(value: object) -> Callable[[Any], Any]:
    def answer(asked: Any) -> Any:
        if isinstance(asked, list):
            return [{"id": one["id"], "result": value} for one in asked]
        return {"id": asked["id"], "result": value}

    return answer


def error(code: int, message: str) -> Callable[[Any], Any]:
    def answer(asked: Any) -> Any:
        refusal = {"code": code, "message": message}
        if isinstance(asked, list):
            return [{"id": one["id"], "error": refusal} for one in asked]
        return {"id": asked["id"], "error": refusal}

    return answer


def chain(answer: Callable[[Any], Any], pace: Pace | None = None) -> EvmChain:
    return EvmChain(HttpRpc(Answering(answer), pace))


def test_a_call_gives_its_result() -> None:
    assert chain(result("0x7a69")).chain_id() == 31337
    assert chain(result(BLOCK)).head().number == 16


def test_a_batch_is_put_in_the_order_that_was_asked_however_it_comes_back() -> None:
    def backwards(asked: Any) -> Any:
        return [{"id": one["id"], "result": one["params"][0]} for one in reversed(asked)]

    rpc = HttpRpc(Answering(backwards))
    assert rpc.batch([Call("echo", (word,)) for word in "abc"]) == ["a", "b", "c"]


def test_batches_are_cut_to_what_the_rpc_takes() -> None:
    transport = Answering(result("0x1"))
    HttpRpc(transport, Pace(batch_max=2)).batch([Call("one")] * 5)
    assert [len(msgspec.json.decode(body)) for body in transport.bodies] == [2, 2, 1]
    single = Answering(result("0x1"))
    HttpRpc(single, Pace(batch_max=1)).batch([Call("one")] * 3)
    assert [type(msgspec.json.decode(body)) for body in single.bodies] == [dict] * 3


def test_batches_are_cut_by_their_size_too() -> None:
    transport = Answering(result("0x1"))
    HttpRpc(transport).batch([Call("one", ("a" * 600_000,))] * 5)
    assert max(len(body) for body in transport.bodies) <= REQUEST_BYTES_MAX
    assert len(transport.bodies) == 3


def test_one_refusal_in_a_batch_leaves_the_others() -> None:
    def half(asked: Any) -> Any:
        return [
            {"id": one["id"], "result": "0x1"}
            if number
            else {"id": one["id"], "error": {"code": -32000, "message": "no"}}
            for number, one in enumerate(asked)
        ]

    refused, taken = HttpRpc(Answering(half)).batch([Call("one"), Call("two")])
    assert isinstance(refused, RpcRefusedError)
    assert taken == "0x1"


def test_a_rate_limit_is_told_apart_from_a_refusal() -> None:
    with pytest.raises(RpcLimitedError, match="asks for fewer calls"):
        chain(error(-32005, "slow down")).chain_id()
    with pytest.raises(RpcLimitedError, match="asks for fewer calls"):
        chain(error(-32005, "slow down")).blocks([1, 2])
    with pytest.raises(RpcRefusedError, match="eth_chainId was refused: no such method"):
        chain(error(-32601, "no such method")).chain_id()


def test_calls_are_paced() -> None:
    waits: list[float] = []
    rpc = HttpRpc(Answering(result("0x1")), Pace(requests_per_s=10), wait=waits.append)
    for _ in range(3):
        rpc.call(Call("one"))
    assert waits[0] == 0.0
    assert all(0.05 < wait <= 0.1 for wait in waits[1:])


GARBLED: dict[str, Callable[[Any], Any]] = {
    "a page": lambda _: b"<html>busy</html>",
    "nothing": lambda _: b"",
    "no text": lambda _: b"\xff\xfe",
    "too deep": lambda _: b"[" * 5_000,
    "another's answer": lambda _: {"id": 999, "result": "0x1"},
    "no result": lambda asked: {"id": asked["id"]},
    "an id of text": lambda asked: {"id": str(asked["id"]), "result": "0x1"},
    "digits alone": result("7a69"),
    "no digits": result("0x"),
    "an underscore": result("0x1_0"),
    "more than 256 bits": result("0x" + "f" * 65),
    "a number": result(5),
    "null": result(None),
}


@pytest.mark.parametrize("case", GARBLED)
def test_what_no_chain_answers_is_garbled(case: str) -> None:
    with pytest.raises(RpcGarbledError, match="answered"):
        chain(GARBLED[case]).chain_id()


def test_a_batch_with_other_questions_answers_is_garbled() -> None:
    def repeated(asked: Any) -> Any:
        return [{"id": asked[0]["id"], "result": None} for _ in asked]

    with pytest.raises(RpcGarbledError, match="other questions' answers"):
        chain(repeated).inclusions([HASH, HASH])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("number", "0x11"),
        ("hash", "0x12"),
        ("parentHash", None),
        ("transactions", 5),
        ("timestamp", "now"),
    ],
)
def test_a_block_that_is_not_the_one_asked_for_is_garbled(field: str, value: object) -> None:
    assert chain(result(BLOCK)).blocks([16])[0] is not None
    with pytest.raises(RpcGarbledError):
        chain(result(BLOCK | {field: value})).blocks([16])


@pytest.mark.parametrize(
    ("field", "value"),
    [("transactionHash", "0x" + "ab" * 32), ("status", "0x2"), ("blockHash", None), ("logs", 1)],
)
def test_a_receipt_that_is_not_the_one_asked_for_is_garbled(field: str, value: object) -> None:
    assert chain(result(RECEIPT)).inclusions([HASH])[0] is not None
    with pytest.raises(RpcGarbledError):
        chain(result(RECEIPT | {field: value})).inclusions([HASH])


def test_a_transaction_taken_under_another_name_is_garbled() -> None:
    assert chain(result(HEX)).send([(HASH, b"raw")])[0].reception is Reception.TAKEN
    with pytest.raises(RpcGarbledError, match="calls it"):
        chain(result(HEX)).send([(b"x" * 32, b"raw")])


@pytest.mark.parametrize(
    ("words", "reception"),
    [
        ("transaction already imported", Reception.KNOWN),
        ("already known", Reception.KNOWN),
        ("nonce too low: next nonce 5, tx nonce 4", Reception.NONCE_USED),
        ("replacement transaction underpriced", Reception.FEE_TOO_LOW),
        ("max fee per gas less than block base fee", Reception.FEE_TOO_LOW),
        ("Insufficient funds for gas * price + value", Reception.UNFUNDED),
        ("txpool is full", Reception.POOL_FULL),
        ("execution reverted", Reception.REFUSED),
    ],
)
def test_how_chains_say_no_is_understood(words: str, reception: Reception) -> None:
    (sent,) = chain(error(-32000, words)).send([(HASH, b"raw")])
    assert (sent.reception, sent.words) == (reception, words)


def test_what_may_be_a_secret_in_an_address_is_in_no_error() -> None:
    transport = HttpTransport("http://user:password@127.0.0.1:9/v2/a-key", timeout_s=1)
    with pytest.raises(RpcUnreachableError) as caught:
        transport.post(b"{}")
    assert str(caught.value) == (
        "the chain's RPC at http://127.0.0.1:9 did not answer: nobody listens there"
    )


@pytest.mark.parametrize(
    "url",
    ["ws://host/KEY", "host:8545", "http://", "file:///etc/passwd", "http://host:99999x/v3/KEY"],
)
def test_an_address_that_is_not_http_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="begins with http") as caught:
        HttpTransport(url)
    assert "KEY" not in str(caught.value)
    assert open_address(url) == ""


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://127.0.0.1:8545", "http://127.0.0.1:8545"),
        ("https://chain.example/", "https://chain.example"),
        ("http://[::1]:8545", "http://[::1]:8545"),
        ("https://chain.example/v3/KEY", ""),
        ("https://chain.example?key=KEY", ""),
        ("https://chain.example/#KEY", ""),
        ("https://user:KEY@chain.example", ""),
        ("https://KEY@chain.example", ""),
    ],
)
def test_only_an_address_without_anything_that_may_be_a_secret_is_handed_out(
    url: str, told: str
) -> None:
    assert open_address(url) == told


@pytest.mark.parametrize(
    ("told", "words"),
    [("0x768d3013", b"\x76\x8d\x30\x13"), ("nothing", b""), ({"a": 1}, b""), ("0" * 99_999, b"")],
)
def test_what_a_contract_said_comes_with_the_refusal(told: object, words: bytes) -> None:
    def reverting(asked: Any) -> Any:
        refusal = {"code": 3, "message": "execution reverted", "data": told}
        return {"id": asked["id"], "error": refusal}

    with pytest.raises(RpcRefusedError) as refused:
        chain(reverting).chain_id()
    assert refused.value.words == words
