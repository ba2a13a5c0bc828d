"""What grows past one machine: the fold of large models."""

from functools import partial

from benchmarks.ours.scale.fold import fold_figures
from benchmarks.ours.table import BenchmarkParts


def parts(is_quick: bool) -> BenchmarkParts:
    """The parts. Quick: 16M parameters in place of a billion."""
    return BenchmarkParts(
        title="Past one machine",
        columns=("", "measured"),
        parts={"fold": partial(fold_figures, 1 << 24 if is_quick else 1_000_000_000)},
    )
