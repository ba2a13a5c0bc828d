"""Which jobs the figures of trust are of: rules, attacks, attackers' share, data, model, codec."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.ours.trust.attacks import ABSENT, ATTACKS, BACKDOOR, LABEL_FLIP, NONE
from benchmarks.ours.trust.byzfl_names import BYZFL_ATTACKS, BYZFL_RULES, MIXED
from benchmarks.ours.trust.simulated import CODEC, OWN_RULES, Setting

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
    attacks: Sequence[str] = GRAVE
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
        yield from (Setting("robust", ABSENT, *cell, seed) for cell in self.cells)
        yield Setting("robust", ABSENT, MOST, SKEWED, seed)

    def _of_attacks(self, seed: int) -> Iterable[Setting]:
        for attack in self.attacks:
            yield from (Setting("robust", attack, *cell, seed) for cell in self.cells)
            yield from (Setting(rule, attack, MOST, SKEWED, seed) for rule in OWN_RULES)
        for alpha in (EVEN, HALF):
            yield Setting("mean", LABEL_FLIP, MOST, alpha, seed)

    def _of_free_riders(self, seed: int) -> Iterable[Setting]:
        for attack in UNPAID if seed in self.few_seeds else ():
            yield Setting("robust", attack, UNPAID_PERCENT, HALF, seed)

    def _of_peers(self, seed: int) -> Iterable[Setting]:
        for rule in self.peers if seed in self.few_seeds else ():
            for attack in (NONE, *self.attacks):
                yield Setting(rule, attack, MOST if attack != NONE else 0, SKEWED, seed)

    def _others(self, seed: int) -> Iterable[Setting]:
        """Backdoors; the CNN and sparse updates with fewer seeds."""
        if not self.has_others:
            return
        for percent in (UNPAID_PERCENT, MOST):
            yield Setting("robust", BACKDOOR, percent, HALF, seed)
        kinds = (("mlp", SPARSE), ("cnn", CODEC)) if seed in self.one_seed else ()
        for model, codec in kinds:
            for attack in (NONE, ABSENT, *self.others):
                percent = MOST if attack != NONE else 0
                yield Setting("robust", attack, percent, HALF, seed, model, codec)


EVERY = TrustGrid(attacks=(*ATTACKS, *BYZFL_ATTACKS), cells=MORE_CELLS, peers=BYZFL_RULES)
"""All attacks, cells and rules: about 1,600 jobs, where the gravest attacks are 340."""
