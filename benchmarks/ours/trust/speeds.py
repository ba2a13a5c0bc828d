"""What nodes gain that state another speed than theirs, or hold their updates back: virtual time,
beside honest nodes, against the same node when it is honest.
"""

import itertools
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

from benchmarks.ours.adaptive.fleets import (
    ADDED,
    AddedNode,
    FleetRun,
    hurts,
    job_spec,
    run_fleet,
)
from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.table import PartFigures
from coordinator.core.training.job.trust_memory import DuplicateMemory
from coordinator.core.training.plan.decision import NodePlan
from coordinator.core.training.trust.duplicates import RoundWorker, draw_duplicates
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds
from netsim.virtual.worlds import SpeedLie

INNER_STEPS, SEED = 20, 1
NODES, TIMES = (1, 4), (1, 4, 16)
"""Honest nodes, and how much slower than they the liar is."""
UNDERSTATED = SpeedLie(stated_share=16.0)
OVERSTATED = (SpeedLie(stated_share=1 / 16), SpeedLie(stated_share=1e-6))
HOLDS = (SpeedLie(hold_ms=5_000), SpeedLie(hold_ms=30_000))
_CHECKED_ROUNDS, _USUAL_STEPS, _LESS = 4_000, 20, 2
_SURPLUS = 2.0


class ToldRun(NamedTuple):
    """A job with a liar beside the same job in which it is honest, and the one without it."""

    without: FleetRun
    honest: FleetRun
    told: FleetRun

    @property
    def samples_ratio(self) -> float:
        """Accepted samples a second, which are what is paid, over those of the honest node."""
        rates = [each.samples[ADDED] / each.took_ms for each in (self.told, self.honest)]
        return rates[0] / rates[1]

    @property
    def weight_ratio(self) -> float:
        """Weight of a sample in folds over that of the honest node."""
        each = [run.weights[ADDED] / max(1, run.samples[ADDED]) for run in (self.told, self.honest)]
        return each[0] / each[1]

    @property
    def surplus_leases(self) -> int:
        """Leases with more than twice the steps of the honest node's largest, in a
        row from the first of them.
        """
        most = _SURPLUS * max(self.honest.planned_steps[ADDED])
        steps = itertools.dropwhile(lambda each: each <= most, self.told.planned_steps[ADDED])
        return sum(1 for _ in itertools.takewhile(lambda each: each > most, steps))


def told_runs(*lies: SpeedLie) -> Iterator[tuple[str, ToldRun]]:
    """Each fleet with each lie."""
    for nodes in NODES:
        spec = job_spec(inner_steps=INNER_STEPS, nodes=nodes)
        without = run_fleet(spec, seed=SEED)
        for times in TIMES:
            honest = run_fleet(spec, seed=SEED, added=(AddedNode(times),))
            for lie in lies:
                told_run = run_fleet(spec, seed=SEED, added=(AddedNode(times, lie=lie),))
                if told_run.broken:
                    raise BenchmarkError(f"a world broke an invariant: {told_run.broken[0]}")
                yield f"{times}x slower beside {nodes}", ToldRun(without, honest, told_run)


def checks_per_step(steps: int) -> float:
    """Checks by secret duplicates for each step of a node with so many among usual ones."""
    nodes = [NodeId(f"{number:02d}") for number in range(8)]
    plans = {
        node: NodePlan(_USUAL_STEPS, "int4", "", forecast_ms=Milliseconds(1_000)) for node in nodes
    }
    plans[nodes[0]] = NodePlan(steps, "int4", "", forecast_ms=Milliseconds(1_000))
    workers = [RoundWorker(node, plan, has_begun=False) for node, plan in plans.items()]
    checks = 0
    for number in range(_CHECKED_ROUNDS):
        pairs = draw_duplicates(f"speeds/{number}", DuplicateMemory(), workers, 16)
        checks += nodes[0] in {*pairs, *pairs.values()}
    return checks / (_CHECKED_ROUNDS * steps)


def stated_speeds() -> PartFigures:
    """Measure the gain of stating less, of stating more, and of holding updates back."""
    less = dict(told_runs(UNDERSTATED))
    more = list(told_runs(*OVERSTATED))
    held_runs = list(told_runs(*HOLDS))
    checks = checks_per_step(_USUAL_STEPS // _LESS) / checks_per_step(_USUAL_STEPS)
    step_ratio = min(
        each.told.planned_steps[ADDED][1] / each.honest.planned_steps[ADDED][1]
        for each in less.values()
    )
    metrics = {
        "understated_pay_ratio": max(each.samples_ratio for each in less.values()),
        "understated_steps_ratio": step_ratio,
        "understated_checks_ratio": checks,
        "overstated_surplus_leases": median(each.surplus_leases for _, each in more),
        "overstated_pay_ratio": max(each.samples_ratio for _, each in more),
        "overstated_hurts": max(hurts(each.without, each.told) for _, each in more),
        "held_weight_ratio": max(each.weight_ratio for _, each in held_runs),
        "held_pay_ratio": max(each.samples_ratio for _, each in held_runs),
    }
    return PartFigures(
        rows=[
            [
                "states 16 times slower, pay a second over honest",
                f"{metrics['understated_pay_ratio']:.2f}x",
            ],
            ["half of the steps, checks a step over honest", f"{checks:.2f}x"],
            [
                "states 16 times faster and more, leases with a surplus",
                f"{metrics['overstated_surplus_leases']:.0f} in the median",
                f"pay {metrics['overstated_pay_ratio']:.2f}x",
                f"hurts {metrics['overstated_hurts']:.2f}",
            ],
            [
                "holds updates back, weight a sample over honest",
                f"{metrics['held_weight_ratio']:.2f}x",
                f"pay {metrics['held_pay_ratio']:.2f}x",
            ],
        ],
        metrics=metrics,
        notes=["Stated speeds: the worst of one or four others, 1, 4 and 16 times faster."],
    )
