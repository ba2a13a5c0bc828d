"""Which jobs the figures of trust are of: rules, attacks, attackers' share, data, model, codec."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.ours.trust.attacks import (
    ABSENT,
    ATTACKS,
    BACKDOOR,
    JUST_ENOUGH,
    LABEL_FLIP,
    NONE,
    ONE_SAMPLE,
    SMALL_BACKDOOR,
)
from benchmarks.ours.trust.backdoor_defences import DEFENCES
from benchmarks.ours.trust.byzfl_names import BYZFL_ATTACKS, BYZFL_RULES, MIXED
from benchmarks.ours.trust.outcome import CODEC, HELD_OUT, MEAN, OWN_RULES, ROBUST, Setting
from benchmarks.ours.trust.training import NODES, TRIAL_MOST

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
    JUST_ENOUGH,
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
BACKDOORS = (BACKDOOR, SMALL_BACKDOOR)
CROWD = 200
"""Nodes of a job in which samples of a tenth of them are looked at in a round."""
CROWD_ATTACKS = (LABEL_FLIP, "first layer", ONE_SAMPLE)
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
    """Seeds of the product's rule on very unequal data, where single seeds differ by ten points."""
    usual_seeds: Sequence[int] = range(1, 4)
    """The same elsewhere; none: very unequal data alone."""
    few_seeds: Sequence[int] = range(1, 3)
    """Seeds of the rule of before."""
    one_seed: Sequence[int] = (1,)
    """Seeds of other rules, fewer liars, the CNN, sparse updates, many nodes, and those who should
    earn nothing.
    """
    attacks: Sequence[str] = (*GRAVE, *NEW)
    cells: Sequence[Cell] = CELLS
    peers: Sequence[str] = PEERS
    others: Sequence[str] = GRAVE[:4]
    """Attacks on the CNN, and those that the classical rules are shown with."""
    fewer: Sequence[str] = GRAVE
    """Attacks of fewer than two nodes in five."""
    has_others: bool = True
    has_skewed: bool = True
    """Whether there are very unequal data."""

    @property
    def alphas(self) -> Sequence[str]:
        """Skews that any seed is run with."""
        usual = (EVEN, HALF) if self.usual_seeds else ()
        return (*usual, SKEWED) if self.has_skewed else usual

    def settings(self) -> list[Setting]:
        """All jobs, those first that others are held against, and very unequal data before the
        rest: most figures are of them.
        """
        kinds = (self._clean, self._of_attacks, self._of_free_riders, self._of_peers, self._others)
        settings = [setting for kind in kinds for seed in self.seeds for setting in kind(seed)]
        return sorted(settings, key=_turn)

    def has(self, attack: str, cell: Cell) -> bool:
        """Whether an attack is run in a cell: with fewer liars few of them are."""
        return cell[0] == MOST or attack in self.fewer

    def _alphas_of(self, seed: int) -> Sequence[str]:
        return [alpha for alpha in self.alphas if alpha == SKEWED or seed in self.usual_seeds]

    def _cells_of(self, seed: int) -> list[Cell]:
        """Cells that a seed is run in; very unequal data are in all of them."""
        unequal_cells = [(MOST, SKEWED)] if self.has_skewed else []
        if not self.usual_seeds:
            return unequal_cells
        seeds = {MOST: self.usual_seeds}
        here = [cell for cell in self.cells if seed in seeds.get(cell[0], self.one_seed)]
        return [*here, *unequal_cells]

    def _clean(self, seed: int) -> Iterable[Setting]:
        for alpha in self._alphas_of(seed):
            yield from (Setting(rule, NONE, 0, alpha, seed) for rule in OWN_RULES)
        yield from (Setting(ROBUST, ABSENT, *cell, seed) for cell in self._cells_of(seed))
        if self.has_skewed:
            yield Setting(HELD_OUT, ABSENT, MOST, SKEWED, seed)

    def _of_attacks(self, seed: int) -> Iterable[Setting]:
        for attack in self.attacks:
            cells = self._cells_of(seed)
            yield from (Setting(ROBUST, attack, *it, seed) for it in cells if self.has(attack, it))
            if seed in self.few_seeds and self.has_skewed:
                yield Setting(HELD_OUT, attack, MOST, SKEWED, seed)
            if seed in self.one_seed and self.has_skewed:
                yield Setting(MEAN, attack, MOST, SKEWED, seed)
        for alpha in self._alphas_of(seed) if seed in self.few_seeds else ():
            yield Setting(MEAN, LABEL_FLIP, MOST, alpha, seed)

    def _of_free_riders(self, seed: int) -> Iterable[Setting]:
        for attack in UNPAID if HALF in self._alphas_of(seed) and seed in self.one_seed else ():
            yield Setting(ROBUST, attack, UNPAID_PERCENT, HALF, seed)
        for attack in FREE_RIDERS:
            alphas = self._alphas_of(seed)
            yield from (Setting(ROBUST, attack, MOST, alpha, seed) for alpha in alphas)

    def _of_peers(self, seed: int) -> Iterable[Setting]:
        for rule in self.peers if seed in self.one_seed and self.has_skewed else ():
            for attack in (NONE, *self.others):
                yield Setting(rule, attack, MOST if attack != NONE else 0, SKEWED, seed)

    def _others(self, seed: int) -> Iterable[Setting]:
        """Backdoors, more held-out samples, the CNN, sparse updates and many nodes."""
        if not self.has_others:
            return
        for attack in BACKDOORS if seed in self.usual_seeds else ():
            for percent in (UNPAID_PERCENT, MOST):
                yield Setting(ROBUST, attack, percent, HALF, seed)
        is_few = seed in self.few_seeds and self.has_skewed
        for attack in (NONE, ABSENT, LABEL_FLIP) if is_few else ():
            for rule in (ROBUST, HELD_OUT):
                percent = _percent(attack)
                yield Setting(rule, attack, percent, SKEWED, seed, held_out=TRIAL_MOST)
        if seed in self.one_seed:
            yield from self._of_one_seed(seed)

    def _of_one_seed(self, seed: int) -> Iterable[Setting]:
        for model, codec, attacks in (("mlp", SPARSE, self.attacks), ("cnn", CODEC, self.others)):
            for attack in (NONE, ABSENT, *attacks):
                yield Setting(ROBUST, attack, _percent(attack), HALF, seed, model, codec)
        for attack in (NONE, ABSENT, *CROWD_ATTACKS):
            yield Setting(ROBUST, attack, _percent(attack), HALF, seed, nodes=CROWD)


def _turn(setting: Setting) -> tuple[bool, int, bool]:
    """Jobs in the order of need: one seed of each elsewhere first, those of few attacks last."""
    is_elsewhere = setting.alpha != SKEWED
    is_rare = setting.percent in PERCENTS[:2] or setting.model != "mlp"
    return is_elsewhere, setting.seed if is_elsewhere else 0, is_rare or setting.nodes > NODES


def _percent(attack: str) -> int:
    return 0 if attack == NONE else MOST


def defended_settings(seeds: Sequence[int]) -> list[Setting]:
    """Backdoors of two nodes in five, and nobody's, with and without each defence."""
    return [
        Setting(ROBUST, attack, _percent(attack), HALF, seed, defence=defence)
        for seed in seeds
        for defence in ("", *DEFENCES)
        for attack in (NONE, *BACKDOORS)
    ]


UNEQUAL = TrustGrid(usual_seeds=(), has_others=False)
"""Very unequal data alone: what costs liars and honest nodes most."""
ELSEWHERE = TrustGrid(
    seeds=range(1, 4), cells=((MOST, HALF), (MOST, EVEN)), peers=(), has_skewed=False
)
"""All but very unequal data, two liars in five: a half hour of two cores."""
EVERY = TrustGrid(
    attacks=(*ATTACKS, *BYZFL_ATTACKS),
    cells=MORE_CELLS,
    peers=BYZFL_RULES,
    fewer=(*ATTACKS, *BYZFL_ATTACKS),
)
"""All attacks, cells and rules."""
