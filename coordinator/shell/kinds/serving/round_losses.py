"""Losses of a training through a ring, as its last stage gives them."""

from collections.abc import Iterable

from coordinator.shell.kinds.serving.training_batches import StepTotals


class RoundLosses:
    """Losses of the steps whose round is not stored, and of rows that are held out."""

    def __init__(self) -> None:
        self._steps: dict[int, float] = {}
        """By step, the sum of its tokens that count."""
        self._held_out: dict[int, dict[int, float]] = {}
        """By steps before the evaluation, the sum of each micro-batch."""

    def add(self, step: int, number: int, loss: float) -> None:
        """Add a micro-batch of a step; the first one begins the step anew."""
        before = self._steps.get(step, 0.0) if number else 0.0
        self._steps[step] = before + loss

    def add_held_out(self, step: int, number: int, loss: float) -> None:
        """Note a micro-batch of the evaluation after so many steps."""
        self._held_out.setdefault(step, {})[number] = loss

    def forget_before(self, step: int) -> None:
        """Forget what belongs to rounds that are stored."""
        self._steps = {each: loss for each, loss in self._steps.items() if each >= step}
        self._held_out = {each: sums for each, sums in self._held_out.items() if each > step}

    def total(self, steps: Iterable[int]) -> float:
        """Sum of some steps' tokens that count."""
        return sum(self._steps.get(each, 0.0) for each in steps)

    def mean(self, steps: Iterable[int], counted_tokens: int) -> float:
        """Mean loss of some steps' tokens that count."""
        return self.total(steps) / max(1, counted_tokens)

    def held_out_mean(self, step: int, totals: StepTotals) -> float | None:
        """The same of the evaluation after so many steps; None: nothing was evaluated."""
        sums = self._held_out.get(step)
        if sums is None:
            return None
        # In one order, whichever came first: a replayed evaluation has the same bits.
        return sum(sums[number] for number in sorted(sums)) / max(1, totals.counted_tokens)
