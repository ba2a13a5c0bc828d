from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from hypergpu.chain.rpc.client import HttpRpc, Pace
from hypergpu.chain.rpc.errors import RpcGarbledError, RpcLimitedError, RpcRefusedError
from hypergpu.chain.rpc.logs import logs

HELD = [0, 7, 99, 100, 250, 999]
"""Blocks with a log each."""
Refuses = Callable[[int], "tuple[int, str] | None"]


class Archive:
    """A transport to an RPC that has logs, and refuses ranges by how wide they are."""

    where = "http://chain.example"

    def __init__(self, refuses: Refuses = lambda _width: None) -> None:
        self._refuses = refuses
        self.asked: list[list[range]] = []
        """In each request."""
        self.served: list[range] = []

    def post(self, body: bytes) -> bytes:
        asked = msgspec.json.decode(body)
        calls = asked if isinstance(asked, list) else [asked]
        self.asked.append([blocks_of(call) for call in calls])
        answers = [self._answer(call) for call in calls]
        return msgspec.json.encode(answers if isinstance(asked, list) else answers[0])

    def close(self) -> None:
        """Nothing is held."""

    def _answer(self, call: Any) -> dict[str, Any]:
        blocks = blocks_of(call)
        refused = self._refuses(len(blocks))
        if refused is not None:
            code, message = refused
            return {"id": call["id"], "error": {"code": code, "message": message}}
        self.served.append(blocks)
        return {"id": call["id"], "result": [number for number in HELD if number in blocks]}


def blocks_of(call: Any) -> range:
    (wanted,) = call["params"]
    assert wanted["topics"] == ["0x01"]
    return range(int(wanted["fromBlock"], 16), int(wanted["toBlock"], 16) + 1)


def found(transport: Archive, pace: Pace, blocks: range = range(1000)) -> list[object]:
    told = []
    for part in logs(HttpRpc(transport, pace), {"topics": ["0x01"]}, blocks):
        assert part.next_block <= blocks.stop
        told += part.entries
    return told


def test_ranges_are_as_wide_as_the_rpc_bears_and_some_in_a_request() -> None:
    transport = Archive()
    assert found(transport, Pace(4, 0, 100)) == HELD
    assert [len(asked) for asked in transport.asked] == [4, 4, 2]
    assert transport.served == [range(at, at + 100) for at in range(0, 1000, 100)]
    assert found(transport, Pace(4, 0, 100), range(250, 1000)) == [250, 999]
    assert found(transport, Pace(4, 0, 100), range(5, 5)) == []


def test_an_rpc_without_batches_is_asked_for_one_range_at_a_time() -> None:
    transport = Archive()
    assert found(transport, Pace(1, 0, 300)) == HELD
    assert transport.asked == [
        [range(300)],
        [range(300, 600)],
        [range(600, 900)],
        [range(900, 1000)],
    ]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-32005, "query returned more than 10000 results"),
        (-32005, "limit exceeded"),
        (-32005, "block range too large, max range: 10"),
        (-32602, "range 100 exceeds limit of 10"),
        (-32602, "query block range exceeds server limit, narrow your filter: 10"),
        (-32614, "eth_getLogs is limited to a 10 range"),
        (-32600, "You can make eth_getLogs requests with up to a 10 block range"),
        (-32000, "logs matched by query exceeds limit of 10000"),
        (-32011, "no backend is currently healthy to serve traffic"),
    ],
)
@pytest.mark.parametrize("most", [99, 10, 1])
@pytest.mark.parametrize("at_once", [1, 4])
def test_a_range_that_is_refused_is_halved_until_it_is_not(
    code: int, words: str, most: int, at_once: int
) -> None:
    transport = Archive(lambda width: (code, words) if width > most else None)
    assert found(transport, Pace(at_once, 0, 100)) == HELD
    assert [number for blocks in transport.served for number in blocks][:1000] == list(range(1000))
    # It is not asked again for what it has refused.
    assert sum(len(blocks) > most for asked in transport.asked for blocks in asked) <= 7 * at_once


def test_what_is_refused_of_a_single_block_is_refused() -> None:
    transport = Archive(lambda _width: (-32601, "the method eth_getLogs does not exist"))
    with pytest.raises(RpcRefusedError, match="the method eth_getLogs does not exist"):
        found(transport, Pace(1, 0, 100))
    assert [len(blocks) for (blocks,) in transport.asked] == [100, 50, 25, 12, 6, 3, 1]


def test_a_batch_that_is_refused_as_a_whole_is_asked_for_less() -> None:
    class Together(Archive):
        def post(self, body: bytes) -> bytes:
            answer = super().post(body)
            if sum(map(len, self.asked[-1])) <= 50:
                return answer
            del self.served[-len(self.asked[-1]) :]
            refusal = {"code": -32003, "message": "response too large"}
            return msgspec.json.encode({"id": None, "error": refusal})

    transport = Together()
    assert found(transport, Pace(4, 0, 100)) == HELD
    assert [number for blocks in transport.served for number in blocks] == list(range(1000))


@pytest.mark.parametrize("words", ["daily request count exceeded, request rate limited", "rate"])
def test_an_rpc_that_asks_for_fewer_calls_is_left_alone_for_a_while(words: str) -> None:
    waits: list[float] = []
    busy = [True, True, False, True, False]

    def refuses(_width: int) -> tuple[int, str] | None:
        return (-32005, words) if busy and busy.pop(0) else None

    transport = Archive(refuses)
    rpc = HttpRpc(transport, Pace(1, 0, 500), wait=waits.append)
    parts = list(logs(rpc, {"topics": ["0x01"]}, range(1000)))
    assert [number for part in parts for number in part.entries] == HELD
    assert waits == [1, 2, 1]
    assert [len(blocks) for (blocks,) in transport.asked] == [500] * 5


def test_an_rpc_that_never_bears_more_is_given_up() -> None:
    waits: list[float] = []
    transport = Archive(lambda _width: (-32005, "too many requests"))
    rpc = HttpRpc(transport, Pace(1, 0, 100), wait=waits.append)
    with pytest.raises(RpcLimitedError, match="asks for fewer calls: too many requests"):
        list(logs(rpc, {"topics": ["0x01"]}, range(1000)))
    assert waits == [1, 2, 4, 8, 16]


def test_an_rpc_that_wants_an_hours_rest_is_not_waited_for() -> None:
    class Closed(Archive):
        def post(self, body: bytes) -> bytes:
            raise RpcLimitedError("HTTP 429", wait_ms=3_600_000)

    waits: list[float] = []
    rpc = HttpRpc(Closed(), Pace(1, 0, 100), wait=waits.append)
    with pytest.raises(RpcLimitedError):
        list(logs(rpc, {"topics": ["0x01"]}, range(1000)))
    assert waits == []


def test_what_is_no_list_is_not_believed() -> None:
    class Wrong(Archive):
        def _answer(self, call: Any) -> dict[str, Any]:
            return {"id": call["id"], "result": None}

    with pytest.raises(RpcGarbledError, match="gave no list of logs"):
        found(Wrong(), Pace(1, 0, 100))
