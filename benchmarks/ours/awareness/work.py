"""How much of the time nodes compute, and how their samples a second add up."""

from pathlib import Path

from benchmarks.ours.awareness.figures import Row
from benchmarks.ours.awareness.runs import WORLDS, Runs
from benchmarks.table.parts import PartFigures
from netsim.link.error import NetsimError
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
        metrics[f"utilisation_{grade}_with_start"] = computing_share(report, _world(path), 0)
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
    share = throughput(report, WARM_UP_ROUNDS) / summed_throughput(_world(path))
    said = (f"{share:.1%}", "", "", f"{PROMISED_SPREAD:.0%}")
    return PartFigures(
        rows=[("devices 10:1 apart: of their summed samples/s", *said)],
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
        promised = "" if promise is None else f"{promise:.0%}"
        rows.append((f"{nodes} nodes, virtual: of linear", f"{share:.1%}", "", "", promised))
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
    measured = report.rounds[warm_up:]
    before_ms = report.rounds[warm_up - 1].ended_ms if warm_up else 0
    return sum(each.samples for each in measured) / (measured[-1].ended_ms - before_ms) * 1000


def summed_throughput(world: WorldDescription) -> float:
    """Samples a second if every node computed all the time."""
    return sum(_job_batch(world) / node.step_floor_ms * 1000 for node in world.nodes)


def _null_run(runs: Runs, name: str, path: Path, *, rounds: int) -> RunReport:
    words = ["--strategy", "aware", "--rounds", str(rounds), "--worker", "null"]
    return runs.report(name, path, words, backend="tunnel")


def _virtual_throughput(runs: Runs, nodes: int) -> float:
    path = WORLDS / "scaling" / f"{nodes}.toml"
    report = runs.report(f"scaling-{nodes}", path, ["--strategy", "aware"], backend="world")
    job = _world(path).job
    if job is None:
        raise NetsimError(f"{path} has no job", "give it one")
    shape = job.training
    # The job ends when so many samples are trained on; virtual rounds do not say how many.
    samples = shape.rounds * shape.inner_steps * shape.batch_size * shape.nodes
    return samples / report.rounds[-1].ended_ms * 1000


def _world(path: Path) -> WorldDescription:
    return read_world_file(path)


def _job_batch(world: WorldDescription) -> int:
    if world.job is None:
        raise NetsimError(f"{world.name} has no job", "give it one")
    return world.job.training.batch_size
