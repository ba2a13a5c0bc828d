"""A replica that answers calls, as the coordinator has it."""

from collections import Counter

from coordinator.core.serving.prompt_prefixes import HeldPrefixes
from coordinator.core.serving.routing import ReplicaLoad, next_pace_ms, next_read_pace_ms
from coordinator.shell.kinds.serving.open_call import OpenCall
from coordinator.shell.kinds.serving.replica_link import ReplicaLink
from coordinator.shell.kinds.serving.token_counter import AnswerCounter
from coordinator.shell.nodes.control_stream import ControlStream
from hypergpu.clock import monotonic_ms
from hypergpu.ids import NodeId
from hypergpu.serving.calls import AnswerBegun, AnswerPart, AnswerToken, ReplicaReady
from hypergpu.serving.tuned_model import Tuning
from hypergpu.units import Milliseconds


class ReadyReplica:
    """A replica that answers calls."""

    def __init__(
        self,
        node: NodeId,
        lease: int,
        link: ReplicaLink,
        ready: ReplicaReady,
        counter: AnswerCounter | None,
    ) -> None:
        self.node = node
        self.lease = lease
        self.counter = counter
        self.link = link
        self.ready = ready
        self.ms_per_token = 0.0
        self.ms_per_read_token = 0.0
        self.held_prefixes = HeldPrefixes()
        """Beginnings of prompts that it is expected to hold."""
        self.calls: dict[int, OpenCall] = {}
        self.offer = 0
        """Number of the offer of a version that it is taking up; 0: none."""
        self.offered = 0
        """The version of that offer."""
        self.failed_offers: Counter[int] = Counter()
        """Offers that failed, by their versions."""

    def is_of(self, lease: int, stream: ControlStream) -> bool:
        """Whether it is what a node has under a lease, and says so on this stream."""
        return self.lease == lease and self.link.is_on(stream)

    def holds_version_of(self, call: OpenCall) -> bool:
        """Whether it can go on with a call by the version that its answer began with."""
        version = call.version
        return version is None or not call.tokens_out or version in self.ready.versions

    def load(
        self, call: OpenCall, *, round_trip_ms: Milliseconds, calls_most: int, newest: Tuning | None
    ) -> ReplicaLoad:
        """The replica as the router sees it for one more call."""
        reading_calls = [each for each in self.calls.values() if not each.reading.is_over]
        return ReplicaLoad(
            self.node,
            round_trip_ms,
            len(self.calls),
            calls_most,
            self.ms_per_token,
            self.rounds_behind(newest),
            prompt_tokens=call.reading.prefixes.tokens,
            held_tokens=self.expected_tokens(call),
            ms_per_read_token=self.ms_per_read_token,
            unread_tokens=sum(
                each.reading.prefixes.tokens - each.reading.expected_tokens
                for each in reading_calls
            ),
        )

    def expected_tokens(self, call: OpenCall) -> int:
        """Tokens of a call's prompt that it is expected to hold."""
        if not self.ready.keeps_prefixes:
            return 0
        return self.held_prefixes.tokens_of(call.reading.prefixes.marks, monotonic_ms())

    def note_parts(
        self, call: OpenCall, parts: list[AnswerPart], round_trip_ms: Milliseconds
    ) -> None:
        """Measure it by parts of an answer that are there now."""
        now_ms = monotonic_ms()
        for part in parts:
            if isinstance(part, AnswerBegun):
                self._note_begin(call, part)
        tokens = sum(isinstance(part, AnswerToken) for part in parts)
        calls = max(1, len(self.calls))
        if tokens and call.reading.is_over:
            gap_ms = (now_ms - call.heard_ms) / tokens
            self.ms_per_token = next_pace_ms(self.ms_per_token, gap_ms, calls)
        elif tokens:
            call.reading.is_over = True
            read_ms = now_ms - call.reading.given_ms - round_trip_ms
            self.ms_per_read_token = next_read_pace_ms(
                self.ms_per_read_token, read_ms, call.reading.unheld_tokens, calls
            )
        call.heard_ms = now_ms

    def _note_begin(self, call: OpenCall, begin: AnswerBegun) -> None:
        """It reads a prompt, and says how much of it was there before."""
        call.reading.unheld_tokens = begin.prompt_tokens - begin.held_tokens
        if call.reading.expected_tokens and begin.prompt_tokens:
            held_share = begin.held_tokens / begin.prompt_tokens
            self.held_prefixes.note_missing(call.reading.prefixes.marks, held_share)

    def end_call(self, call: OpenCall) -> None:
        """It answers a call no more, and keeps what it has read for it."""
        self.calls.pop(call.number, None)
        if self.ready.keeps_prefixes and call.reading.is_over:
            self.held_prefixes.note_read(call.reading.prefixes.marks, monotonic_ms())

    def rounds_behind(self, newest: Tuning | None) -> int:
        """Rounds between the newest version of a training's model and the newest that it holds."""
        version = self.ready.newest_version
        return 0 if newest is None or version is None else newest.version.round - version
