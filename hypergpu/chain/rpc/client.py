"""JSON-RPC 2.0 over a transport: calls, batches, and answers that are checked before use."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from hypergpu.chain.rpc.errors import (
    RpcError,
    RpcGarbledError,
    RpcLimitedError,
    RpcRefusedError,
)
from hypergpu.chain.rpc.transport import Transport

REQUEST_BYTES_MAX = 1_500_000
"""Anvil and several providers take two megabytes at most."""
# -32005 is the standard's "limit exceeded", -32029 and 429 what providers answer as well.
_LIMITED_CODES = frozenset({-32005, -32029, 429})
LOGS = "eth_getLogs"
# Several say so too of a range of blocks that is too wide, where no waiting helps.
_RATE_WORDS = ("rate", "too many requests", "request count", "per second", "capacity", "quota")
_SHOWN = 200
_WORDS_MAX = 10_000


class Call(NamedTuple):
    """One method with its parameters, both as JSON-RPC has them."""

    method: str
    parameters: tuple[Any, ...] = ()


class Rpc(Protocol):
    """A chain's RPC, however it is reached."""

    where: str
    pace: "Pace"

    def call(self, call: Call) -> object:
        """The result of one call.

        Raises:
            RpcError: there is none.
        """

    def batch(self, calls: Sequence[Call]) -> "list[object | RpcRefusedError]":
        """The results of several calls, in their order; what is refused alone is given back.

        Raises:
            RpcError: the batch as a whole failed; some of it may have taken effect.
        """

    def wait(self, seconds: float, /) -> object:
        """Let some seconds pass before something is asked again."""

    def close(self) -> None:
        """Let go of connections."""


class Pace(NamedTuple):
    """How much an RPC bears."""

    batch_max: int = 100
    """Calls in one request; 1 for those that take no batches."""
    requests_per_s: int = 0
    """0: no limit."""
    log_blocks_max: int = 100
    """Blocks whose logs one call may ask for."""


class _Refusal(msgspec.Struct):
    code: int
    message: str = ""
    data: Any = None

    @property
    def words(self) -> bytes:
        """What a contract said, which clients give as hex digits or not at all."""
        if not isinstance(self.data, str) or len(self.data) > _WORDS_MAX:
            return b""
        try:
            return bytes.fromhex(self.data.removeprefix("0x"))
        except ValueError:
            return b""


class _Answer(msgspec.Struct):
    id: int | None = None
    result: Any = msgspec.UNSET
    error: _Refusal | None = None


class HttpRpc:
    """Numbers its calls and believes only answers that carry the number asked."""

    def __init__(
        self,
        transport: Transport,
        pace: Pace | None = None,
        *,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        """Speak through ``transport``.

        Args:
            transport: Carries the bytes.
            pace: What the RPC bears.
            wait: Waits for some seconds; a pipeline gives one that ends early when it stops.
        """
        self.where = transport.where
        self._transport = transport
        self.pace = pace or Pace()
        self.wait = wait
        self._next_id = 1
        self._next_at_s = 0.0

    def call(self, call: Call) -> object:
        number, body = self._numbered(call)
        answer = self._decoded(self._post(body), _Answer)
        outcome = self._outcome(call, number, answer)
        if isinstance(outcome, RpcRefusedError):
            raise outcome
        return outcome

    def batch(self, calls: Sequence[Call]) -> list[object | RpcRefusedError]:
        outcomes: list[object | RpcRefusedError] = []
        for part in self._parts(calls):
            outcomes += self._batched(part)
        return outcomes

    def close(self) -> None:
        self._transport.close()

    def _batched(self, part: list[tuple[Call, int, bytes]]) -> list[object | RpcRefusedError]:
        if self.pace.batch_max == 1:
            ((call, number, body),) = part
            answer = self._decoded(self._post(body), _Answer)
            return [self._outcome(call, number, answer)]
        body = b"[" + b",".join(body for _, _, body in part) + b"]"
        answers = self._decoded(self._post(body), list[_Answer] | _Answer)
        if isinstance(answers, _Answer):
            # The whole batch was refused with one error.
            outcome = self._outcome(Call("the batch"), answers.id, answers)
            raise outcome if isinstance(outcome, RpcError) else self._garbled("no list of answers")
        by_id = {answer.id: answer for answer in answers}
        if len(by_id) != len(answers) or set(by_id) != {number for _, number, _ in part}:
            raise self._garbled("other questions' answers")
        return [self._outcome(call, number, by_id[number]) for call, number, _ in part]

    def _numbered(self, call: Call) -> tuple[int, bytes]:
        number, self._next_id = self._next_id, self._next_id + 1
        request = {
            "jsonrpc": "2.0",
            "id": number,
            "method": call.method,
            "params": list(call.parameters),
        }
        return number, msgspec.json.encode(request)

    def _parts(self, calls: Sequence[Call]) -> Iterator[list[tuple[Call, int, bytes]]]:
        part: list[tuple[Call, int, bytes]] = []
        size_bytes = 0
        for call in calls:
            number, body = self._numbered(call)
            is_full = size_bytes + len(body) > REQUEST_BYTES_MAX
            if part and (is_full or len(part) >= self.pace.batch_max):
                yield part
                part, size_bytes = [], 0
            part.append((call, number, body))
            size_bytes += len(body)
        if part:
            yield part

    def _post(self, body: bytes) -> bytes:
        if self.pace.requests_per_s:
            self.wait(max(0.0, self._next_at_s - time.monotonic()))
            self._next_at_s = time.monotonic() + 1 / self.pace.requests_per_s
        return self._transport.post(body)

    def _decoded(self, answer: bytes, wanted: Any) -> Any:
        try:
            return msgspec.json.decode(answer, type=wanted)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise self._garbled(f"no JSON-RPC: {answer[:_SHOWN]!r}") from None

    def _outcome(
        self, call: Call, number: int | None, answer: _Answer
    ) -> "object | RpcRefusedError":
        if answer.error is not None:
            if _is_limited(call, answer.error):
                raise RpcLimitedError(
                    f"the chain's RPC at {self.where} asks for fewer calls: "
                    f"{answer.error.message[:_SHOWN]}"
                )
            error = answer.error
            return RpcRefusedError(call.method, error.code, error.message[:_SHOWN], error.words)
        if answer.id != number:
            raise self._garbled(f"answer {answer.id} to question {number}")
        if answer.result is msgspec.UNSET:
            raise self._garbled(f"neither result nor error to {call.method}")
        result: object = answer.result
        return result

    def _garbled(self, what: str) -> RpcGarbledError:
        return RpcGarbledError(f"the chain's RPC at {self.where} answered {what}")


def _is_limited(call: Call, error: _Refusal) -> bool:
    """Whether an RPC asks for fewer calls."""
    if error.code not in _LIMITED_CODES:
        return False
    words = error.message.lower()
    return call.method != LOGS or any(each in words for each in _RATE_WORDS)
