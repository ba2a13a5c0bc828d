"""How a member has kept up with its job: what the job's later turns go by.

A turn is what a job waits for at once: of training a round. Work is counted in its kind's units: of
training in inner steps.
"""

import msgspec

from hypergpu.units import Milliseconds

_REST_MOST = 32
"""Turns."""
_ARREARS_MOST, _ARREARS_TRUSTED = 32, 2


class Standing(msgspec.Struct, frozen=True):
    """How a member has kept up. Only work that is in speaks for it."""

    pace_ms: Milliseconds = Milliseconds(0)
    """What its work takes at present; 0: none has come in."""
    pace_units: int = msgspec.field(default=0, name="pace_steps")
    """Units of the work that ``pace_ms`` is of."""
    arrears: int = 0
    """Pieces of work that it owes for turns that waited for it in vain: two for the first one, then
    twice as many for each, 32 at most.
    """
    misses: int = 0
    """Such turns; less one whenever it owes nothing any more."""
    missed_in_a_row: int = 0
    """Turns in a row that went on without its work."""
    rests_until: int = msgspec.field(default=0, name="rests_until_round")
    """It gets no work before that turn, as long as proven nodes are there."""

    @property
    def is_proven(self) -> bool:
        """Whether the job waits for it: it has worked, and did not fall behind twice of late."""
        return self.pace_ms > 0 and self.arrears <= _ARREARS_TRUSTED

    def pace_for(self, units: int) -> int:
        """What so many units of work take, in milliseconds; 0: not known."""
        return self.pace_ms * units // max(1, self.pace_units)

    def after_work(self, took_ms: Milliseconds, units: int) -> "Standing":
        """The standing once work of it is in. A single fast turn does not make it fast."""
        pace_ms = Milliseconds(max(took_ms, 3 * self.pace_for(units) // 4))
        arrears = max(0, self.arrears - 1)
        misses = self.misses if arrears else max(0, self.misses - 1)
        return Standing(pace_ms, units, arrears, misses)

    def after_trial(self, turn: int) -> "Standing":
        """The standing once turn ``turn`` went on without its work and had not to wait for it: it
        rests, longer each time.
        """
        misses = self.missed_in_a_row + 1
        rests = min(_REST_MOST, (1 << min(misses - 1, _REST_MOST)) - 1)
        return msgspec.structs.replace(self, missed_in_a_row=misses, rests_until=turn + 1 + rests)

    def after_miss(self) -> "Standing":
        """The standing once a turn has waited for it in vain: the next one tries it at once."""
        misses = min(self.misses + 1, _ARREARS_MOST)
        return msgspec.structs.replace(
            self,
            arrears=min(_ARREARS_MOST, self.arrears + (1 << misses)),
            misses=misses,
            missed_in_a_row=self.missed_in_a_row + 1,
        )
