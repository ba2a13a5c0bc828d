"""Flower's FedAvg over the same lines: rounds counted on loopback, and their time on the grade.

The same inner steps, batches, shards and nodes as the job file says. It is treated as the naive
strategy is: what a round takes is measured, and how many a target takes is counted where links cost
nothing, by the same program.
"""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.ours.awareness.figures import Figures, NotReachedError, times
from benchmarks.ours.awareness.naive import GRADES
from benchmarks.ours.awareness.runs import KEPT, ROOT, WORLDS
from benchmarks.ours.cluster import BenchmarkError
from benchmarks.peers.seconds import python_of
from hypergpu.cli.show.history import EvaluationPoint, reached
from hypergpu.digest import digest_of
from hypergpu.jobfile import read_job_file
from hypergpu.units import Bytes, Milliseconds, Samples

JOB = WORLDS / "jobs" / "digits.toml"
SCRIPT = ROOT / "benchmarks" / "peers" / "flower_trained.py"
NEAR_ROUNDS = 30
FLOOR_MS = 50
LIMIT_S = 1800
PROMISED = 5


class FlowerRun(msgspec.Struct, frozen=True):
    """What the script reports."""

    ends_s: tuple[float, ...]
    """Since the first round was opened."""
    metrics: tuple[float, ...]
    """Of each round's model, judged afterwards."""


def flower_figures(aware_s: float, *, rounds: int) -> Figures:
    """Time to the target on grade C beside ours.

    Args:
        aware_s: Ours.
        rounds: How many are measured over the grade's lines.
    """
    near = _run("flower-near", None, NEAR_ROUNDS, floor_ms=0)
    wanted = rounds_to_target(near)
    far = _run("flower-c", GRADES / "c.toml", rounds, floor_ms=FLOOR_MS)
    round_s = far.ends_s[-1] / len(far.ends_s)
    ratio = wanted * round_s / aware_s
    said = (f"{aware_s:.3g} s", f"{wanted * round_s:.3g} s", times(ratio), f"{PROMISED}x")
    note = (
        f"Flower: {rounds} measured rounds of {round_s:.1f} s, times the {wanted} that the"
        " target took on loopback; its resident gRPC path. Its deployment was not measured."
    )
    return Figures(
        rows=[("C: to 97 %, Flower's FedAvg beside it", *said)],
        metrics={"flower_ratio_c": ratio, "flower_round_s_c": round_s},
        notes=[note],
    )


def rounds_to_target(run: FlowerRun) -> int:
    """How many rounds a run took to the job's target.

    Raises:
        NotReachedError: It never was there.
    """
    target = read_job_file(JOB).evaluation.target
    points = [
        EvaluationPoint(
            round=number,
            at_ms=Milliseconds(0),
            loss=None,
            metric=metric,
            samples=Samples(0),
            bytes_up=Bytes(0),
            bytes_down=Bytes(0),
        )
        for number, metric in enumerate(run.metrics, 1)
    ]
    there = reached(points, target, "accuracy")
    if there is None:
        raise NotReachedError(f"Flower was at {max(run.metrics):.3f} after {len(points)} rounds")
    return there.rounds


def _run(name: str, world: Path | None, rounds: int, *, floor_ms: int) -> FlowerRun:
    """One run over a world's lines, or over loopback; kept as the others are."""
    settings = [f"--rounds={rounds}", f"--floor-ms={floor_ms}", "--seed=1"]
    text = "" if world is None else world.read_text(encoding="utf-8")
    inputs = f"{settings} {text} {JOB.read_text(encoding='utf-8')} {SCRIPT.read_text('utf-8')}"
    kept = KEPT / f"{name}-{digest_of(inputs.encode())[:16]}.json"
    sys.stderr.write(f"{name}: {rounds} rounds{', kept' if kept.exists() else ''}\n")
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(_output(name, _command(settings, world)))
    return msgspec.json.decode(kept.read_bytes(), type=FlowerRun)


def _command(settings: Sequence[str], world: Path | None) -> list[str]:
    ours = sysconfig.get_paths()["purelib"]
    words = [f"--packages={ours}", f"--job={JOB}", *settings]
    script = [str(python_of("flower")), "-m", "benchmarks.peers.flower_trained", *words]
    if world is None:
        return script
    shaped = [sys.executable, "-m", "netsim", "shape", str(world), "--backend", "tunnel"]
    return [*shaped, "--", *script]


def _output(name: str, command: Sequence[str]) -> bytes:
    environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    try:
        run = subprocess.run(
            command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=LIMIT_S
        )
    except subprocess.CalledProcessError as failed:
        said = failed.stderr[-1000:].decode(errors="replace")
        raise BenchmarkError(f"{name} failed: {said}") from None
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"{name} did not end within {LIMIT_S} s") from None
    return run.stdout.splitlines()[-1]
