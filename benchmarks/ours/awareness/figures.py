"""What one part of a benchmark brings to its table, and how figures are said."""

import statistics
from collections.abc import Iterable

from benchmarks.ours.cluster import BenchmarkError
from hypergpu.client.history import Reached
from netsim.run.report import RunReport

Row = tuple[str, str, str, str, str]
COLUMNS: Row = ("", "ours", "the other", "ratio", "promised")


class NotReachedError(BenchmarkError):
    """A run never came to its target: there is no time to tell."""


def target_of(report: RunReport, name: str) -> Reached:
    """What it took.

    Raises:
        NotReachedError: It was not reached.
    """
    if report.to_target is None:
        best = max((each.metric for each in report.evaluations if each.metric), default=0.0)
        what = f"{name} never reached {report.target:g}: {best:.3f} at best; {report.reason}"
        raise NotReachedError(what)
    return report.to_target


def spread(values: Iterable[float], unit: str = " s") -> str:
    """The median, and least to most where there are several."""
    found = sorted(values)
    middle = statistics.median(found)
    if len(found) == 1:
        return f"{middle:.3g}{unit}"
    return f"{middle:.3g} [{found[0]:.3g}..{found[-1]:.3g}]{unit}"


def times(ratio: float) -> str:
    """A ratio in three digits."""
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.3g}x"
