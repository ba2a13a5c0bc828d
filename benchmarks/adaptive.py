"""The two laws of planned jobs, in virtual time: a node never hurts, and a node counts. Then what
batches of nodes' own cost by the sample, and how far estimates of jobs are off, in virtual time
and with real processes.

A job of 40 stated rounds among equal nodes, with and without one more: up to 64 times slower, or on
a bad line. Time is to the same number of accepted samples.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from math import ceil
from statistics import fmean, median

from benchmarks.ours.adaptive.batches import loss_gaps
from benchmarks.ours.adaptive.fleets import (
    ADDED,
    AddedNode,
    FleetRun,
    UsualNodes,
    counts,
    counts_of_line,
    hurts,
    job_spec,
    run_fleet,
)
from benchmarks.ours.adaptive.forecast_runs import RunTrial, run_trials
from benchmarks.ours.adaptive.forecasts import WORLDS, ForecastTrial, trial_in
from benchmarks.ours.adaptive.process_fleets import POINTS, run_points
from benchmarks.ours.table import BenchmarkParts, PartFigures
from netsim.network.profiles import profile

TIMES = (1, 2, 4, 8, 16, 32, 64)
STEPS, NODES = (20, 100), (1, 4)
LINES = ("3g-moving", "geo-sat", "lte-moving", "home-dsl", "wifi-bad", "stress", "D")
FIBRE = UsualNodes(profile("home-fibre").shape.link)
_QUICK_TIMES = (4, 64)


def parts(is_quick: bool) -> BenchmarkParts:
    """Laws, training with batches of nodes' own, and estimates, a part each."""
    return BenchmarkParts(
        title="Adaptive: one more node, batches of nodes' own, and estimates",
        columns=(
            "what",
            "inner steps or batches",
            "others or rate",
            "hurts or grown",
            "figure",
            "",
        ),
        parts={
            "laws": partial(_laws, is_quick=is_quick),
            "batches": partial(loss_gaps, is_quick=is_quick),
            "estimates": partial(_estimates, is_quick=is_quick),
            "processes": partial(_processes, is_quick=is_quick),
        },
    )


def _laws(*, is_quick: bool) -> PartFigures:
    """Each fleet once; virtual time gives the same figures each time."""
    slower = _slower(_QUICK_TIMES if is_quick else TIMES)
    lines = _lines(LINES[:1] if is_quick else LINES)
    every = [*slower.values(), *lines.values()]
    violations = [why for each in every for why in each.beside.broken]
    if violations:
        raise AssertionError(f"a world broke an invariant: {violations[0]}")
    shares = {key: counts(each.beside, each.added) for key, each in slower.items()}
    firsts = [
        each.beside.first_rounds[ADDED] for (times, _, _), each in slower.items() if times <= 16
    ]
    return PartFigures(
        rows=[
            *(
                _row(f"{times}x slower", key[1:], each, shares[key])
                for key, each in slower.items()
                for times in key[:1]
            ),
            *(
                _row(name, (20, nodes), each, counts_of_line(each.beside, each.added))
                for (name, nodes), each in lines.items()
            ),
        ],
        metrics={
            "hurts_max": max(each.hurts for each in every),
            "counts_min_16": min(share for key, share in shares.items() if key[0] <= 16),
            "counts_min_64": min(shares.values()),
            "bad_line_share": min(
                counts_of_line(each.beside, each.added) for each in lines.values()
            ),
            "first_update_rounds_max": max(firsts),
        },
        notes=(
            "Laws: time over that without the node, its samples over its capacity, its updates;",
            "virtual time, steps of 200 ms, batches of 16, 100,000 parameters.",
            "Others are next to the coordinator, and on home-fibre beside a bad line.",
            "Capacity: what it computes in the job's time at its own step time;",
            "of a line, with its own time to move the bytes of each round.",
        ),
    )


def _estimates(*, is_quick: bool) -> PartFigures:
    """Jobs in drawn worlds, and five of processes, as they were forecast and as they went."""
    worlds = [trial_in(seed) for seed in range(6 if is_quick else WORLDS)]
    runs = run_trials()
    every: list[ForecastTrial | RunTrial] = [*worlds, *runs]
    errors = sorted(each.error for each in every)
    return PartFigures(
        rows=[_estimate_row(each) for each in every],
        metrics={
            "estimate_error": median(errors),
            "estimate_error_p90": _ninth_decile(errors),
            "estimate_error_runs": median(each.error for each in runs),
            "estimate_within_range": sum(each.is_within for each in every) / len(every),
        },
        notes=(
            "Estimates: what a job took, what was said before, and the error over what it took.",
            "In drawn worlds nodes come and go and lines change; in every third some are new.",
        ),
    )


def _processes(*, is_quick: bool) -> PartFigures:
    """The laws at four points by real processes."""
    pairs = run_points(POINTS[:1] if is_quick else POINTS)
    return PartFigures(
        rows=[
            [
                f"processes: {each.point.times_slower}x slower, seed {each.seed}",
                str(each.point.inner_steps),
                str(each.point.others),
                f"{each.hurts:.2f}; to a loss {each.loss_hurts:.2f}",
                f"{each.counts:.2f}",
                str(each.updates),
            ]
            for each in pairs
        ],
        metrics={
            "hurts_max_processes": max(each.hurts for each in pairs),
            "loss_hurts_processes": fmean(each.loss_hurts for each in pairs),
            "counts_min_processes": min(each.counts for each in pairs),
        },
        notes=("Processes: steps of 50 ms or so many times that, two cores for all of them.",),
    )


def _ninth_decile(ordered: Sequence[float]) -> float:
    return ordered[ceil(0.9 * len(ordered)) - 1]


def _estimate_row(trial: ForecastTrial | RunTrial) -> list[str]:
    time_left = trial.forecast.left_ms
    low_s, middle_s, high_s = (
        each / 1000 for each in (time_left.low, time_left.middle, time_left.high)
    )
    estimate_text = f"said {middle_s:.0f} s ({low_s:.0f} to {high_s:.0f})"
    new = f"{trial.unseen} new"
    took = f"took {trial.took_ms / 1000:.0f} s"
    return [trial.name, "", new, took, estimate_text, f"{trial.error:.2f} off"]


class FleetPair:
    """A fleet with one more node beside the same one without it."""

    def __init__(self, added: AddedNode, without: FleetRun, beside: FleetRun) -> None:
        self.added = added
        self.beside = beside
        self.hurts = hurts(without, beside)


def _slower(times: tuple[int, ...]) -> dict[tuple[int, int, int], FleetPair]:
    return {
        (each, steps, nodes): _pair(AddedNode(each), steps, nodes, UsualNodes())
        for steps, nodes, each in itertools.product(STEPS, NODES, times)
    }


def _lines(names: tuple[str, ...]) -> dict[tuple[str, int], FleetPair]:
    return {
        (name, nodes): _pair(AddedNode(1, profile(name).shape.link), 20, nodes, FIBRE)
        for nodes, name in itertools.product((1, 3), names)
    }


def _pair(added: AddedNode, steps: int, nodes: int, usual: UsualNodes) -> FleetPair:
    spec = job_spec(inner_steps=steps, nodes=nodes)
    without, beside = (run_fleet(spec, seed=1, usual=usual, added=each) for each in ((), (added,)))
    return FleetPair(added, without, beside)


def _row(name: str, of: tuple[int, ...], pair: FleetPair, share: float) -> list[str]:
    beside = pair.beside
    updates = f"{beside.updates[ADDED]} in {beside.rounds}"
    return [name, *map(str, of), f"{pair.hurts:.3f}", f"{share:.2f}", updates]
