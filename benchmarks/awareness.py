"""Time to accuracy of network-aware training: against naive training, Flower, fixed settings."""

from collections.abc import Callable

from benchmarks.ours.awareness.changing import changing_figures
from benchmarks.ours.awareness.figures import COLUMNS, Figures, figures_of, merged
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
from benchmarks.table import Table


def run(is_quick: bool) -> Table:
    """Measure every part; a part whose target was never reached says so and has no figure.

    Raises:
        BenchmarkError: This machine cannot build the tunnel, or a run broke.
    """
    runs = Runs()
    effort = QUICK if is_quick else WHOLE

    def beside_flower() -> Figures:
        return flower_figures(aware_median_s(runs, "c", effort.seeds))

    parts: list[tuple[str, Callable[[], Figures]]] = [
        ("grades", lambda: grade_figures(runs, effort, is_quick=is_quick))
    ]
    if not is_quick:
        parts.append(("text", lambda: text_figures(runs, effort)))
        parts.append(("Flower", beside_flower))
        parts.append(("changing", lambda: changing_figures(runs, seeds=effort.seeds)))
        parts.append(("recovery", lambda: recovery_figures(runs, seeds=effort.seeds)))
    found = merged(figures_of(name, part) for name, part in parts)
    notes = [
        "Digits CNN of 1,010,458 parameters, 8 nodes, batch 4, steps of 50 ms or more, to 97 %.",
        "CUBIC hosts, losses four in a row, 100 Mbit/s at the coordinator; medians of seeds.",
    ]
    if is_quick:
        notes.append("Quick: without Flower, without fixed settings in a world that changes.")
    return Table(
        title="Time to accuracy",
        columns=COLUMNS,
        rows=found.rows,
        metrics=found.metrics,
        notes=[*notes, *found.notes, runs.note()],
    )
