"""The logs of many blocks, some ranges at a time: no RPC gives those of a whole chain at once."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hypergpu.chain.rpc.client import LOGS, Call, Rpc
from hypergpu.chain.rpc.errors import RpcGarbledError, RpcLimitedError, RpcRefusedError

_RANGES_AT_ONCE = 10
"""Looked up one after the other, within the time that one request has."""
_WAITS_S = (1, 2, 4, 8, 16)
"""After each time in a row that an RPC asks for fewer calls."""
_WAIT_MAX_S = 60


class Logs(NamedTuple):
    """What a request found."""

    next_block: int
    """The first that is not read yet."""
    entries: list[object]


def logs(rpc: Rpc, wanted: Mapping[str, object], blocks: range) -> Iterator[Logs]:
    """What a filter finds in some blocks, ascending, a request at a time.

    A range that is refused is asked for again by halves. Neither words nor codes are told apart:
    they vary, and what is refused for another reason is refused of a single block as well. An RPC
    that asks for fewer calls is left alone for a while, for reading may take many.

    Args:
        rpc: Is asked, for as many blocks in a range as it bears.
        wanted: Addresses and topics, as JSON-RPC has them.
        blocks: By number.

    Raises:
        RpcError: it cannot be asked, or refuses a range of one block.
    """
    width, first = rpc.pace.log_blocks_max, blocks.start
    while first < blocks.stop:
        part = range(first, min(first + width * _at_once(rpc), blocks.stop))
        ranges = [part[at : at + width] for at in range(0, len(part), width)]
        found: list[object] = []
        for each, answer in zip(ranges, _answers(rpc, wanted, ranges), strict=True):
            if isinstance(answer, RpcRefusedError):
                if len(each) == 1:
                    raise answer
                width = len(each) // 2
                break
            if not isinstance(answer, list):
                raise RpcGarbledError("the chain's RPC gave no list of logs")
            found += answer
            first = each.stop
        yield Logs(first, found)


def _at_once(rpc: Rpc) -> int:
    return min(_RANGES_AT_ONCE, rpc.pace.batch_max)


def _answers(
    rpc: Rpc, wanted: Mapping[str, object], ranges: Sequence[range]
) -> Sequence[object | RpcRefusedError]:
    asked = [
        {**wanted, "fromBlock": hex(each.start), "toBlock": hex(each.stop - 1)} for each in ranges
    ]
    calls = [Call(LOGS, (one,)) for one in asked]
    for wait_s in _WAITS_S:
        try:
            return _batch(rpc, calls)
        except RpcLimitedError as limited:
            if limited.wait_ms > 1000 * _WAIT_MAX_S:
                raise
            rpc.wait(max(wait_s, limited.wait_ms / 1000))
    return _batch(rpc, calls)


def _batch(rpc: Rpc, calls: Sequence[Call]) -> Sequence[object | RpcRefusedError]:
    try:
        return rpc.batch(calls)
    except RpcRefusedError as refused:
        # Of all of them at once, as where they are too much for one answer together.
        return [refused] * len(calls)
