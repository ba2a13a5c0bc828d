"""Who of several coordinators on one database drives its jobs: one at a time, for a tenure.

The database's clock says when a tenure is over for those who wait for it. Its holder counts by a
clock of its own that also runs while the machine sleeps, from before it asked, and gives up
earlier. A tenure's number only grows; whoever writes under an older one is refused, so that even
clocks that run wrong let no two coordinators write.
"""

import msgspec

from hypergpu.units import Milliseconds

_HOLDER_SHARE = 10
"""The holder gives up this part of a tenure early: clocks do not run equally fast."""
_TOLD_MS = 1_000
"""Shorter waits are not worth a word."""


class Tenure(msgspec.Struct, frozen=True):
    """What the database knows of it."""

    number: int
    """Counts from 1; 0: nobody ever held it."""
    holder: str
    """Name of the coordinator, which its folder keeps."""
    address: str
    """Where people and nodes find that coordinator."""
    until_ms: Milliseconds
    """End, by the database's clock, unless it is renewed; 0: it was given back."""
    length_ms: Milliseconds
    """Time for which it was last taken or renewed."""


class Claimant(msgspec.Struct, frozen=True):
    """A coordinator that wants to drive."""

    name: str
    address: str
    length_ms: Milliseconds
    """Time for which it takes a tenure and renews it."""
    is_alone: bool = False
    """Nobody stands by: it drives on after a pause of any length, until another took the tenure."""
    waited_ms: Milliseconds = Milliseconds(0)
    """Time for which the database last did not answer it."""


NOBODY = Tenure(0, "", "", Milliseconds(0), Milliseconds(0))


def next_tenure(stored: Tenure, claimant: Claimant, now_ms: Milliseconds) -> Tenure | None:
    """The tenure that a claimant may take; None: it has to wait for the one before.

    Its own it may take at any time: its folder is locked, so that its process before has ended.
    """
    if now_ms < stored.until_ms and stored.holder != claimant.name:
        return None
    return Tenure(
        number=stored.number + 1,
        holder=claimant.name,
        address=claimant.address,
        until_ms=Milliseconds(now_ms + claimant.length_ms),
        length_ms=claimant.length_ms,
    )


def renewed_until_ms(stored: Tenure, number: int, now_ms: Milliseconds) -> Milliseconds | None:
    """The new end of a tenure that its holder renews; None: it is another's by now.

    One that is over is renewed where nobody took it.
    """
    return Milliseconds(now_ms + stored.length_ms) if stored.number == number else None


def takeover_text(stored: Tenure, claimant: Claimant, now_ms: Milliseconds) -> str:
    """A sentence on a takeover. Empty where the claimant follows on nobody, or on itself at once or
    where nobody would have taken it.
    """
    if not stored.number:
        return ""
    silent_ms = now_ms - stored.until_ms + stored.length_ms
    waited_ms = claimant.waited_ms if claimant.waited_ms <= silent_ms else 0
    silence = f"for {silent_ms / 1000:.1f} s"
    if waited_ms >= _TOLD_MS:
        silence += f", of which the database did not answer for {waited_ms / 1000:.0f} s"
    if stored.holder == claimant.name:
        is_late = 0 < stored.until_ms <= now_ms or waited_ms >= _TOLD_MS
        if claimant.is_alone or not is_late:
            return ""
        if not stored.until_ms:
            silence = f"while the database did not answer for {waited_ms / 1000:.0f} s"
        return f"the coordinator at {claimant.address} goes on: nothing was heard of it {silence}"
    if not stored.until_ms:
        why = f"the one at {stored.address} ended"
    else:
        why = f"nothing was heard of the one at {stored.address} {silence}"
    return f"the coordinator at {claimant.address} has taken over: {why}"


def given_up_ms(asked_ms: Milliseconds, length_ms: Milliseconds) -> Milliseconds:
    """When its holder must have stopped, by the clock that showed ``asked_ms`` when it asked."""
    return Milliseconds(asked_ms + length_ms - length_ms // _HOLDER_SHARE)
