"""Micro-batches of a training through a ring, of the rows that its user sent."""

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from hypergpu.rings.ring_training import RingTraining
from hypergpu.rings.token_rows import LabelledRow, TokenRows, rows_of_step
from hypergpu.serving.training_messages import TrainForward

_STEPS_KEPT = 2


class StepTotals(NamedTuple):
    """What a step takes, or an evaluation."""

    tokens: int
    counted_tokens: int
    """Tokens that count in the loss."""


class MicroBatch(NamedTuple):
    """Rows that go around together."""

    step: int
    number: int
    rows: tuple[LabelledRow, ...]
    weight: float
    """One over the tokens that count in the step."""
    ends_step: bool
    is_evaluation: bool = False
    """Whether its rows are held out."""

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(len(row.tokens) for row in self.rows)

    def forward(self, states: bytes, *, is_last: bool) -> TrainForward:
        """The micro-batch as a stage is told of it.

        Args:
            states: Sealed activations of the stage before; of the first one none.
            is_last: Whether the stage is the last one, which has the labels.
        """
        tokens = () if states else tuple(int(each) for row in self.rows for each in row.tokens)
        labels = tuple(int(each) for row in self.rows for each in row.labels) if is_last else ()
        return TrainForward(
            micro_batch=self.number,
            lengths=tuple(len(row.tokens) for row in self.rows),
            tokens=tokens,
            states=states,
            labels=labels,
            weight=self.weight if is_last else 0.0,
            ends_step=self.ends_step,
            step=self.step,
            is_evaluation=self.is_evaluation,
        )


class TrainingBatches:
    """Rows by step.

    Args:
        path: The file of rows.
        training: Settings.
        ring: The ring that takes them, from 0 on: of R rings ring r takes in step t what a ring
            alone would take in step t R + r, so that no row is taken twice in a pass over all.

    Raises:
        HyperGPUError: REQUEST_INVALID, it is no such file.
    """

    def __init__(self, path: Path, training: RingTraining, ring: int = 0) -> None:
        self._rows = TokenRows(path)
        self._training = training
        self._ring = ring
        self._rows_of = lru_cache(_STEPS_KEPT)(self._read_step)

    @property
    def micro_tokens(self) -> float:
        """Tokens of a micro-batch on average."""
        return self._rows.mean_tokens * self._training.micro_rows

    def rows_of(self, step: int) -> tuple[LabelledRow, ...]:
        """Rows of a step, from 0 on."""
        return self._rows_of(step)

    def micro_batch(self, step: int, number: int) -> MicroBatch:
        """A micro-batch of a step, both from 0 on."""
        rows, training = self.rows_of(step), self._training
        first = number * training.micro_rows
        return MicroBatch(
            step,
            number,
            rows[first : first + training.micro_rows],
            1 / max(1, sum(row.counted_tokens for row in rows)),
            ends_step=number == training.micro_batches - 1,
        )

    def step_totals(self, step: int) -> StepTotals:
        """Tokens of a step."""
        return totals_of(self.rows_of(step))

    def totals(self, steps: Iterable[int]) -> StepTotals:
        """Tokens of some steps."""
        totals = [self.step_totals(step) for step in steps]
        counted_tokens = sum(each.counted_tokens for each in totals)
        return StepTotals(sum(each.tokens for each in totals), counted_tokens)

    def _read_step(self, step: int) -> tuple[LabelledRow, ...]:
        training = self._training
        place = step * training.rings + self._ring
        numbers = rows_of_step(len(self._rows), training.batch_rows, place, training.seed)
        return tuple(self._rows.row(number) for number in numbers)


class HeldOutBatches:
    """Micro-batches of the rows that are held out, always the same ones.

    Args:
        path: The file of rows.
        training: Settings.

    Raises:
        HyperGPUError: REQUEST_INVALID, it is no such file.
    """

    def __init__(self, path: Path, training: RingTraining) -> None:
        self._rows = TokenRows(path)
        self._micro_rows = training.micro_rows
        rows = (self._rows.row(number) for number in range(len(self._rows)))
        self.totals = totals_of(rows)
        """Tokens of all rows."""

    @property
    def count(self) -> int:
        """Micro-batches of an evaluation."""
        return -(-len(self._rows) // self._micro_rows)

    def micro_batch(self, step: int, number: int) -> MicroBatch:
        """A micro-batch, from 0 on, after a number of steps."""
        first = number * self._micro_rows
        places = range(first, min(len(self._rows), first + self._micro_rows))
        rows = tuple(self._rows.row(place) for place in places)
        return MicroBatch(step, number, rows, 1.0, ends_step=False, is_evaluation=True)


class TrainingRows(NamedTuple):
    """All rows of a training."""

    train: TrainingBatches
    held_out: HeldOutBatches | None
    """None: none are."""

    @property
    def held_out_batches(self) -> int:
        """Micro-batches of an evaluation; 0: nothing is evaluated."""
        return 0 if self.held_out is None else self.held_out.count

    @property
    def held_out_totals(self) -> StepTotals:
        """Tokens of an evaluation."""
        return StepTotals(0, 0) if self.held_out is None else self.held_out.totals

    def micro_batch(self, step: int, number: int, *, is_evaluation: bool = False) -> MicroBatch:
        """A micro-batch of a step, or of the evaluation after so many steps.

        Raises:
            ValueError: No rows are held out.
        """
        if not is_evaluation:
            return self.train.micro_batch(step, number)
        if self.held_out is None:
            raise ValueError("no rows are held out")
        return self.held_out.micro_batch(step, number)


def totals_of(rows: Iterable[LabelledRow]) -> StepTotals:
    """Tokens of some rows."""
    tokens = counted_tokens = 0
    for row in rows:
        tokens += len(row.tokens)
        counted_tokens += row.counted_tokens
    return StepTotals(tokens, counted_tokens)
