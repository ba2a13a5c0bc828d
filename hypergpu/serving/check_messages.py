"""What stages and a checker are told where a conversation of a stage is computed again.

Digests go to the coordinator; hidden states go to the checker alone, sealed for it.
"""

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.rings.frame_cipher import FramePlace
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.ring_members import RingMember
from hypergpu.serving.calls import CheckFigures, ModelCall


class TellDigests(msgspec.Struct, frozen=True, tag=True):
    """Say what was received and sent of a session: `StateDigests` answers."""

    session: int
    count: int
    """Rows, from the first position on."""


class StateDigests(msgspec.Struct, frozen=True, tag=True):
    """Digests of what a stage received and sent of a session; empty: it has not all of it."""

    received: bytes = b""
    sent: bytes = b""


class HandStates(msgspec.Struct, frozen=True, tag=True):
    """Give a checker hidden states that were sent of a session, sealed for it."""

    check: int
    session: int
    start: int
    count: int
    checker: RingMember

    @property
    def place(self) -> FramePlace:
        """Where the states belong."""
        return check_place(self.check, self.session, self.start, self.count)


class TakeStates(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """To a checker: hidden states of the stage that is checked, or of the one before it."""

    check: int
    session: int
    start: int
    count: int
    sender: RingMember
    checker: RingMember
    """As the sender was told of it."""
    is_output: bool
    """Whether the checked stage gave them; else it received them."""
    states: bytes

    @property
    def place(self) -> FramePlace:
        """Where the states belong."""
        return check_place(self.check, self.session, self.start, self.count)


class TakeAdapterValues(msgspec.Struct, frozen=True, tag=True):
    """To a checker: part of the adapter of a layer, where the ring trained one; parts come in
    order, and the first one drops what was there of the layer. `StageRows` answers.
    """

    layer: int
    start: int
    """Place of the part's first byte."""
    values: bytes
    """Trained values as little-endian float32, without the optimizer's state."""

    def check_limits(self) -> None:
        """Check what does not follow from types.

        Raises:
            HyperGPUError: REQUEST_INVALID, a place is negative.
        """
        if min(self.layer, self.start) < 0:
            raise HyperGPUError(Reason.REQUEST_INVALID, "parts of an adapter have places from 0 on")


class RecomputeStage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """To a checker: compute what a stage was given, and compare: `StageCompared` answers."""

    check: int
    span: LayerSpan
    """Layers of the stage."""
    count: int
    """Rows."""
    tokens: tuple[int, ...] = ()
    """What the first stage was given; else states came before."""
    call: ModelCall | None = None
    """What the last stage answered, with a claim; else states came before."""

    def check_limits(self) -> None:
        """Check what does not follow from types.

        Raises:
            HyperGPUError: REQUEST_INVALID, with what is wrong.
        """
        if self.call is not None:
            self.call.check()
        has_tokens = not self.tokens or len(self.tokens) == self.count
        if self.count <= 0 or not has_tokens or any(token < 0 for token in self.tokens):
            raise HyperGPUError(Reason.REQUEST_INVALID, "a check has a token for each row")


class StageFigures(msgspec.Struct, frozen=True, array_like=True):
    """How far what a stage gave is from what a checker computes."""

    rows: int
    """Rows that were compared, or tokens that were scored."""
    distance_ppm: int = 0
    """Distance that nine of ten rows do not exceed: of a row its difference over its length, in
    millionths, `DISTANCE_MOST_PPM` at most.
    """
    scored: CheckFigures | None = None
    """How far the tokens of the last stage are, in place of a distance."""


DISTANCE_MOST_PPM = 1_000_000_000


class StageCompared(msgspec.Struct, frozen=True, tag=True):
    """What came of a check."""

    figures: StageFigures
    received: bytes = b""
    """Digest of what the checker was given as the stage's input; empty: tokens were."""
    sent: bytes = b""
    """Digest of what it was given as its output; empty: tokens were."""


CheckRequest = TellDigests | HandStates | TakeStates | TakeAdapterValues | RecomputeStage
CheckReply = StateDigests | StageCompared


def check_place(check: int, session: int, start: int, count: int) -> FramePlace:
    """Where states of a check belong: no pass has its number."""
    return FramePlace(check, [(session, start, count)])
