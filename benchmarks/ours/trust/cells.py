"""Which jobs the figures of trust are of: rules, attacks, attackers' share, data, model, codec."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.ours.trust.attacks import ABSENT, ATTACKS, BACKDOOR, LABEL_FLIP, NONE
from benchmarks.ours.trust.byzfl_names import BYZFL_ATTACKS, BYZFL_RULES, MIXED
from benchmarks.ours.trust.outcome import CODEC, HELD_OUT, OWN_RULES, ROBUST, Setting
from benchmarks.ours.trust.training import TRIAL_MOST

EVEN, HALF, SKEWED = "inf", "0.5", "0.1"
ALPHAS = (EVEN, HALF, SKEWED)
PERCENTS = (20, 30, 40)
MOST = 40
GRAVE = (
    LABEL_FLIP,
    "under",
    "sign flip (byzfl)",
    "ALIE 1.5 apart",
    "optimal IPM apart (byzfl)",
    "optimal ALIE apart (byzfl)",
)
"""Those that cost most among all attacks, by one seed of them all: docs/trust.md."""
NEW = (
    "growing label flip",
    "shifted labels",
    "first layer",
    "last layer",
    "layers by turns",
    "late layer",
    "noisy layer",
    "ALIE 1.5 in pairs",
    "against",
    "just enough",
)
"""Lies of our own that cost most on skewed data under the rule of before, and some made against
the rule of now.
"""
FREE_RIDERS = ("one sample", "whisper", "each third round")
"""Attacks by which nodes want pay for less work."""
UNPAID = (
    "flip x10",
    "scale x10",
    "noise",
    "zeros",
    "echo",
    "replay",
    "copies",
    "useless copies",
    "sign flip (byzfl)",
)
"""Attacks by which nobody should earn."""
UNPAID_PERCENT = 20
SPARSE = "topk64"
PEERS = (
    "trimmed mean",
    "centred clipping",
    f"{MIXED}trimmed mean",
    f"{MIXED}geometric median",
)
"""Rules of byzfl that stand beside ours."""


Cell = tuple[int, str]
"""Percent of attackers, and skew."""
CELLS: tuple[Cell, ...] = (*((percent, HALF) for percent in PERCENTS), (MOST, EVEN))
"""Where points lost are measured first: fewer liars cost less, and so do even data."""
MORE_CELLS: tuple[Cell, ...] = (*CELLS, (20, EVEN), (30, EVEN))


class TrustGrid(NamedTuple):
    """Jobs of the table."""

    seeds: Sequence[int] = range(1, 6)
    few_seeds: Sequence[int] = range(1, 3)
    """Seeds for byzfl's rules and for those who should earn nothing."""
    one_seed: Sequence[int] = (1,)
    """Seeds for the CNN and for sparse updates."""
    attacks: Sequence[str] = (*GRAVE, *NEW)
    cells: Sequence[Cell] = CELLS
    peers: Sequence[str] = PEERS
    others: Sequence[str] = GRAVE[:4]
    """Attacks on the CNN and on sparse updates."""
    has_others: bool = True

    def settings(self) -> list[Setting]:
        """All jobs, those first that others are held against."""
        kinds = (self._clean, self._of_attacks, self._others, self._of_free_riders, self._of_peers)
        return [setting for kind in kinds for seed in self.seeds for setting in kind(seed)]

    def _clean(self, seed: int) -> Iterable[Setting]:
        for alpha in ALPHAS:
            yield from (Setting(rule, NONE, 0, alpha, seed) for rule in OWN_RULES)
        yield from (Setting(ROBUST, ABSENT, *cell, seed) for cell in self.cells)
        yield from (Setting(rule, ABSENT, MOST, SKEWED, seed) for rule in (ROBUST, HELD_OUT))

    def _of_attacks(self, seed: int) -> Iterable[Setting]:
        for attack in self.attacks:
            yield from (Setting(ROBUST, attack, *cell, seed) for cell in self.cells)
            yield from (Setting(rule, attack, MOST, SKEWED, seed) for rule in OWN_RULES)
        for alpha in (EVEN, HALF):
            yield Setting("mean", LABEL_FLIP, MOST, alpha, seed)

    def _of_free_riders(self, seed: int) -> Iterable[Setting]:
        for attack in UNPAID if seed in self.few_seeds else ():
            yield Setting(ROBUST, attack, UNPAID_PERCENT, HALF, seed)
        for attack in FREE_RIDERS:
            yield from (Setting(ROBUST, attack, MOST, alpha, seed) for alpha in ALPHAS)

    def _of_peers(self, seed: int) -> Iterable[Setting]:
        for rule in self.peers if seed in self.few_seeds else ():
            for attack in (NONE, *self.attacks):
                yield Setting(rule, attack, MOST if attack != NONE else 0, SKEWED, seed)

    def _others(self, seed: int) -> Iterable[Setting]:
        """Backdoors; the CNN and sparse updates with fewer seeds."""
        if not self.has_others:
            return
        for percent in (UNPAID_PERCENT, MOST):
            yield Setting(ROBUST, BACKDOOR, percent, HALF, seed)
        for attack in (NONE, ABSENT, LABEL_FLIP):
            percent = MOST if attack != NONE else 0
            for rule in (ROBUST, HELD_OUT):
                yield Setting(rule, attack, percent, SKEWED, seed, held_out=TRIAL_MOST)
        kinds = (("mlp", SPARSE), ("cnn", CODEC)) if seed in self.one_seed else ()
        for model, codec in kinds:
            for attack in (NONE, ABSENT, *self.others):
                percent = MOST if attack != NONE else 0
                yield Setting(ROBUST, attack, percent, HALF, seed, model, codec)


EVERY = TrustGrid(attacks=(*ATTACKS, *BYZFL_ATTACKS), cells=MORE_CELLS, peers=BYZFL_RULES)
"""All attacks, cells and rules: about 1,600 jobs, where the gravest attacks are 340."""
