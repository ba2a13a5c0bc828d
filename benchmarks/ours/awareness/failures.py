"""What it costs that a fifth of the nodes is killed again and again; Flower in the same test."""

import json
import math
import random
import statistics
from typing import NamedTuple

from benchmarks.ours.awareness.economy import GRADE, aware_report
from benchmarks.ours.awareness.figures import NotReachedError, target_of, times
from benchmarks.ours.awareness.flower import (
    JOB,
    RESIDENT,
    FlowerRun,
    flower_run,
    reached_by_flower,
    round_s,
    rounds_to_target,
)
from benchmarks.ours.awareness.naive import GRADES
from benchmarks.ours.awareness.runs import KEPT, Runs, of_seeds
from benchmarks.table.parts import PartFigures
from hypergpu.jobfile import read_job_file

PROMISED = 1.25
NODES = tuple(f"node-{number}" for number in range(1, 9))
KILLED_SHARE = 0.2
KILL_EACH_S = 10.0
"""As long as a killed node takes to be at work again, most of it for loading torch: about a fifth
of the nodes is missing at any time. Real programs know no rounds that a script could count.
"""
AWAY_S = 2.0
HORIZON_S = 600.0
FLOWER_LIMIT_S = 900.0
"""When Flower's run ends without having come to the target."""
FLOWER_ROUNDS = 500
"""More than it can do until then."""
FLOWER_ROW = "   Flower's FedAvg resident, the same"


class Kill(NamedTuple):
    """Nodes that die at the same moment, counted from when the job begins."""

    at_s: float
    nodes: tuple[str, ...]


def kills(seed: int, until_s: float) -> list[Kill]:
    """What the seed draws; a longer script begins as a shorter one."""
    dice = random.Random(f"kills/{seed}")
    found = []
    for number in range(1, math.ceil(until_s / KILL_EACH_S)):
        killed = tuple(name for name in NODES if dice.random() < KILLED_SHARE)
        if killed:
            found.append(Kill(number * KILL_EACH_S, killed))
    return found


def failing_world(seed: int) -> str:
    """Grade C with a script of kills that the seed draws."""
    faults = []
    for kill in kills(seed, HORIZON_S):
        named = ", ".join(f'"{name}"' for name in kill.nodes)
        faults.append(
            f'[[faults]]\nkind = "crash"\nnodes = [{named}]\n'
            f'at = "{round(1000 * kill.at_s)}ms"\nfor = "{round(1000 * AWAY_S)}ms"\n'
        )
    text = (GRADES / f"{GRADE}.toml").read_text(encoding="utf-8")
    return text.replace('job = "../jobs', f'job = "{GRADES.parent}/jobs') + "\n" + "\n".join(faults)


def failure_figures(runs: Runs, *, seeds: int) -> PartFigures:
    """Time to the target when a fifth of the nodes is killed again and again."""
    numbers = range(1, seeds + 1)
    healthy_s = of_seeds(
        numbers, lambda seed: target_of(aware_report(runs, seed), "aware").at_ms / 1000
    )
    failing_s = of_seeds(numbers, lambda seed: _failing_s(runs, seed))
    ratio = statistics.median(failing_s) / statistics.median(healthy_s)
    said = (f"{statistics.median(failing_s):.3g} s", f"{statistics.median(healthy_s):.3g} s")
    note = (
        f"Killed: {KILLED_SHARE:.0%} of the nodes at random each {KILL_EACH_S:g} s, as long as one"
        f" takes to be back; started again after {AWAY_S:g} s."
    )
    return PartFigures(
        rows=[("C: 20 % killed, healthy beside it", *said, times(ratio), f"{PROMISED}x")],
        metrics={"failures_20_tta_ratio": ratio},
        notes=[note],
    )


def flower_failure_figures() -> PartFigures:
    """Flower's resident path over the same lines, its nodes killed at the same moments."""
    healthy_s = rounds_to_target() * round_s(RESIDENT)
    least = _least()
    run = flower_run(RESIDENT, "c-failing", GRADES / "c.toml", FLOWER_ROUNDS, [_churn(least)])
    note = _flower_note(run, least)
    try:
        failing_s = reached_by_flower(run).at_ms / 1000
    except NotReachedError as missed:
        said = (f"not in {FLOWER_LIMIT_S:g} s", f"{healthy_s:.3g} s")
        least_ratio = f"over {times(FLOWER_LIMIT_S / healthy_s)}"
        return PartFigures(rows=[(FLOWER_ROW, *said, least_ratio, "")], notes=[f"{note} {missed}."])
    ratio = failing_s / healthy_s
    said = (f"{failing_s:.3g} s", f"{healthy_s:.3g} s")
    return PartFigures(
        rows=[(FLOWER_ROW, *said, times(ratio), "")],
        metrics={"flower_failures_20_tta_ratio": ratio},
        notes=[note],
    )


def _least() -> int:
    """Nodes that may open a round of Flower's: as many as our job's quorum asks for."""
    spec = read_job_file(JOB)
    return math.ceil(spec.round.quorum * spec.training.nodes)


def _churn(least: int) -> str:
    """The script of kills as `flower_trained` takes it."""
    script = [
        (kill.at_s, [NODES.index(name) for name in kill.nodes]) for kill in kills(1, FLOWER_LIMIT_S)
    ]
    churn = {"kills": script, "away_s": AWAY_S, "limit_s": FLOWER_LIMIT_S, "least": least}
    return f"--churn={json.dumps(churn)}"


def _flower_note(run: FlowerRun, least: int) -> str:
    if not run.ends_s:
        return f"Flower, the same kills: no round ended within {FLOWER_LIMIT_S:g} s."
    each_s = run.ends_s[-1] / len(run.ends_s)
    return (
        f"Flower, the same kills, one seed: its resident path, which averages whatever comes back"
        f" of a round, told to open one with {least} of {len(NODES)} nodes (with all, it waits for"
        f" who is away): {len(run.ends_s)} rounds of {each_s:.1f} s, with"
        f" {statistics.fmean(run.updates):.1f} updates on average. A killed node's update is given"
        " up at once; a node that is back waits for the next round."
    )


def _failing_s(runs: Runs, seed: int) -> float:
    path = KEPT / "worlds" / f"failing-{seed}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(failing_world(seed), encoding="utf-8")
    name = f"aware-{seed}-failing"
    words = ["--strategy", "aware", "--seed", str(seed)]
    return target_of(runs.cold_report(name, path, words), name).at_ms / 1000
