"""Which replica answers a call, with the reason. Pure: it sees only what is measured.

A call goes where its first token is expected soonest: the line's round trip, the work that the
replica has before it, and the part of the prompt that it has not read yet. Where all replicas
answer as many calls as they may, it waits.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds, several

UNKNOWN_MS_PER_TOKEN = 50.0
"""Taken for a replica that has answered nothing yet."""
SMOOTHING = 0.2
"""Weight of the newest gap between two tokens in a replica's pace."""
READ_SHARE = 1 / 14
"""Time to read a token over the time to write one, taken where no prompt was measured yet: what
SmolLM2-135M takes on CPUs (docs/decisions/0081-prefixes-in-routing.md)."""
READ_TOKENS_LEAST = 64
"""Shorter readings say more of a pass than of a token."""

BEHIND_MOST = 1
"""Versions that a replica may be behind its training while others answer in its place."""


class ReplicaLoad(NamedTuple):
    """A replica that is ready, as the coordinator sees it."""

    node: NodeId
    round_trip_ms: Milliseconds
    """The line's; 0: not measured."""
    open_calls: int
    """Calls that it is answering."""
    calls_most: int
    """Calls that it answers at a time."""
    ms_per_token: float = 0.0
    """Its newest pace while it answers one call; 0: not measured."""
    rounds_behind: int = 0
    """How many versions of a training's model are newer than its newest."""
    prompt_tokens: int = 0
    """Tokens of the call's prompt, about; 0: not known."""
    held_tokens: int = 0
    """Tokens of it that the replica has read for a call before, about."""
    ms_per_read_token: float = 0.0
    """Its newest pace while it reads one prompt; 0: not measured."""
    unread_tokens: int = 0
    """Tokens of prompts that it reads for other calls."""

    @property
    def is_stale(self) -> bool:
        """Whether its model is older than a follower's may be."""
        return self.rounds_behind > BEHIND_MOST

    @property
    def is_free(self) -> bool:
        """Whether it may take another call."""
        return self.open_calls < self.calls_most

    @property
    def expected_ms(self) -> float:
        """Time until the first token of one more call: calls that are open share the device."""
        pace_ms = self.ms_per_token or UNKNOWN_MS_PER_TOKEN
        read_ms = self.ms_per_read_token or READ_SHARE * pace_ms
        tokens_to_read = self.prompt_tokens - self.held_tokens + self.unread_tokens
        return self.round_trip_ms + (self.open_calls + 1) * pace_ms + tokens_to_read * read_ms

    @property
    def held_text(self) -> str:
        """How much of the prompt it has read before, for people; empty: nothing."""
        if not self.held_tokens:
            return ""
        return f", about {self.held_tokens} of {self.prompt_tokens} prompt tokens are held there"


class RouteChoice(NamedTuple):
    """Where a call goes."""

    node: NodeId | None
    """None: it waits."""
    reason: str


def choose_replica(loads: Iterable[ReplicaLoad]) -> RouteChoice:
    """Choose the replica whose first token is expected soonest; of a training's model first among
    those that are no more than one version behind.
    """
    replicas = sorted(loads, key=lambda load: (load.is_stale, load.expected_ms, load.node))
    if not replicas:
        return RouteChoice(None, "no replica is ready")
    free_replicas = [load for load in replicas if load.is_free]
    if not free_replicas:
        calls = several(sum(load.open_calls for load in replicas), "call")
        return RouteChoice(None, f"{several(len(replicas), 'replica')} answer {calls}, their most")
    best = free_replicas[0]
    expected_ms = round(best.expected_ms)
    if len(replicas) == 1:
        text = f"the only replica; first token in about {expected_ms} ms"
        return RouteChoice(best.node, f"{text}{best.held_text}")
    others = several(len(replicas) - 1, "other")
    text = f"first token in about {expected_ms} ms, sooner than from {others}"
    calls = several(best.open_calls, "open call")
    return RouteChoice(best.node, f"{text}: {calls} there{best.held_text}")


class QueuedCall(NamedTuple):
    """A call that waits for a replica."""

    priority: int
    has_begun: bool
    """Whether a part of its answer is out: it goes on before those who have nothing yet."""


class QueuePlace(NamedTuple):
    """Where a call waits."""

    place: int
    """From the front."""
    reason: str
    """Empty: it waits behind all others, or nobody waits."""


def queue_place(queue: Sequence[QueuedCall], call: QueuedCall) -> QueuePlace:
    """The place of one more call: behind those that have begun and those of its priority or more.

    Args:
        queue: Calls that wait, in their order.
        call: The new one.
    """
    if call.has_begun:
        behind = sum(each.has_begun for each in queue)
        return QueuePlace(behind, "")
    place = sum(each.has_begun or each.priority >= call.priority for each in queue)
    passed_calls, higher_calls = (
        len(queue) - place,
        sum(not each.has_begun and each.priority > call.priority for each in queue),
    )
    reasons = []
    if passed_calls:
        reasons.append(f"before {several(passed_calls, 'call')} of lower priority")
    if higher_calls:
        reasons.append(f"behind {several(higher_calls, 'call')} of higher priority")
    return QueuePlace(place, f"waited {' and '.join(reasons)}" if reasons else "")


def next_pace_ms(before_ms: float, gap_ms: float, open_calls: int) -> float:
    """A replica's pace after one more gap between two tokens of a call.

    Args:
        before_ms: Pace so far; 0: none was measured.
        gap_ms: Time between the tokens.
        open_calls: Calls that shared the device meanwhile, at least 1.
    """
    own_ms = gap_ms / max(1, open_calls)
    return own_ms if not before_ms else (1 - SMOOTHING) * before_ms + SMOOTHING * own_ms


def next_read_pace_ms(before_ms: float, read_ms: float, tokens: int, open_calls: int) -> float:
    """A replica's pace of reading after one more prompt.

    Args:
        before_ms: Pace so far; 0: none was measured.
        read_ms: Time from the call to its first token, less the round trip.
        tokens: Tokens that were read for it.
        open_calls: Calls that shared the device meanwhile, at least 1.
    """
    if tokens < READ_TOKENS_LEAST:
        return before_ms
    own_ms = max(0.0, read_ms) / tokens / max(1, open_calls)
    return own_ms if not before_ms else (1 - SMOOTHING) * before_ms + SMOOTHING * own_ms
