"""What network-aware training costs: bytes, samples, accuracy, idle time, failures, forecasts."""

import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.ours.awareness.flower import (
    JOB,
    RESIDENT,
    FlowerRun,
    flower_run,
    reached_by_flower,
    round_s,
    rounds_to_target,
)
from benchmarks.ours.awareness.goodput import HOURS, goodput_figures
from benchmarks.ours.awareness.runs import (
    COLUMNS,
    GRADES,
    KEPT,
    WORLDS,
    NotReachedError,
    Row,
    Runs,
    aware_report,
    of_seeds,
    reached_by_sync,
    target_of,
    times,
)
from benchmarks.ours.table import BenchmarkParts, PartFigures
from hypergpu.jobfile.reading import read_job_file
from hypergpu.user.client.history import Reached
from netsim.link import NetsimError
from netsim.network.world import WorldDescription
from netsim.network.world_file import read_world_file
from netsim.run.report import RunReport

PROMISED_UTILISATION = {"a": 0.90, "b": 0.85, "c": 0.75}
PROMISED_SCALING = {10: 0.90, 50: 0.60, 1000: None}
PROMISED_SPREAD = 0.85
WARM_UP_ROUNDS = 2
"""The first round moves the model whole and the second rests on one measurement."""


def utilisation_figures(runs: Runs, *, rounds: int) -> PartFigures:
    """Time nodes compute over wall time, with what ResNet-18 has to move."""
    rows: list[Row] = []
    metrics: dict[str, float] = {}
    for grade, promise in PROMISED_UTILISATION.items():
        path = WORLDS / "work" / f"{grade}.toml"
        report = _null_run(runs, f"work-{grade}", path, rounds=rounds)
        share = computing_share(report, read_world_file(path), WARM_UP_ROUNDS)
        metrics[f"utilisation_{grade}"] = share
        rows.append((f"{grade.upper()}: time computing", f"{share:.1%}", "", "", f"{promise:.0%}"))
    note = (
        "Time computing: of 11.7M parameters with played steps of 150 ms; the first"
        f" {WARM_UP_ROUNDS} rounds are left out; only work that was folded counts."
    )
    return PartFigures(rows=rows, metrics=metrics, notes=[note])


def spread_figures(runs: Runs, *, rounds: int) -> PartFigures:
    """Samples a second of eight devices, ten times apart, over the sum of what each can do."""
    path = WORLDS / "changing" / "spread.toml"
    report = _null_run(runs, "spread", path, rounds=rounds)
    share = throughput(report, WARM_UP_ROUNDS) / summed_throughput(read_world_file(path))
    cells = (f"{share:.1%}", "", "", f"{PROMISED_SPREAD:.0%}")
    return PartFigures(
        rows=[("devices 10:1 apart: of their summed samples/s", *cells)],
        metrics={"spread_10_throughput": share},
    )


def scaling_figures(runs: Runs, *, is_quick: bool) -> PartFigures:
    """Samples a second in virtual time over as many times one node's."""
    alone = _virtual_throughput(runs, 1)
    rows: list[Row] = []
    metrics: dict[str, float] = {}
    for nodes, promise in PROMISED_SCALING.items():
        if is_quick and promise is None:
            continue
        share = _virtual_throughput(runs, nodes) / (nodes * alone)
        metrics[f"scaling_{nodes}"] = share
        promise_text = "" if promise is None else f"{promise:.0%}"
        rows.append((f"{nodes} nodes, virtual: of linear", f"{share:.1%}", "", "", promise_text))
    note = "Scaling: 100M parameters, steps of 500 ms, 1 Gbit/s at the coordinator, virtual time."
    return PartFigures(rows=rows, metrics=metrics, notes=[note])


def computing_share(report: RunReport, world: WorldDescription, warm_up: int) -> float:
    """Share of the nodes' wall time spent on inner steps whose update was folded."""
    job, floors_ms = _job_batch(world), {node.step_floor_ms for node in world.nodes}
    if len(floors_ms) != 1:
        raise ValueError("whose steps were folded is not told: all must be alike")
    steps = throughput(report, warm_up) / job
    return steps * floors_ms.pop() / 1000 / len(world.nodes)


def throughput(report: RunReport, warm_up: int) -> float:
    """Samples a second of the rounds after the first few."""
    counted_rounds = report.rounds[warm_up:]
    before_ms = report.rounds[warm_up - 1].ended_ms if warm_up else 0
    return (
        sum(each.samples for each in counted_rounds)
        / (counted_rounds[-1].ended_ms - before_ms)
        * 1000
    )


def summed_throughput(world: WorldDescription) -> float:
    """Samples a second if every node computed all the time."""
    return sum(_job_batch(world) / node.step_floor_ms * 1000 for node in world.nodes)


def _null_run(runs: Runs, name: str, path: Path, *, rounds: int) -> RunReport:
    words = ["--strategy", "aware", "--rounds", str(rounds), "--worker", "null"]
    return runs.report(name, path, words, backend="tunnel")


def _virtual_throughput(runs: Runs, nodes: int) -> float:
    path = WORLDS / "scaling" / f"{nodes}.toml"
    report = runs.report(f"scaling-{nodes}", path, ["--strategy", "aware"], backend="world")
    job = read_world_file(path).job
    if job is None:
        raise NetsimError(f"{path} has no job", "give it one")
    shape = job.training
    # The job ends when so many samples are trained on; virtual rounds do not say how many.
    samples = shape.rounds * shape.inner_steps * shape.batch_size * shape.nodes
    return samples / report.rounds[-1].ended_ms * 1000


def _job_batch(world: WorldDescription) -> int:
    if world.job is None:
        raise NetsimError(f"{world.name} has no job", "give it one")
    return world.job.training.batch_size


PROMISED_BOTH, PROMISED_UP = 200, 1000
PROMISED_ERROR = 0.25
GRADE = "c"


def economy_figures(runs: Runs, *, seeds: int) -> PartFigures:
    """Bytes a sample, samples and accuracy on grade C, against every-step synchronisation."""
    numbers = range(1, seeds + 1)
    naive = [reached_by_sync(runs, seed) for seed in numbers]
    reports = of_seeds(numbers, lambda seed: aware_report(runs, GRADE, seed))
    ours = [target_of(report, "aware") for report in reports]
    both = _a_sample(naive, is_up_only=False) / _a_sample(ours, is_up_only=False)
    up = _a_sample(naive, is_up_only=True) / _a_sample(ours, is_up_only=True)
    samples = statistics.median(each.samples for each in ours) / statistics.median(
        each.samples for each in naive
    )
    errors = [error for report in reports for error in forecast_errors(report)]
    metrics = {
        "bytes_ratio_both": both,
        "bytes_ratio_up": up,
        "samples_to_target_ratio": samples,
    }
    rows = [
        ("C: bytes a sample, both ways", "", "", times(both), f"{PROMISED_BOTH}x"),
        ("C: bytes a sample, up", "", "", times(up), f"{PROMISED_UP}x"),
        ("C: samples to 97 % over naive's", "", "", f"{samples:.2f}x", ""),
    ]
    if errors:
        metrics["forecast_mape"] = statistics.fmean(errors)
        error_text = f"{statistics.fmean(errors):.1%}"
        rows.append(("C: forecasts off by", error_text, "", "", f"{PROMISED_ERROR:.0%}"))
    return PartFigures(rows=rows, metrics=metrics)


def forecast_errors(report: RunReport) -> list[float]:
    """Errors after the tenth forecast; in a shorter job, those of its second half."""
    errors = [each.forecast_error for each in report.rounds if each.forecast_error is not None]
    return errors[10:] or errors[len(errors) // 2 :]


def _a_sample(points: Sequence[Reached], *, is_up_only: bool) -> float:
    moved_bytes = sum(each.bytes_up + (0 if is_up_only else each.bytes_down) for each in points)
    return moved_bytes / sum(each.samples for each in points)


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
    kill_list = []
    for number in range(1, math.ceil(until_s / KILL_EACH_S)):
        killed_nodes = tuple(name for name in NODES if dice.random() < KILLED_SHARE)
        if killed_nodes:
            kill_list.append(Kill(number * KILL_EACH_S, killed_nodes))
    return kill_list


def failing_world(seed: int) -> str:
    """Grade C with a script of kills that the seed draws."""
    faults = []
    for kill in kills(seed, HORIZON_S):
        node_list = ", ".join(f'"{name}"' for name in kill.nodes)
        faults.append(
            f'[[faults]]\nkind = "crash"\nnodes = [{node_list}]\n'
            f'at = "{round(1000 * kill.at_s)}ms"\nfor = "{round(1000 * AWAY_S)}ms"\n'
        )
    text = (GRADES / f"{GRADE}.toml").read_text(encoding="utf-8")
    return text.replace('job = "../jobs', f'job = "{GRADES.parent}/jobs') + "\n" + "\n".join(faults)


def failure_figures(runs: Runs, *, seeds: int) -> PartFigures:
    """Time to the target when a fifth of the nodes is killed again and again."""
    numbers = range(1, seeds + 1)
    healthy_s = of_seeds(
        numbers, lambda seed: target_of(aware_report(runs, GRADE, seed), "aware").at_ms / 1000
    )
    failing_s = of_seeds(numbers, lambda seed: _failing_s(runs, seed))
    ratio = statistics.median(failing_s) / statistics.median(healthy_s)
    cells = (f"{statistics.median(failing_s):.3g} s", f"{statistics.median(healthy_s):.3g} s")
    note = (
        f"Killed: {KILLED_SHARE:.0%} of the nodes at random each {KILL_EACH_S:g} s, as long as one"
        f" takes to be back; started again after {AWAY_S:g} s."
    )
    return PartFigures(
        rows=[("C: 20 % killed, healthy beside it", *cells, times(ratio), f"{PROMISED}x")],
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
    except NotReachedError as error:
        cells = (f"not in {FLOWER_LIMIT_S:g} s", f"{healthy_s:.3g} s")
        least_ratio = f"over {times(FLOWER_LIMIT_S / healthy_s)}"
        return PartFigures(rows=[(FLOWER_ROW, *cells, least_ratio, "")], notes=[f"{note} {error}."])
    ratio = failing_s / healthy_s
    cells = (f"{failing_s:.3g} s", f"{healthy_s:.3g} s")
    return PartFigures(
        rows=[(FLOWER_ROW, *cells, times(ratio), "")],
        metrics={"flower_failures_20_tta_ratio": ratio},
        notes=[note],
    )


def _least() -> int:
    """Nodes that may open a round of Flower's: as many as our job's quorum asks for."""
    spec = read_job_file(JOB)
    return spec.round.updates_needed(spec.training.nodes)


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
    # Killed nodes come back while it is timed, so that their start counts.
    report = runs.report(name, path, words, backend="tunnel", is_warm=False)
    return target_of(report, name).at_ms / 1000


def parts(is_quick: bool) -> BenchmarkParts:
    """Its parts; one whose target was never reached says so and has no figure."""
    runs = Runs()
    seeds, rounds = (1, 6) if is_quick else (3, 8)
    measures: dict[str, Callable[[], PartFigures]] = {
        "economy": lambda: economy_figures(runs, seeds=seeds),
        "failures": lambda: failure_figures(runs, seeds=seeds),
        "utilisation": lambda: utilisation_figures(runs, rounds=rounds),
        "spread": lambda: spread_figures(runs, rounds=rounds),
        "scaling": lambda: scaling_figures(runs, is_quick=is_quick),
        "goodput": lambda: goodput_figures(seeds=seeds, hours=1 if is_quick else HOURS),
    }
    if not is_quick:
        measures["flower"] = flower_failure_figures
    return BenchmarkParts(
        title="What network-aware training costs",
        columns=COLUMNS,
        parts=measures,
        notes=lambda: [f"{seeds} seeds; the tunnel unless said.", runs.note()],
    )
