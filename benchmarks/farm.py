"""Farm jobs: bundles a second under kills, unequal nodes on home lines, and liars."""

import statistics
from functools import partial

from benchmarks.ours.farm.fleet_share import fleet_share
from benchmarks.ours.farm.liars import CASES, run_case
from benchmarks.ours.farm.load import FarmLoad, load_figures
from benchmarks.ours.table import BenchmarkParts, PartFigures

_ITEMS = 100_000


def parts(is_quick: bool) -> BenchmarkParts:
    """Return the parts. Quick: 64 connections and no kill, one seed."""
    load = FarmLoad(64, 50_000, 0.0) if is_quick else FarmLoad(256, 1_200_000, 10.0)
    seeds = 1 if is_quick else 10
    return BenchmarkParts(
        title="Farm jobs",
        columns=("", "measured", "beside it"),
        parts={
            "load": partial(load_figures, load),
            "fleet": partial(fleet_figures, seeds),
            "liars": partial(liar_figures, seeds),
        },
    )


def fleet_figures(seeds: int) -> PartFigures:
    """Throughput and tail of eight unequal nodes, the worst of some seeds."""
    shares = [fleet_share(_ITEMS, seed) for seed in range(seeds)]
    throughput_share = min(each.throughput_share for each in shares)
    tail_share = max(each.tail_share for each in shares)
    return PartFigures(
        rows=[
            ("throughput over the sum of nodes alone", f"{throughput_share:.3f}", "0.95 wanted"),
            ("time from 95 % to the end, over that to 95 %", f"{tail_share:.3f}", "0.08 wanted"),
        ],
        metrics={
            "throughput_share": round(throughput_share, 4),
            "tail_share": round(tail_share, 4),
        },
        notes=["virtual time; alone and together a node waits for its own transfers"],
    )


def liar_figures(seeds: int) -> PartFigures:
    """Work for nothing and wrong items among 100 nodes of which none is known, by kind of liar."""
    rows: list[tuple[str, ...]] = []
    metrics: dict[str, float] = {}
    for name, case in CASES.items():
        runs = [run_case(case, _ITEMS, seed) for seed in range(seeds)]
        unchecked_wrong = run_case(case, _ITEMS, 0, is_checked=False).wrong_accepted
        extra_work = statistics.mean(run.computed_items for run in runs) / _ITEMS - 1
        wrong_items = statistics.mean(run.wrong_accepted for run in runs)
        unfinished_count = sum(run.phase != "finished" for run in runs)
        rows.append(
            (
                name,
                f"{extra_work:.1%} more work, {wrong_items / _ITEMS:.2%} wrong",
                f"{wrong_items / max(1, unchecked_wrong):.1%} of {unchecked_wrong:,} unchecked",
            )
        )
        metrics[f"liar_extra_work_{name}"] = round(extra_work, 4)
        metrics[f"wrong_accepted_{name}"] = round(wrong_items / _ITEMS, 6)
        metrics[f"wrong_over_unchecked_{name}"] = round(wrong_items / max(1, unchecked_wrong), 4)
        metrics[f"unfinished_{name}"] = unfinished_count
    return PartFigures(rows=rows, metrics=metrics, notes=[f"means of {seeds} seeds"])
