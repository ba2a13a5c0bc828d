"""Time to accuracy of network-aware training: against naive training, Flower, fixed settings."""

from collections.abc import Callable

from benchmarks.ours.awareness.changing import changing_figures
from benchmarks.ours.awareness.figures import COLUMNS
from benchmarks.ours.awareness.flower import flower_figures
from benchmarks.ours.awareness.grades import (
    QUICK,
    WHOLE,
    aware_median_s,
    grade_figures,
    text_figures,
)
from benchmarks.ours.awareness.recovery import recovery_figures
from benchmarks.ours.awareness.runs import Runs
from benchmarks.table.parts import BenchmarkParts, PartFigures

_NOTES = (
    "Digits CNN of 1,010,458 parameters, 8 nodes, batch 4, steps of 50 ms or more, to 97 %.",
    "CUBIC hosts, losses four in a row, 100 Mbit/s at the coordinator; medians of seeds.",
)


def parts(is_quick: bool) -> BenchmarkParts:
    """Its parts; one whose target was never reached says so and has no figure."""
    runs = Runs()
    effort = QUICK if is_quick else WHOLE

    def beside_flower() -> PartFigures:
        return flower_figures(aware_median_s(runs, "c", effort.seeds))

    def notes() -> list[str]:
        said = [*_NOTES]
        if is_quick:
            said.append("Quick: without Flower, without fixed settings in a world that changes.")
        return [*said, runs.note()]

    measures: dict[str, Callable[[], PartFigures]] = {
        "grades": lambda: grade_figures(runs, effort, is_quick=is_quick)
    }
    if not is_quick:
        measures |= {
            "text": lambda: text_figures(runs, effort),
            "flower": beside_flower,
            "changing": lambda: changing_figures(runs, seeds=effort.seeds),
            "recovery": lambda: recovery_figures(runs, seeds=effort.seeds),
        }
    return BenchmarkParts(title="Time to accuracy", columns=COLUMNS, parts=measures, notes=notes)
