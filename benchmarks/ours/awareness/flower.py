"""Flower's FedAvg over the same lines: rounds counted on loopback, and their time on the grade.

The same inner steps, batches, shards and nodes as the job file says. It is treated as the naive
strategy is: what a round takes is measured, and how many a target takes is counted where links cost
nothing. Both of its ways to run are measured; what is promised is promised against the faster.
"""

import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.ours.awareness.links import over_links, sound_output
from benchmarks.ours.awareness.runs import GRADES, KEPT, ROOT, WORLDS, NotReachedError, times
from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.table import PartFigures
from benchmarks.peers.seconds import python_of
from hypergpu.digests import digest_of
from hypergpu.jobfile.reading import read_job_file
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.user.client.history import EvaluationPoint, Reached, target_reached_at

JOB = WORLDS / "jobs" / "digits.toml"
SCRIPTS = ROOT / "benchmarks" / "peers"
FAR_ROUNDS = 3
FLOOR_MS = 50
LIMIT_S = 1800
PROMISED = 5


class FlowerRun(msgspec.Struct, frozen=True):
    """What a script reports of the rounds that it did."""

    ends_s: tuple[float, ...]
    """Since the first round was opened."""
    metrics: tuple[float, ...]
    """Accuracy of each round's model."""
    updates: tuple[int, ...]
    """That were averaged in each."""


class FlowerMode(NamedTuple):
    """One of the ways to run Flower."""

    name: str
    script: str
    near_rounds: int
    """Rounds of the run on loopback."""


RESIDENT = FlowerMode("resident", "flower_trained", near_rounds=30)
DEPLOYED = FlowerMode("deployed", "flower_trained_deployed", near_rounds=2)


def flower_figures(aware_s: float) -> PartFigures:
    """Time to the target on grade C beside ours.

    Args:
        aware_s: Ours.

    Raises:
        BenchmarkError: Neither way could be measured.
    """
    round_count = rounds_to_target()
    seconds: dict[FlowerMode, float] = {}
    clauses: list[str] = []
    misses: list[str] = []
    for way in (RESIDENT, DEPLOYED):
        try:
            far_s, near_s = round_s(way), _mean_s(_near(way))
        except BenchmarkError as error:
            misses.append(f"MISSED, Flower {way.name}: {error}")
            continue
        seconds[way] = far_s
        clauses.append(f"{way.name} {far_s:.1f} s ({near_s:.1f} s on loopback)")
    if not seconds:
        raise BenchmarkError("; ".join(misses))
    note = (
        f"Flower: the mean of {FAR_ROUNDS} rounds, {' and '.join(clauses)}, times the"
        f" {round_count:.1f} rounds that the target took on loopback. Resident: `start_server`"
        " and `start_client`, a gRPC stream a node. Deployed: SuperLink and SuperNodes, which"
        " start a process with torch for each node in each round, here on two cores for all."
    )
    rows = [_row(way, aware_s, round_count * each) for way, each in seconds.items()]
    metrics = {f"flower_{way.name}_round_s_c": each for way, each in seconds.items()}
    ratio = round_count * min(seconds.values()) / aware_s
    return PartFigures(
        rows=rows, metrics={"flower_ratio_c": ratio, **metrics}, notes=[note, *misses]
    )


def rounds_to_target() -> float:
    """How many rounds the target takes, counted on loopback; between two as times are.

    Raises:
        NotReachedError: It never was there.
    """
    near = _near(RESIDENT)
    evenly = tuple(map(float, range(1, len(near.ends_s) + 1)))
    return reached_by_flower(msgspec.structs.replace(near, ends_s=evenly)).at_ms / 1000


def round_s(way: FlowerMode) -> float:
    """What a round takes over the lines of grade C, the mean of a few."""
    return _mean_s(flower_run(way, "c", GRADES / "c.toml", FAR_ROUNDS))


def reached_by_flower(run: FlowerRun) -> Reached:
    """When a run came to the job's target.

    Raises:
        NotReachedError: It never was there.
    """
    target = read_job_file(JOB).evaluation.target
    points = [
        EvaluationPoint(
            round=number,
            at_ms=Milliseconds(round(1000 * end_s)),
            loss=None,
            metric=metric,
            samples=Samples(0),
            bytes_up=Bytes(0),
            bytes_down=Bytes(0),
        )
        for number, (end_s, metric) in enumerate(zip(run.ends_s, run.metrics, strict=True), 1)
    ]
    there = target_reached_at(points, target, "accuracy")
    if there is None:
        best = max(run.metrics, default=0.0)
        raise NotReachedError(f"Flower was at {best:.3f} after {len(points)} rounds")
    return there


def flower_run(
    way: FlowerMode, place: str, world: Path | None, rounds: int, more: Sequence[str] = ()
) -> FlowerRun:
    """One run over a world's lines, or over loopback; kept as the others are.

    Raises:
        LateError: The links were late, the second time either.
        BenchmarkError: It broke, or took too long.
    """
    name = f"flower-{way.name}-{place}"
    floor_ms = 0 if world is None else FLOOR_MS
    settings = [f"--rounds={rounds}", f"--floor-ms={floor_ms}", "--seed=1", *more]
    kept_file = KEPT / f"{name}-{_key(settings, world)}.json"
    sys.stderr.write(f"{name}: {rounds} rounds{', kept' if kept_file.exists() else ''}\n")
    if not kept_file.exists():
        kept_file.parent.mkdir(parents=True, exist_ok=True)
        kept_file.write_bytes(sound_output(name, _command(way, settings, world), LIMIT_S))
    return msgspec.json.decode(kept_file.read_bytes(), type=FlowerRun)


def _near(way: FlowerMode) -> FlowerRun:
    """Where links cost nothing and steps take what they take."""
    return flower_run(way, "near", None, way.near_rounds)


def _mean_s(run: FlowerRun) -> float:
    return run.ends_s[-1] / len(run.ends_s)


def _row(way: FlowerMode, aware_s: float, flower_s: float) -> tuple[str, str, str, str, str]:
    what = f"C: to 97 %, Flower's FedAvg {way.name}"
    return (
        what,
        f"{aware_s:.3g} s",
        f"{flower_s:.3g} s",
        times(flower_s / aware_s),
        f"{PROMISED}x",
    )


def _key(settings: Sequence[str], world: Path | None) -> str:
    """Names a run's inputs: its settings, lines and job, and the scripts."""
    paths = [*sorted(SCRIPTS.rglob("*flower*/*.py")), *sorted(SCRIPTS.glob("flower*.py")), JOB]
    text = [path.read_text(encoding="utf-8") for path in (*paths, *([world] if world else []))]
    return digest_of(" ".join([*settings, *text]).encode())[:16]


def _command(way: FlowerMode, settings: Sequence[str], world: Path | None) -> list[str]:
    ours = sysconfig.get_paths()["purelib"]
    words = [f"--packages={ours}", f"--job={JOB}", *settings]
    script = [str(python_of("flower")), "-m", f"benchmarks.peers.{way.script}", *words]
    return script if world is None else over_links(script, world)
