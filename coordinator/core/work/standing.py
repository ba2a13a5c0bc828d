"""How a member has kept up with its job's rounds: what later rounds go by."""

import msgspec

from hypergpu.units import Milliseconds

_REST_MOST = 32
"""Rounds."""
_ARREARS_MOST, _ARREARS_TRUSTED = 32, 2


class Standing(msgspec.Struct, frozen=True):
    """How a member has kept up with its rounds. Only updates that are in speak for it."""

    pace_ms: Milliseconds = Milliseconds(0)
    """What its updates take at present; 0: none has come in."""
    pace_steps: int = 0
    """Inner steps of the update that ``pace_ms`` is of."""
    arrears: int = 0
    """Updates that it owes for rounds that waited for it in vain: two for the first one, then
    twice as many for each, 32 at most.
    """
    misses: int = 0
    """Such rounds; less one whenever it owes nothing any more."""
    missed_in_a_row: int = 0
    """Rounds in a row that closed without its update."""
    rests_until_round: int = 0
    """It gets no shard before that round, as long as proven nodes are there."""

    @property
    def is_proven(self) -> bool:
        """Whether rounds wait for it: it has worked, and did not fall behind twice of late."""
        return self.pace_ms > 0 and self.arrears <= _ARREARS_TRUSTED

    def pace_for(self, inner_steps: int) -> int:
        """What an update of so many inner steps takes, in milliseconds; 0: not known."""
        return self.pace_ms * inner_steps // max(1, self.pace_steps)

    def after_update(self, took_ms: Milliseconds, inner_steps: int) -> "Standing":
        """The standing once an update of it is in. A single fast round does not make it fast."""
        pace_ms = Milliseconds(max(took_ms, 3 * self.pace_for(inner_steps) // 4))
        arrears = max(0, self.arrears - 1)
        misses = self.misses if arrears else max(0, self.misses - 1)
        return Standing(pace_ms, inner_steps, arrears, misses)

    def after_trial(self, number: int) -> "Standing":
        """The standing once round ``number`` closed without its update and had not to wait for it:
        it rests, longer each time.
        """
        missed = self.missed_in_a_row + 1
        rests = min(_REST_MOST, (1 << min(missed - 1, _REST_MOST)) - 1)
        return msgspec.structs.replace(
            self, missed_in_a_row=missed, rests_until_round=number + 1 + rests
        )

    def after_miss(self) -> "Standing":
        """The standing once a round has waited for it in vain: the next one tries it at once."""
        misses = min(self.misses + 1, _ARREARS_MOST)
        return msgspec.structs.replace(
            self,
            arrears=min(_ARREARS_MOST, self.arrears + (1 << misses)),
            misses=misses,
            missed_in_a_row=self.missed_in_a_row + 1,
        )
