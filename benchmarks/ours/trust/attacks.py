"""What attackers send in place of their updates. They see everything but the coordinator's secret:
the updates of honest nodes in the same round, the rule, and its state.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from benchmarks.ours.trust.training import (
    Poison,
    Rows,
    plant_few_triggers,
    plant_trigger,
    repeat_sample,
    shift_labels,
    turn_labels,
)
from hypergpu.tensors.layout import Float32s, Layout

NONE = "none"
LABEL_FLIP = "label flip"
"""No lie about the update: its sender learnt from turned labels."""
BACKDOOR = "backdoor"
"""Nor here: half of its senders' samples bear a trigger and the label that it is to give."""
GROWING_FLIP, SHIFTED_LABELS = "growing label flip", "shifted labels"
SMALL_BACKDOOR = "small backdoor"
"""The trigger is on a tenth of each batch."""
JUST_ENOUGH = "just enough"
"""Mostly its own work, which costs no accuracy."""
ONE_SAMPLE = "one sample"
"""One sample of the shard in place of all of them."""
ABSENT = "absent"
"""No attack: the attackers send nothing, and their data are not to be had."""
_LATE_FROM = 10


class RoundView(NamedTuple):
    """What attackers know when they choose their updates."""

    layout: Layout
    number: int
    honest: Rows
    own: Rows
    """What the attackers' training gave, honestly."""
    first: Rows
    """The same of their first round."""
    last_change: Float32s
    """What the newest outer step took from the model."""
    target: Callable[[Rows], Float32s]
    """The outer step's direction by the coordinator's rule, of honest updates and then forged
    ones.
    """
    draws: np.random.Generator

    @property
    def mean(self) -> Float32s:
        """Statistics of the honest updates."""
        mean: Float32s = self.honest.mean(axis=0)
        return mean

    @property
    def norm(self) -> float:
        """Median of honest lengths."""
        return float(np.median(np.linalg.norm(self.honest, axis=1)))

    def noise(self, length: float) -> Rows:
        """Independent noise of a given length for each attacker."""
        normal_draws = self.draws.standard_normal(self.own.shape, np.float32)
        return normal_draws * np.float32(length / np.sqrt(self.own.shape[1]))

    def spread(self, forged: Float32s) -> Rows:
        """One forged update for all, each half as far from it as an honest one from the mean.

        That keeps them from being taken for copies.
        """
        apart = np.median(np.linalg.norm(self.honest - self.mean, axis=1))
        return forged + self.noise(0.5 * float(apart))


Attack = Callable[[RoundView], Rows]


def _scale(factor: float) -> Attack:
    return lambda view: np.float32(factor) * view.own


def _under(view: RoundView) -> Rows:
    """Mostly against the mean, of honest length."""
    mean = view.mean / np.linalg.norm(view.mean)
    own = view.own / np.linalg.norm(view.own, axis=1, keepdims=True)
    direction = 0.3 * own - 0.7 * mean
    return _of_length(direction, view.norm)


def _of_length(rows: Rows, length: float) -> Rows:
    result: Rows = rows * (length / np.linalg.norm(rows, axis=1, keepdims=True))
    return result


def _copies(view: RoundView) -> Rows:
    """One attacker's honest work, sent by all."""
    return view.own[:1] + view.noise(1e-3 * view.norm)


def _useless_copies(view: RoundView) -> Rows:
    """The same useless vector from all: they agree with each other."""
    one = np.random.default_rng(0).standard_normal((1, view.own.shape[1]), np.float32)
    same = np.repeat(one, len(view.own), axis=0)
    return _of_length(same, view.norm) + view.noise(1e-3 * view.norm)


def _huge(view: RoundView) -> Rows:
    return np.full_like(view.own, 3e38)


def _late(view: RoundView) -> Rows:
    return view.own if view.number < _LATE_FROM else np.float32(-10) * view.own


def _small_tensors(view: RoundView) -> Rows:
    """Honest, but for the tensors that travel without compression: there, ten times against it."""
    forged_rows = view.own.copy()
    forged_rows[:, view.layout.large_count :] *= -10
    return forged_rows


def _biases(view: RoundView) -> Rows:
    """Nothing but a move of all biases, of honest length."""
    forged_rows = np.zeros_like(view.own)
    for tensor, start in zip(view.layout.tensors, view.layout.offsets, strict=True):
        if len(tensor.shape) == 1:
            forged_rows[:, start : start + tensor.count] = 1
    return _of_length(forged_rows, view.norm) + view.noise(0.05 * view.norm)


def _echo(view: RoundView) -> Rows:
    return np.repeat(view.last_change[None], len(view.own), axis=0)


def _apart(view: RoundView) -> Rows:
    """The mean turned round, five times as long, and not alike."""
    return view.spread(np.float32(-5) * view.mean)


def _small_shift(view: RoundView) -> Rows:
    """A shift within the spread of each coordinate (ALIE), and not alike."""
    return view.spread(view.mean - np.float32(1.5) * view.honest.std(axis=0))


def _matrices(layout: Layout) -> list[slice]:
    """Coordinates of each matrix or kernel, in layout order."""
    return [
        slice(start, start + tensor.count)
        for tensor, start in zip(layout.tensors, layout.offsets, strict=True)
        if len(tensor.shape) > 1
    ]


def _turn_layer(view: RoundView, layer: int) -> Rows:
    """Honest work in which the sign of one layer is turned."""
    forged_rows = view.own.copy()
    forged_rows[:, _matrices(view.layout)[layer]] *= -1
    return forged_rows


def _turn_layers_by_turns(view: RoundView) -> Rows:
    return _turn_layer(view, view.number % len(_matrices(view.layout)))


def _late_layer(view: RoundView) -> Rows:
    return view.own if view.number < _LATE_FROM else _turn_layer(view, 0)


def _noisy_layer(view: RoundView) -> Rows:
    """Honest work in which one layer is noise of its length."""
    forged_rows = view.own.copy()
    place = _matrices(view.layout)[1]
    noise = view.noise(1.0)[:, place]
    lengths = np.linalg.norm(forged_rows[:, place], axis=1, keepdims=True)
    forged_rows[:, place] = noise * (lengths / np.linalg.norm(noise, axis=1, keepdims=True))
    return forged_rows


def _growing(view: RoundView) -> Rows:
    """Longer by 15 % in each round, up to what is just short of too long."""
    return _of_length(view.own, view.norm * min(3.8, 1.15**view.number))


def _each_third(view: RoundView) -> Rows:
    """Minus its own work in each third round."""
    return view.own if view.number % 3 != 2 else _of_length(-view.own, view.norm)


def _paired_shift(view: RoundView) -> Rows:
    """A small shift in pairs, whose noise keeps them apart and cancels in the sum."""
    shift = view.mean - np.float32(1.5) * view.honest.std(axis=0)
    apart = float(np.median(np.linalg.norm(view.honest - view.mean, axis=1)))
    noise = _of_length(view.noise(1.0), 0.8 * apart)
    signs = np.where(np.arange(len(noise)) % 2, -1, 1).astype(np.float32)[:, None]
    result: Rows = shift + signs * noise[np.arange(len(noise)) // 2]
    return result


def _against(view: RoundView) -> Rows:
    """The mean turned round, of the median length, and not alike."""
    return _of_length(view.spread(-view.mean), view.norm)


def _just_enough(view: RoundView) -> Rows:
    """As much of its own work as it takes to pass, the rest against the mean."""
    mean = view.mean / np.linalg.norm(view.mean)
    own = view.own / np.linalg.norm(view.own, axis=1, keepdims=True)
    return _of_length(0.6 * own - 0.5 * mean, view.norm)


ATTACKS: Mapping[str, Attack] = {
    "flip x10": _scale(-10),
    "scale x10": _scale(10),
    LABEL_FLIP: lambda view: view.own,
    BACKDOOR: lambda view: view.own,
    "under": _under,
    "noise": lambda view: view.noise(view.norm),
    "zeros": lambda view: np.zeros_like(view.own),
    "echo": _echo,
    "replay": lambda view: view.first,
    "copies": _copies,
    "useless copies": _useless_copies,
    "huge": _huge,
    "late": _late,
    "small tensors": _small_tensors,
    "biases": _biases,
    "IPM 5 apart": _apart,
    "ALIE 1.5 apart": _small_shift,
    GROWING_FLIP: _growing,
    "first layer": lambda view: _turn_layer(view, 0),
    "last layer": lambda view: _turn_layer(view, -1),
    "layers by turns": _turn_layers_by_turns,
    "late layer": _late_layer,
    "noisy layer": _noisy_layer,
    "ALIE 1.5 in pairs": _paired_shift,
    "against": _against,
    JUST_ENOUGH: _just_enough,
    SHIFTED_LABELS: lambda view: view.own,
    "each third round": _each_third,
    ONE_SAMPLE: lambda view: view.own,
    "whisper": _scale(0.01),
    SMALL_BACKDOOR: lambda view: view.own,
}
"""Those of our own."""
POISONS: Mapping[str, Poison] = {
    LABEL_FLIP: turn_labels,
    GROWING_FLIP: turn_labels,
    SHIFTED_LABELS: shift_labels,
    BACKDOOR: plant_trigger,
    SMALL_BACKDOOR: plant_few_triggers,
    ONE_SAMPLE: repeat_sample,
}
"""What attackers do to their data who tell the truth about what they learnt."""
FIRST_LIES: Mapping[str, int] = {"late": _LATE_FROM, "late layer": _LATE_FROM}
"""Rounds of the first lies of attackers that begin with honest work."""
LEARNERS = frozenset(
    (
        *(*POISONS, "flip x10", "scale x10", "under", "replay", "copies", "late", "small tensors"),
        *("first layer", "last layer", "layers by turns", "late layer", "noisy layer"),
        *(JUST_ENOUGH, "each third round", "whisper"),
    )
)
"""Attacks whose attackers train; the others make updates of the honest ones, or of nothing."""
