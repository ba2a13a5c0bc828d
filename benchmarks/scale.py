"""What it takes to go past one machine."""

from functools import partial

from benchmarks.ours.table import BenchmarkParts
from benchmarks.ours.takeover import takeover_figures


def parts(is_quick: bool) -> BenchmarkParts:
    """The parts."""
    return BenchmarkParts(
        title="Past one machine",
        columns=("", "seconds", "longest"),
        parts={"takeover": partial(takeover_figures, 1 if is_quick else 3)},
    )
