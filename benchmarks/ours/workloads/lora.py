"""An adapter of a language model by eight unequal nodes, beside one machine and FlowerTune's loop.

The base is trained here on Python's source first, since a random one proves nothing. Losses of the
seeds come from planned jobs in this machine's memory; a part of its own runs one seed by real
processes as well.
"""

import math
import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec
import torch
from msgspec.structs import replace

from benchmarks.ours.cluster import ONE_THREAD, BenchmarkError
from benchmarks.ours.table import PartFigures
from benchmarks.ours.warm import warm_starts
from benchmarks.ours.workloads.adapters import (
    FLOWER,
    FLOWER_STEPS,
    ONE,
    PLANNED,
    UNTRAINED,
    SeedOrder,
    SeedOutcome,
)
from benchmarks.ours.workloads.language import BaseModel, train_base, write_rows
from benchmarks.peers.seconds import ROOT, python_of, run_peer
from hypergpu.command_line import program
from hypergpu.jobfile.reading import read_job_file
from netsim.run.report import RunReport

JOB = ROOT / "benchmarks" / "worlds" / "jobs" / "functions.toml"
WORLD = ROOT / "benchmarks" / "worlds" / "unequal.toml"
SEEDS, BASE_STEPS = 5, 300
NODES = 8
PLANNED_RATE, ONE_RATE, FLOWER_RATE = 0.003, 0.006, 0.003
"""The best of those that were tried with seed 11, which no figure is of: docs/log.md has them. One
machine's falls linearly to 0.
"""
_LIMIT_S = 3600
_FLOWER_ROUNDS = 2


class _FlowerBytes(msgspec.Struct, frozen=True):
    bytes_both_ways: int


class LoraRuns(NamedTuple):
    """What was trained, by seed."""

    base: BaseModel
    untrained: SeedOutcome
    """The base alone, on what the adapters are measured on."""
    planned: Sequence[SeedOutcome]
    one: Sequence[SeedOutcome]
    flower: SeedOutcome
    flower_bytes: int
    """Both ways, for as many samples as the first seed of the planned job took."""


def lora_figures(*, is_quick: bool) -> PartFigures:
    """Train everything and compare.

    Raises:
        BenchmarkError: A process failed.
    """
    with tempfile.TemporaryDirectory(prefix="hypergpu-lora-") as name:
        return figures_of(trained_runs(Path(name), is_quick=is_quick))


def lora_real_figures(*, is_quick: bool) -> PartFigures:
    """Train one seed as it is planned, and by real processes over the same lines.

    Raises:
        BenchmarkError: A process failed.
    """
    with tempfile.TemporaryDirectory(prefix="hypergpu-lora-") as name:
        folder = Path(name)
        job, _ = write_job_with_base(folder, is_quick=is_quick)
        base_outcome, outcome = run_orders(
            [_order(job, UNTRAINED, 1, ONE_RATE), _order(job, PLANNED, 1, PLANNED_RATE)]
        )
        return _real_figures(outcome, real_run(folder, job), base_outcome.adapter_values)


def write_job_with_base(folder: Path, *, is_quick: bool) -> tuple[Path, BaseModel]:
    """Train the base and write it with its rows beside a copy of the job file."""
    torch.set_num_threads(1)
    job_folder = folder / "functions"
    (job_folder / "base").mkdir(parents=True)
    write_rows(job_folder)
    base = train_base(job_folder / "base", 20 if is_quick else BASE_STEPS)
    job = folder / JOB.name
    job.write_bytes(JOB.read_bytes())
    return job, base


def trained_runs(folder: Path, *, is_quick: bool) -> LoraRuns:
    """Train the base, then each seed by the product's parts and by one machine."""
    job, base = write_job_with_base(folder, is_quick=is_quick)
    seeds = range(1, 2 if is_quick else SEEDS + 1)
    planned_outcomes = run_orders([_order(job, PLANNED, seed, PLANNED_RATE) for seed in seeds])
    others = [
        replace(_order(job, ONE, seed, ONE_RATE, outcome.samples), schedule="linear")
        for seed, outcome in zip(seeds, planned_outcomes, strict=True)
    ]
    others.append(_order(job, FLOWER, 1, FLOWER_RATE, planned_outcomes[0].samples))
    others.append(_order(job, UNTRAINED, 1, ONE_RATE))
    *one, flower, untrained_outcome = run_orders(others)
    return LoraRuns(base, untrained_outcome, planned_outcomes, one, flower, flower_bytes(flower))


def figures_of(runs: LoraRuns) -> PartFigures:
    """The table's rows: ours, the other, their ratio."""
    ours, one = runs.planned, runs.one
    gaps = [mine.loss / theirs.loss - 1 for mine, theirs in zip(ours, one, strict=True)]
    loss, one_loss = fmean(each.loss for each in ours), fmean(each.loss for each in one)
    accuracy, one_accuracy = (fmean(each.accuracy for each in outcomes) for outcomes in (ours, one))
    gap, bytes_ratio = loss / one_loss - 1, runs.flower_bytes / ours[0].bytes_both_ways
    rows = [
        _row("held-out loss, of one machine", one_loss, loss, f"{gap:+.2%}; 1 % wanted"),
        _row(
            "share of held-out functions' tokens right",
            one_accuracy,
            accuracy,
            f"{runs.untrained.accuracy:.4f} without adapter",
        ),
        _row("held-out loss, of FlowerTune's loop", runs.flower.loss, ours[0].loss, "seed 1"),
        (
            "bytes both ways, of FlowerTune's loop",
            f"{runs.flower_bytes / 1e6:.1f} MB",
            f"{ours[0].bytes_both_ways / 1e6:.2f} MB",
            f"{bytes_ratio:.1f}x fewer",
            "60x wanted",
        ),
    ]
    metrics = {
        "lora_loss_gap": gap,
        "lora_accuracy": accuracy,
        "lora_accuracy_one_machine": one_accuracy,
        "lora_bytes_ratio": bytes_ratio,
        "lora_loss_over_flower": ours[0].loss / runs.flower.loss,
    }
    steps = " | ".join(" ".join(map(str, round_)) for round_ in ours[0].steps)
    loss_text = f"{runs.base.loss_random:.2f} at random, {runs.base.loss_trained:.2f} trained"
    notes = [
        f"Base: 0.56M parameters; loss on held-out modules {loss_text}.",
        f"Loss of the base alone on the held-out functions: {runs.untrained.loss:.4f}.",
        f"Gaps by seed: {', '.join(f'{each:+.2%}' for each in gaps)}; {ours[0].samples} samples.",
        f"Inner steps of seed 1's updates, by round: {steps}.",
    ]
    return PartFigures(rows=rows, metrics=metrics, notes=notes)


def _real_figures(planned: SeedOutcome, real: RunReport, adapter_values: int) -> PartFigures:
    if not real.evaluations:
        raise BenchmarkError(f"the job of real processes is {real.phase}: {real.reason}")
    last = real.evaluations[-1]
    loss, bytes_both_ways = last.loss or math.nan, last.bytes_up + last.bytes_down
    bytes_ratio = bytes_both_ways / planned.bytes_both_ways
    theirs_bytes = flower_bytes(
        SeedOutcome(math.nan, math.nan, last.samples, adapter_values=adapter_values)
    )
    rows = [
        _row("held-out loss by real processes, of the planned job", planned.loss, loss, "seed 1"),
        (
            "bytes both ways by real processes, of FlowerTune's loop",
            f"{theirs_bytes / 1e6:.1f} MB",
            f"{bytes_both_ways / 1e6:.2f} MB",
            f"{theirs_bytes / bytes_both_ways:.1f}x fewer",
            "60x wanted",
        ),
    ]
    note = (
        f"Real processes over proxied lines: {last.samples} samples, {bytes_ratio:.2f} of the"
        f" planned job's bytes; links {real.verdict.sentence}"
    )
    metrics = {
        "lora_real_over_planned_loss": loss / planned.loss,
        "lora_real_over_planned_bytes": bytes_ratio,
        "lora_bytes_ratio_real": theirs_bytes / bytes_both_ways,
    }
    return PartFigures(rows=rows, metrics=metrics, notes=[note])


def _row(what: str, other: float, ours: float, note: str) -> tuple[str, ...]:
    return (what, f"{other:.4f}", f"{ours:.4f}", f"{ours / other:.4f}", note)


def real_run(folder: Path, job: Path) -> RunReport:
    """Train the first seed by coordinator and daemons over the proxied lines of the same world."""
    own = folder / f"own-{job.name}"
    own.write_text(f"{job.read_text(encoding='utf-8')}adapter_seed = 1\n", encoding="utf-8")
    words = ["run", str(WORLD), "--job", str(own), "--seed", "1", "--backend", "proxy"]
    words += ["--give-up-after", str(_LIMIT_S), "--out", str(folder / "real"), "--json"]
    with warm_starts():
        output = _output(program("netsim", *words))
    return msgspec.json.decode(output, type=RunReport)


def _order(job: Path, way: str, seed: int, rate: float, samples: int = 0) -> SeedOrder:
    return SeedOrder(way, str(WORLD), str(job), seed, rate, samples)


def run_orders(orders: Sequence[SeedOrder]) -> list[SeedOutcome]:
    """Run them in processes, one for each core."""
    count = os.cpu_count() or 1
    shares = [orders[first::count] for first in range(min(count, len(orders)))]
    with ThreadPoolExecutor(count) as pool:
        outcome_lists = list(pool.map(_run_share, shares))
    return [outcome_lists[place % count][place // count] for place in range(len(orders))]


def _run_share(orders: Sequence[SeedOrder]) -> list[SeedOutcome]:
    words = msgspec.json.encode(orders).decode()
    lines = _output(program("benchmarks.ours.workloads.adapters", words)).splitlines()
    return msgspec.json.decode(lines[-1], type=list[SeedOutcome])


def _output(command: Sequence[str]) -> bytes:
    environment = {**os.environ, **ONE_THREAD}
    try:
        ran = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"{command[2]} did not end within {_LIMIT_S} s") from None
    if not ran.stdout:
        raise BenchmarkError(f"it failed: {ran.stderr[-2000:].decode(errors='replace')}")
    return ran.stdout


def flower_bytes(flower: SeedOutcome) -> int:
    """Bytes that Flower moves both ways for a plain adapter trained on as many samples.

    A few rounds run through Flower; each of the others moves as much as one of these.
    """
    sizes = [f"--parameters={flower.adapter_values}", f"--nodes={NODES}"]
    script = [str(python_of("flower")), "-m", "benchmarks.peers.flower_adapter", *sizes]
    last_line, _ = run_peer("flower_adapter", [*script, f"--rounds={_FLOWER_ROUNDS}"], _LIMIT_S)
    moved_bytes = msgspec.json.decode(last_line, type=_FlowerBytes).bytes_both_ways
    batch_size = read_job_file(JOB).training.batch_size
    rounds = flower.samples / (NODES * FLOWER_STEPS * batch_size)
    return round(moved_bytes / _FLOWER_ROUNDS * rounds)
