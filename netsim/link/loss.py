"""Packet loss in bursts: a Gilbert-Elliott chain that a pause does not freeze.

Theory of operation. The chain is in a good state, in which packets arrive, or in a bad one, in
which they are lost. From a mean loss L and a mean burst of B packets follow the probabilities of
leaving the bad state, r = 1/B, and the good one, p = r L / (1 - L), a packet each.

Burst lengths are counted in packets while packets follow each other within `PAUSE_US`. In a longer
pause the chain runs on in time, one step each `STEP_US`, as if a stream of 12 Mbit/s passed. A
chain that only packets drive would keep a sender that backs off in the very burst that silenced
it, retransmission after retransmission; links do not.

How long the chain stays in a state is drawn in shuffled strata: each stay has its geometric
distribution, and every `STRATA` stays together have nearly its mean. Independent draws would miss
a loss of 5 % in bursts of 4 by 0.4 points over 20,000 packets (one standard deviation).

References:
    Gilbert 1960; Elliott 1963; Hasslinger and Hohlfeld 2008, "The Gilbert-Elliott model for packet
    loss in real time services on the Internet".
"""

import math
import random
from typing import NamedTuple

PAUSE_US = 20_000
STEP_US = 1_000
STRATA = 16
_FOREVER = 1 << 62


class Transitions(NamedTuple):
    """Probabilities of the chain, a packet each."""

    p: float
    """From good to bad."""
    r: float
    """From bad to good."""


def transitions(loss: float, burst_packets: float) -> Transitions:
    """Return the chain's probabilities for the loss and the mean burst of a `LinkDirection`."""
    r = 1 / burst_packets
    return Transitions(p=r * loss / (1 - loss), r=r)


def loss_events_per_packet(loss: float, burst_packets: float) -> float:
    """How often a burst begins, a packet. Congestion control answers to these, not to losses."""
    return loss / burst_packets


class LossChain:
    """Says of packet after packet whether it is lost. Equal dice give equal losses."""

    __slots__ = ("_dice", "_is_bad", "_last_us", "_left", "_loss", "_p", "_r", "_strata")

    def __init__(self, loss: float, burst_packets: float, *, dice: random.Random) -> None:
        self._dice = dice
        self._last_us = 0
        self._strata: tuple[list[int], list[int]] = ([], [])
        self._is_bad = dice.random() < loss
        self.change(loss, burst_packets)

    def change(self, loss: float, burst_packets: float) -> None:
        """Go on with another loss; the state is kept."""
        self._p, self._r = transitions(loss, burst_packets)
        self._loss = loss
        self._is_bad = self._is_bad and loss > 0
        self._left = self._stay()

    def is_lost(self, now_us: int) -> bool:
        """Whether the packet that passes now is lost. Call it once a packet, in order."""
        pause_us = now_us - self._last_us - PAUSE_US
        self._last_us = now_us
        if pause_us > 0:
            self._run_on(pause_us)
        if not self._left:
            self._is_bad = not self._is_bad
            self._left = self._stay()
        self._left -= 1
        return self._is_bad

    def _run_on(self, pause_us: int) -> None:
        memory = 1 - self._p - self._r
        # A chain may swing (B = 1 with a high loss): after whole steps only its size counts.
        kept = abs(memory) ** (pause_us / STEP_US)
        self._is_bad = self._dice.random() < self._loss + (self._is_bad - self._loss) * kept
        self._left = self._stay()

    def _stay(self) -> int:
        """How many packets the present state lasts, this one included."""
        leaving = self._r if self._is_bad else self._p
        if leaving <= 0:
            return _FOREVER
        if leaving >= 1:
            return 1
        strata = self._strata[self._is_bad]
        if not strata:
            strata.extend(range(STRATA))
            self._dice.shuffle(strata)
        chance = (strata.pop() + self._dice.random()) / STRATA
        return 1 + int(math.log1p(-chance) / math.log1p(-leaving))
