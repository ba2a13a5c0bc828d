"""A ring in virtual time: the machine that coordinators run, over stages that only take time.

The text that its model writes follows from a session's number and the position alone, so that
whatever a ring does to a session can be held against what it should give.
"""

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from blake3 import blake3
from msgspec.structs import replace

from coordinator.core.rings.ring import advance, rejection
from coordinator.core.rings.ring_events import (
    DropSession,
    PassReturned,
    ReplayStates,
    RingCommand,
    RingEvent,
    SendPass,
    SessionOpened,
    SessionResult,
    StageBecameReady,
    StageLost,
    StatesReplayed,
)
from coordinator.core.rings.ring_state import (
    PassSegment,
    Ring,
    RingLimits,
    RingStage,
    StagePace,
)

TextRule = Callable[[int, int], int]
"""The token that a session has at a position."""


def random_text(session: int, position: int) -> int:
    """Tokens that nobody could guess."""
    return int.from_bytes(blake3(f"{session} {position}".encode()).digest()[:3], "little")


def repeated_text(session: int, position: int) -> int:
    """Tokens that come again after 37 places, as where a text is edited or quoted."""
    return random_text(session, position % 37)


class VirtualAnswer(NamedTuple):
    """What a session got."""

    tokens: tuple[int, ...]
    times_us: tuple[float, ...]
    """When each came."""


class StageKill(NamedTuple):
    """A stage that is lost for a while."""

    at_us: float
    stage: int
    back_us: float
    """Time until another node holds its layers."""


class StageWay(NamedTuple):
    """Times of a stage's messages on their way."""

    arrive_us: float
    """To it, from whoever sends it hidden states or tokens."""
    leave_us: float
    """From it to whoever drives the ring; 0: it sends them to the next stage itself."""


def relayed_ways(hop_us: Sequence[Sequence[float]]) -> list[StageWay]:
    """Ways of a ring in which all goes through the driver.

    Args:
        hop_us: ``[from][to]`` of stages in their order, the driver behind them.
    """
    driver = len(hop_us) - 1
    return [StageWay(hop_us[driver][stage], hop_us[stage][driver]) for stage in range(driver)]


def direct_ways(hop_us: Sequence[Sequence[float]]) -> list[StageWay]:
    """The same where each stage sends to the next one, and the last one to the driver."""
    driver = len(hop_us) - 1
    return [
        StageWay(
            hop_us[stage - 1 if stage else driver][stage],
            hop_us[stage][driver] if stage == driver - 1 else 0.0,
        )
        for stage in range(driver)
    ]


class VirtualRing:
    """Drives a ring until every session has its answer.

    Args:
        paces: Of the stages.
        limits: Of passes.
        text: What the model writes.
        ways: Of messages; None: all go through the driver, as the paces say.
    """

    def __init__(
        self,
        paces: Sequence[StagePace],
        limits: RingLimits | None = None,
        text: TextRule = random_text,
        ways: Sequence[StageWay] | None = None,
    ) -> None:
        if ways is not None:
            paces = [
                replace(pace, way_us=(way.arrive_us + way.leave_us) / 2)
                for pace, way in zip(paces, ways, strict=True)
            ]
        self._ways = ways or [StageWay(pace.way_us, pace.way_us) for pace in paces]
        stages = tuple(RingStage() for _ in paces)
        self.ring = Ring(stages, limits or RingLimits())
        self.now_us = 0.0
        self.passes = 0
        self._paces = paces
        self._text = text
        self._free_us = [0.0] * len(paces)
        """When each stage has done what it was given."""
        self._sent_rows: dict[tuple[int, int], set[int]] = {}
        """Positions whose states a stage has sent, by stage and session."""
        self._keys: dict[tuple[int, int], dict[int, int]] = {}
        """Tokens by position of which a stage has keys, by stage and session."""
        self._heap: list[tuple[float, int, RingEvent]] = []
        self._numbers = itertools.count()
        self._wanted_counts: dict[int, int] = {}
        self._prompt_counts: dict[int, int] = {}
        self._times_us: dict[int, list[float]] = {}
        self._tokens: dict[int, list[int]] = {}

    def open(self, session: int, prompt: int, answer: int, at_us: float = 0.0) -> None:
        """Have a session begin with so many tokens, and be given so many."""
        tokens = tuple(self._text(session, position) for position in range(prompt))
        self._wanted_counts[session], self._prompt_counts[session] = answer, prompt
        self._times_us[session], self._tokens[session] = [], []
        self._plan(at_us, SessionOpened(session, tokens))

    def run(self, kills: Sequence[StageKill] = ()) -> dict[int, VirtualAnswer]:
        """Run to the end.

        Raises:
            AssertionError: A session has no answer, or the machine broke a rule.
        """
        for stage, pace in enumerate(self._paces):
            self._plan(0.0, StageBecameReady(stage, pace))
        for kill in kills:
            self._plan(kill.at_us, StageLost(kill.stage))
            back_us = kill.at_us + kill.back_us
            self._plan(back_us, StageBecameReady(kill.stage, self._paces[kill.stage]))
        while self._heap:
            self.now_us, _, event = heapq.heappop(self._heap)
            if isinstance(event, StageLost):
                self._forget(event.stage)
            if isinstance(event, PassReturned) and not rejection(self.ring, event):
                self._note_tokens(event)
            step = advance(self.ring, event)
            self.ring = step.ring
            for command in step.commands:
                self._perform(command)
        if self.ring.sessions:
            raise AssertionError(f"no answer for sessions {sorted(self.ring.sessions)}")
        return {
            session: VirtualAnswer(tuple(tokens), tuple(self._times_us[session]))
            for session, tokens in self._tokens.items()
        }

    def _note_tokens(self, event: PassReturned) -> None:
        for result in event.results:
            self._tokens[result.session].extend(result.tokens)
            self._times_us[result.session].extend([self.now_us] * len(result.tokens))

    def _plan(self, at_us: float, event: RingEvent) -> None:
        heapq.heappush(self._heap, (at_us, next(self._numbers), event))

    def _forget(self, stage: int) -> None:
        for rows in (self._sent_rows, self._keys):
            for place in [each for each in rows if each[0] == stage]:
                del rows[place]

    def _perform(self, command: RingCommand) -> None:
        match command:
            case SendPass():
                self._compute(command)
            case ReplayStates(stage=stage, session=session, epoch=epoch, start=start, count=count):
                rows = self._sent_rows.get((stage, session), set())
                is_there = all(place in rows for place in range(start, start + count))
                given_count = count if is_there else 0
                back_us = self.now_us + 2 * self._paces[stage].way_us
                self._plan(back_us, StatesReplayed(session, epoch, start, given_count))
            case DropSession():
                pass

    def _compute(self, send: SendPass) -> None:
        """Have a stage compute a pass behind what it was given before."""
        self.passes += send.stage == 0
        pace = self._paces[send.stage]
        rows = sum(len(segment.tokens) for segment in send.segments)
        begin_us = max(self._free_us[send.stage], self.now_us + self._ways[send.stage].arrive_us)
        self._free_us[send.stage] = begin_us + pace.pass_time_us(rows)
        is_last = send.stage == len(self._paces) - 1 and not send.is_repair
        results = []
        for segment in send.segments:
            self._write_keys(send.stage, segment, is_repair=send.is_repair)
            if is_last and segment.judged:
                results.append(self._judge(segment))
        event = PassReturned(send.stage, send.number, send.epoch, tuple(results))
        self._plan(self._free_us[send.stage] + self._ways[send.stage].leave_us, event)

    def _write_keys(self, stage: int, segment: PassSegment, *, is_repair: bool) -> None:
        keys = self._keys.setdefault((stage, segment.session), {})
        missing_places = [place for place in range(segment.start) if place not in keys]
        if missing_places:
            raise AssertionError(f"stage {stage} lacks keys of {segment.session}: {missing_places}")
        for offset, token in enumerate(segment.tokens):
            keys[segment.start + offset] = token
        if not is_repair:
            rows = self._sent_rows.setdefault((stage, segment.session), set())
            rows.update(range(segment.start, segment.start + len(segment.tokens)))

    def _judge(self, segment: PassSegment) -> SessionResult:
        """What the model writes behind a segment: drafts that are right, and one token more."""
        session, end = segment.session, segment.start + len(segment.tokens)
        keys = self._keys[len(self._paces) - 1, session]
        first = end - segment.judged + 1
        wrong_places = [
            place for place in range(first) if keys[place] != self._text(session, place)
        ]
        if wrong_places:
            raise AssertionError(f"session {session} was read with other tokens: {wrong_places}")
        tokens: list[int] = []
        for place in range(first, end + 1):
            token = self._text(session, place)
            tokens.append(token)
            if place < end and segment.tokens[place - segment.start] != token:
                break
        total = self._prompt_counts[session] + self._wanted_counts[session]
        room = total - first
        tokens = tokens[:room]
        has_ended = len(tokens) == room
        return SessionResult(session, tuple(tokens), has_ended=has_ended)
