"""A replica among its calls: turns, memory, and calls that nobody wants any more."""

from collections import deque

import pytest

from gpu_node.shell.worker.protocol import CallOutput, CallWork, CancelCall, DoWork
from gpu_node.shell.worker.serving.engine import CallTooLongError, EngineMemory, is_last
from gpu_node.shell.worker.serving.replica_engine import EngineTraits, ReplicaEngine
from gpu_node.shell.worker.trainer import ShardAbortedError, ShardCallbacks
from hypergpu.assignment import Lease
from hypergpu.blobs import BlobRef
from hypergpu.ids import Digest, JobId
from hypergpu.packed_work import pack_work
from hypergpu.serving.calls import (
    AnswerBegun,
    AnswerEnded,
    AnswerPart,
    AnswerRefused,
    AnswerToken,
    ModelCall,
    ReplicaReady,
    pack_call,
    unpack_parts,
)
from hypergpu.serving.serve_request import ENGINE_KIND, Replica
from hypergpu.units import Bytes

LEASE = Lease(JobId("job-1"), 0, 3)
REPLICA = Replica(
    model="count", files={"base": BlobRef(Digest("d" * 64), Bytes(1))}, conversations_most=8
)


class CountingConversation:
    """Answers with numbers from 0."""

    def __init__(self, engine: "CountingEngine", tokens: int) -> None:
        self.tokens_most = tokens
        self._engine = engine
        self._count = 0
        self._is_open = False

    def step(self) -> list[AnswerPart]:
        """One number."""
        if not self._is_open:
            self._is_open = True
            self._engine.open_conversations += 1
            return [AnswerBegun(1)]
        if self._count == self.tokens_most:
            return [AnswerEnded("length")]
        self._count += 1
        self._engine.steps += 1
        return [AnswerToken(self._count - 1)]

    def close(self) -> None:
        """Give the state back."""
        if self._is_open:
            self._is_open = False
            self._engine.open_conversations -= 1


class CountingEngine:
    """Counts as far as it is asked to."""

    tokens_most = 50
    device = "cpu"
    memory = EngineMemory(Bytes(1_000), Bytes(10))

    def __init__(self) -> None:
        self.open_conversations = 0
        self.steps = 0

    def open(self, call: ModelCall) -> CountingConversation:
        """One that counts to the call's limit."""
        tokens = call.new_tokens_most or 1
        if tokens > self.tokens_most:
            raise CallTooLongError("too many")
        return CountingConversation(self, tokens)


class Loop:
    """The worker's loop: gives what a script says once so many outputs were sent, and aborts."""

    def __init__(self, *script: tuple[int, CallWork | CancelCall], outputs: int) -> None:
        self._script = deque(script)
        self._outputs_most = outputs
        self.outputs: list[tuple[int, list[AnswerPart]]] = []
        self.callbacks = ShardCallbacks(
            self._raise_if_aborted, lambda _: None, lambda _: None, self._next_call, self._send
        )

    def _raise_if_aborted(self) -> None:
        if len(self.outputs) >= self._outputs_most:
            raise ShardAbortedError

    def _next_call(self, _: float) -> CallWork | CancelCall | None:
        if self._script and len(self.outputs) >= self._script[0][0]:
            return self._script.popleft()[1]
        return None

    def _send(self, output: CallOutput) -> None:
        parts = unpack_parts(output.body)
        assert output.is_last == is_last(parts)
        self.outputs.append((output.call, parts))

    def run(self, engine: CountingEngine, state_bytes_most: int) -> None:
        """Answer until the script's outputs were sent."""
        request = DoWork(LEASE, pack_work(ENGINE_KIND, REPLICA))
        traits = EngineTraits(
            ("torch",), continuation="identical", state_bytes_most=state_bytes_most
        )
        with pytest.raises(ShardAbortedError):
            ReplicaEngine(request, self.callbacks, engine, REPLICA, traits).answer_calls()

    def last_parts(self) -> dict[int, AnswerPart]:
        """The last part of each call, in the order in which calls came to it."""
        ends: dict[int, AnswerPart] = {}
        for call, parts in self.outputs:
            ends.pop(call, None)
            ends[call] = parts[-1]
        return ends


def call(number: int, tokens: int) -> CallWork:
    return CallWork(LEASE, number, pack_call(ModelCall(text="count", new_tokens_most=tokens)))


def test_a_replica_says_first_what_it_is() -> None:
    loop = Loop(outputs=1)
    loop.run(CountingEngine(), 1_000)
    ((number, (ready,)),) = loop.outputs
    assert number == 0
    assert isinstance(ready, ReplicaReady)
    assert (ready.tokens_most, ready.weights_bytes, ready.token_bytes) == (50, 1_000, 10)
    assert ready.fingerprint_of(None) == f"{ready.fingerprint}-cpu-identical"


def test_a_short_answer_ends_beside_a_long_one() -> None:
    loop = Loop((1, call(1, 20)), (1, call(2, 2)), outputs=1 + 22 + 4)
    loop.run(CountingEngine(), 1_000)
    assert list(loop.last_parts()) == [0, 2, 1]


def test_a_call_waits_until_there_is_memory_for_its_state() -> None:
    engine = CountingEngine()
    loop = Loop((1, call(1, 6)), (1, call(2, 6)), (1, call(3, 3)), outputs=1 + 8 + 8 + 5)
    loop.run(engine, 100)  # Ten tokens.
    begins = [number for number, parts in loop.outputs if isinstance(parts[0], AnswerBegun)]
    ends = [number for number, parts in loop.outputs if is_last(parts)]
    assert begins == [1, 2, 3]
    assert ends.index(1) == 0
    assert loop.outputs.index((1, [AnswerEnded("length")])) < loop.outputs.index(
        (2, [AnswerBegun(1)])
    )
    assert engine.open_conversations == 0


def test_a_call_for_which_there_is_never_memory_is_refused_and_may_go_elsewhere() -> None:
    loop = Loop((1, call(1, 11)), (1, call(2, 51)), (1, call(3, 2)), outputs=1 + 1 + 1 + 4)
    loop.run(CountingEngine(), 100)
    ends = loop.last_parts()
    assert isinstance(ends[1], AnswerRefused)
    assert not ends[1].is_lasting
    assert isinstance(ends[2], AnswerRefused)
    assert ends[2].is_lasting
    assert ends[2].is_too_long
    assert ends[3] == AnswerEnded("length")


def test_a_call_that_nobody_wants_takes_not_one_more_token() -> None:
    engine = CountingEngine()
    loop = Loop((1, call(1, 40)), (5, CancelCall(LEASE, 1)), (5, call(2, 1)), outputs=5 + 3)
    loop.run(engine, 1_000)
    assert [number for number, _ in loop.outputs] == [0, 1, 1, 1, 1, 2, 2, 2]
    assert engine.steps == 3 + 1
    assert engine.open_conversations == 0


def test_a_call_that_is_cancelled_while_it_waits_is_never_begun() -> None:
    engine = CountingEngine()
    loop = Loop(
        (1, call(1, 9)),
        (1, call(2, 9)),
        (3, CancelCall(LEASE, 2)),
        (3, call(3, 1)),
        outputs=1 + 11 + 3,
    )
    loop.run(engine, 100)
    assert {number for number, _ in loop.outputs} == {0, 1, 3}


def test_conversations_give_their_memory_back_as_the_lease_ends() -> None:
    engine = CountingEngine()
    loop = Loop((1, call(1, 40)), (1, call(2, 40)), outputs=9)
    loop.run(engine, 1_000)
    assert engine.open_conversations == 0
