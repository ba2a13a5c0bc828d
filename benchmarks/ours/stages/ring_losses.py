"""What several rings do to the loss: two against one, at equal tokens and at equal time."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from benchmarks.ours.serving.random_model import VOCABULARY
from benchmarks.ours.stages.several_rings import RingsInOneProcess
from benchmarks.ours.stages.trained_figures import random_whole
from hypergpu.rings.ring_training import RingTraining
from hypergpu.rings.token_rows import LabelledRow, write_rows

_LAYERS = 6
_ROUNDS = 12
_TRAINING = RingTraining(
    rounds=_ROUNDS, inner_steps=5, batch_rows=8, micro_rows=8, learning_rate=5e-3, mode="full"
)
_TRAIN_ROWS, _HELD_OUT_ROWS, _ROW_TOKENS = 960, 64, 12
_HEAD_FACTOR = 20.0
"""By which the random head is larger, so that its logits can be those of a model that was trained.
"""
_TOKENS = 16
"""Tokens of which rows are made."""


class RingLosses(NamedTuple):
    """Losses of rows that are held out."""

    one: float
    """One ring's."""
    one_twice: float
    """One ring's that had twice the time, and so the tokens of two."""
    two: float
    """That of two rings."""


def _rows(count: int, draws: np.random.Generator) -> list[LabelledRow]:
    """Rows in which each token follows from the one before, one time in ten from nothing."""
    rows = []
    for _ in range(count):
        tokens = [int(draws.integers(0, _TOKENS))]
        while len(tokens) < _ROW_TOKENS:
            is_noise = draws.random() < 0.1
            next_token = int(draws.integers(0, _TOKENS)) if is_noise else 5 * tokens[-1] + 3
            tokens.append(next_token % _TOKENS)
        row = np.array(tokens, np.int32) + VOCABULARY - _TOKENS
        rows.append(LabelledRow(row, row))
    return rows


def ring_losses(seed: int) -> RingLosses:
    """Train three times from the same base.

    Args:
        seed: Of the rows and of their order.
    """
    draws = np.random.default_rng(seed)
    held_out = _rows(_HELD_OUT_ROWS, draws)
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "rows"
        write_rows(_rows(_TRAIN_ROWS, draws), rows)
        whole = random_whole(Path(scratch))
        whole.lm_head.weight.data.mul_(_HEAD_FACTOR)

        def loss(rings: int, rounds: int) -> float:
            training = replace(_TRAINING, rings=rings, rounds=rounds, seed=seed)
            run = RingsInOneProcess(whole, _LAYERS, training, rows, held_out).run()
            return run[-1].held_out_loss

        return RingLosses(loss(1, _ROUNDS), loss(1, 2 * _ROUNDS), loss(2, _ROUNDS))


def median_losses(seeds: Sequence[int]) -> RingLosses:
    """The median of each, over seeds."""
    runs = [ring_losses(seed) for seed in seeds]
    return RingLosses(*(float(np.median([run[place] for run in runs])) for place in range(3)))
