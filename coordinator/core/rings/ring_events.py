"""What happens to a ring, and what is to be done about it. Neither is journalled: no call is."""

import msgspec

from coordinator.core.rings.ring_state import PassSegment, StagePace


class SessionOpened(msgspec.Struct, frozen=True):
    """A conversation begins, or goes on with the tokens that are out."""

    session: int
    tokens: tuple[int, ...]
    """At least one."""


class SessionClosed(msgspec.Struct, frozen=True):
    """A conversation is over, or nobody wants it any more."""

    session: int


class SessionResult(msgspec.Struct, frozen=True):
    """What the last stage says of one session of a pass."""

    session: int
    tokens: tuple[int, ...]
    """Tokens that follow the known ones: drafts that were right, and one more."""
    has_ended: bool = False


class PassReturned(msgspec.Struct, frozen=True):
    """A stage has computed a pass."""

    stage: int
    number: int
    epoch: int
    results: tuple[SessionResult, ...] = ()
    """Results of the last stage: one for each session of which tokens were judged."""


class StageBecameReady(msgspec.Struct, frozen=True):
    """A stage holds its layers: for the first time, or another node in place of a lost one."""

    stage: int
    pace: StagePace


class StageLost(msgspec.Struct, frozen=True):
    """A stage is gone, with the keys of all sessions."""

    stage: int


class StatesReplayed(msgspec.Struct, frozen=True):
    """The stage before a new holder was asked for what it had sent to the lost one."""

    session: int
    epoch: int
    start: int
    count: int
    """Rows that it gave; 0: it has them no more."""


RingEvent = (
    SessionOpened | SessionClosed | PassReturned | StageBecameReady | StageLost | StatesReplayed
)


class SendPass(msgspec.Struct, frozen=True):
    """Give a stage a pass: tokens, or what the stage before gave."""

    stage: int
    number: int
    epoch: int
    segments: tuple[PassSegment, ...]
    is_repair: bool = False


class ReplayStates(msgspec.Struct, frozen=True):
    """Ask a stage for hidden states that it has sent of a session: `StatesReplayed` answers."""

    stage: int
    session: int
    epoch: int
    start: int
    count: int


class DropSession(msgspec.Struct, frozen=True):
    """Have every stage forget a session."""

    session: int
    tokens: tuple[int, ...] = ()
    """All of its tokens, where the last stage ended it: all but the last went around the ring."""


RingCommand = SendPass | ReplayStates | DropSession
