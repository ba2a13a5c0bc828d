"""Farm jobs: bundles a second under kills, unequal nodes on home lines, and liars."""

import json
import statistics
import subprocess
import sys
from functools import partial

import msgspec

from benchmarks.ours.farm.embedding import embedding_figures
from benchmarks.ours.farm.fleet_share import busy_share, fleet_share
from benchmarks.ours.farm.liars import CASES, run_case
from benchmarks.ours.farm.lines import line_figures
from benchmarks.ours.farm.load import FarmLoad, load_figures
from benchmarks.ours.farm.shares import share_figures
from benchmarks.ours.table import BenchmarkParts, PartFigures

_ITEMS = 100_000
_RAY_S = 600.0
_KILLS, _QUICK_KILLS = 200, 5
_ITEMS_A_KILL = 15_000


def parts(is_quick: bool) -> BenchmarkParts:
    """Return the parts. Quick: 64 connections and no kill, one seed."""
    load = FarmLoad(64, 50_000, 0.0) if is_quick else FarmLoad(256, 1_200_000, 10.0)
    seeds = 1 if is_quick else 10
    return BenchmarkParts(
        title="Farm jobs",
        columns=("", "measured", "beside it"),
        parts={
            "load": partial(load_and_ray_figures, load),
            "kills": partial(kill_figures, _QUICK_KILLS if is_quick else _KILLS),
            "embed": partial(embedding_figures, 500 if is_quick else 20_000),
            "fleet": partial(fleet_figures, seeds),
            "shares": partial(share_figures, 400 if is_quick else 4_000),
            "lines": partial(line_figures, 200 if is_quick else 2_000),
            "liars": partial(liar_figures, seeds),
        },
    )


def load_and_ray_figures(load: FarmLoad) -> PartFigures:
    """Bundles a second under kills, and Ray's tasks on the same items right after."""
    figures = load_figures(load)
    command = [
        sys.executable,
        "-m",
        "benchmarks.peers.ray_items",
        str(load.items),
        str(2 * load.nodes),
    ]
    answer = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_RAY_S)
    if answer.returncode:
        reason = (answer.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return msgspec.structs.replace(
            figures, rows=[*figures.rows, ("items a second over Ray's", f"blocked: {reason}", "")]
        )
    ray_items_per_s = float(json.loads(answer.stdout.splitlines()[-1])["items_per_s"])
    ratio = figures.metrics["items_per_s"] / ray_items_per_s
    return msgspec.structs.replace(
        figures,
        rows=[
            *figures.rows,
            ("items a second over Ray's", f"{ratio:.2f}", f"{ray_items_per_s:,.0f}"),
        ],
        metrics={**figures.metrics, "ray_items_ratio": round(ratio, 3)},
    )


def kill_figures(kills: int) -> PartFigures:
    """Items lost or doubled where the coordinator is killed at instants by chance."""
    load = FarmLoad(64, kills * _ITEMS_A_KILL, 0.5, kills)
    figures = load_figures(load)
    lost_items = figures.metrics["items_lost_or_doubled"]
    kill_count = int(figures.metrics["load_kills"])
    return PartFigures(
        rows=[(f"items lost or doubled by {kill_count} kills", str(lost_items), "0 wanted")],
        metrics={"items_lost_or_doubled_kills": lost_items, "farm_kills": kill_count},
        notes=[f"{load.items:,} items, 64 connections by gRPC"],
    )


def fleet_figures(seeds: int) -> PartFigures:
    """Throughput and tail of eight unequal nodes, the worst of some seeds."""
    shares = [fleet_share(_ITEMS, seed) for seed in range(seeds)]
    throughput_share = min(each.throughput_share for each in shares)
    tail_share = max(each.tail_share for each in shares)
    busy_1, busy_2 = (
        min(busy_share(_ITEMS, seed, queues_work=queues_work) for seed in range(seeds))
        for queues_work in (False, True)
    )
    return PartFigures(
        rows=[
            ("throughput over the sum of nodes alone", f"{throughput_share:.3f}", "0.95 wanted"),
            ("time from 95 % to the end, over that to 95 %", f"{tail_share:.3f}", "0.08 wanted"),
            (
                "time that nodes on lines of 200 ms compute, two open bundles each",
                f"{busy_2:.3f}",
                f"{busy_1:.3f} with one",
            ),
        ],
        metrics={
            "throughput_share": round(throughput_share, 4),
            "tail_share": round(tail_share, 4),
            "busy_share_1": round(busy_1, 4),
            "busy_share_2": round(busy_2, 4),
        },
        notes=["virtual time; a node's line and device do one thing at a time"],
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
