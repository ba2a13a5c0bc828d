"""A ring, its sessions and the passes that are under way."""

from collections.abc import Mapping

import msgspec

from coordinator.core.rings.drafts import DraftCosts, DraftRecord
from coordinator.core.rings.pass_plan import PassPlan, pass_plan


class StagePace(msgspec.Struct, frozen=True):
    """What a stage takes for a pass, in microseconds, and the way to it."""

    pass_us: float = 1_000.0
    token_us: float = 100.0
    way_us: float = 0.0
    """From whoever drives the ring to the stage, or back."""

    def pass_time_us(self, tokens: int) -> float:
        """Time of a pass of so many tokens."""
        return self.pass_us + self.token_us * tokens


class RingStage(msgspec.Struct, frozen=True):
    """One stage of a ring."""

    is_ready: bool = False
    has_keys: bool = False
    """Whether it holds the keys of every session that has some; a new holder has none."""
    pace: StagePace = StagePace()


class PassSegment(msgspec.Struct, frozen=True):
    """Consecutive tokens of one session in a pass."""

    session: int
    start: int
    """Position of the first token."""
    tokens: tuple[int, ...]
    judged: int = 0
    """How many of the last tokens are judged: the newest known one, and drafts behind it; 0: keys
    alone are wanted.
    """


class RingPass(msgspec.Struct, frozen=True):
    """A pass that is under way."""

    segments: tuple[PassSegment, ...]
    stage: int = 0
    """Where it is."""
    is_repair: bool = False
    """Whether it only gives one stage keys that a lost one held, and goes no further."""


class RingSession(msgspec.Struct, frozen=True):
    """One conversation."""

    tokens: tuple[int, ...]
    """All that are known: those of the prompt, and those of the answer so far."""
    position: int = 0
    """Tokens whose keys all stages have."""
    pass_number: int = 0
    """The pass that it is in; 0: none."""
    last_pass: int = 0
    """The newest pass that it was in: who has waited longest goes first."""
    repaired: int = 0
    """Tokens whose keys a new holder has, while one is being given them."""
    drafts: DraftRecord = DraftRecord()
    guesses: tuple[int, ...] = ()
    """What was guessed to follow the known tokens, drafted or not."""

    @property
    def is_idle(self) -> bool:
        """Whether a pass may take it."""
        return not self.pass_number and self.position < len(self.tokens)


class RingLimits(msgspec.Struct, frozen=True):
    """What passes have at most."""

    tokens_most: int = 256
    """Tokens of a pass: bounded by the bytes of their hidden states, too."""
    has_drafts: bool = True


class Ring(msgspec.Struct, frozen=True):
    """A ring as whoever drives it sees it."""

    stages: tuple[RingStage, ...]
    limits: RingLimits = RingLimits()
    epoch: int = 1
    """Answers of another epoch count for nothing: the ring has changed since."""
    sessions: Mapping[int, RingSession] = {}
    passes: Mapping[int, RingPass] = {}
    next_pass: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether all stages are there."""
        return all(stage.is_ready for stage in self.stages)

    @property
    def repaired_stage(self) -> int | None:
        """The stage that has to be given keys; None: there is none."""
        keyless = [index for index, stage in enumerate(self.stages) if not stage.has_keys]
        return keyless[0] if keyless and self.is_whole else None

    @property
    def costs(self) -> DraftCosts:
        """What a pass costs."""
        paces = [stage.pace for stage in self.stages]
        return DraftCosts(
            sum(pace.pass_us for pace in paces),
            sum(pace.token_us for pace in paces),
            sum(2 * pace.way_us for pace in paces),
            max(pace.pass_us for pace in paces),
            max(pace.token_us for pace in paces),
        )

    @property
    def pass_plan(self) -> PassPlan:
        """Passes under way in which all sessions get most tokens."""
        live = sum(session.position < len(session.tokens) for session in self.sessions.values())
        return pass_plan(self.costs, live, self.limits.tokens_most)
