"""What a training through a ring needs of the ring's driver."""

from typing import Protocol

from coordinator.shell.kinds.serving.relay_sending import RelaySending
from coordinator.shell.kinds.serving.ring_parts import StageSeat


class TrainedStages(Protocol):
    """The driver of the ring, as its trainer needs it."""

    @property
    def sending(self) -> RelaySending:
        """Sends stages what they are told."""
        ...

    def join_seat(self, seat: StageSeat) -> None:
        """A stage has the adapter: it may answer."""
        ...

    def give_up_seat(self, seat: StageSeat, reason: str = "") -> None:
        """Let go of a stage: its work is not on its node; or, with a reason, take its lease."""
        ...
