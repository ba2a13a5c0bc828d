"""Micro-batches of a training through a ring, of the rows that its user sent."""

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from hypergpu.rings.ring_training import RingTraining
from hypergpu.rings.token_rows import LabelledRow, TokenRows, rows_of_step
from hypergpu.serving.training_messages import TrainForward

_STEPS_KEPT = 2


class StepTotals(NamedTuple):
    """What a step takes."""

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
        )


class TrainingBatches:
    """Rows by step.

    Args:
        path: The file of rows.
        training: Settings.

    Raises:
        HyperGPUError: REQUEST_INVALID, it is no such file.
    """

    def __init__(self, path: Path, training: RingTraining) -> None:
        self._rows = TokenRows(path)
        self._training = training
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
        rows = self.rows_of(step)
        return StepTotals(
            sum(len(row.tokens) for row in rows), sum(row.counted_tokens for row in rows)
        )

    def _read_step(self, step: int) -> tuple[LabelledRow, ...]:
        training = self._training
        numbers = rows_of_step(len(self._rows), training.batch_rows, step, training.seed)
        return tuple(self._rows.row(number) for number in numbers)
