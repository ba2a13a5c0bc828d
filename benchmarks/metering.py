"""From receipts to money: exactly once through faults, how fast, and for how much gas.

Every figure is looked up on the chain afterwards: each node's totals and wallet, to the last unit.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.metering.faults import FaultOutcome, FaultSchedule, run_through
from benchmarks.ours.metering.gas import measure_batched, measure_naive
from benchmarks.ours.metering.host import JobPlan
from benchmarks.ours.metering.outage import NODES, measure_slowdown
from benchmarks.ours.metering.running import SettlementRun
from benchmarks.ours.metering.speed import receipts_on_anvil_per_s, signatures_per_s
from benchmarks.ours.metering.undercount import measure_unpaid
from benchmarks.table.parts import BenchmarkParts, PartFigures
from payments.shell.anvil import AnvilOptions, running_anvil

_SEED = 5
_SLOWDOWN_MOST = 1.01


class MeteringSizes(NamedTuple):
    """How much is measured."""

    faulty_rounds: int
    """Each gives ten nodes a receipt."""
    faults: FaultSchedule
    healthy_rounds: int
    batched_rounds: int
    single_rounds: int
    outages: int


QUICK = MeteringSizes(500, FaultSchedule(8, 6, _SEED), 100, 6_000, 240, 6)
FULL = MeteringSizes(10_000, FaultSchedule(50, 30, _SEED), 600, 20_000, 600, 20)


def parts(is_quick: bool) -> BenchmarkParts:
    """Its parts, each on a chain of its own."""
    sizes = QUICK if is_quick else FULL
    measures: dict[str, Callable[[Path], PartFigures]] = {
        "healthy": lambda folder: _measure_healthy(folder, sizes),
        "faults": lambda folder: _measure_faults(folder, sizes),
        "speed": lambda folder: _measure_speed(folder, sizes),
        "outage": lambda folder: _measure_outage(folder, sizes),
        "undercount": _measure_undercount,
        "gas": _measure_gas,
    }
    return BenchmarkParts(
        title="Receipts on Anvil, blocks of 30 M gas each second, 10 nodes",
        columns=("", "value"),
        parts={name: _in_folder(measure) for name, measure in measures.items()},
        notes=lambda: [f"Load at the end: {os.getloadavg()[0]:.1f} over {os.cpu_count()} cores."],
    )


def _in_folder(measure: Callable[[Path], PartFigures]) -> Callable[[], PartFigures]:
    def part() -> PartFigures:
        with tempfile.TemporaryDirectory() as name:
            return measure(Path(name))

    return part


def _measure_healthy(folder: Path, sizes: MeteringSizes) -> PartFigures:
    """Epochs of a second, in which each node earns five receipts; nothing goes wrong."""
    outcome = _run(
        folder, JobPlan(rounds=sizes.healthy_rounds, rounds_per_epoch=5), FaultSchedule(0, 0, 0)
    )
    if outcome.errors:
        raise BenchmarkError("; ".join(outcome.errors[:5]))
    p99_s = _p99(outcome.paid_s)
    return PartFigures(
        rows=[["payment_p99_s", f"{p99_s:.2f}"]],
        metrics={"payment_p99_s": p99_s},
        notes=("payment: against stake; from a receipt in the journal to the block that pays it.",),
    )


def _measure_faults(folder: Path, sizes: MeteringSizes) -> PartFigures:
    faults = sizes.faults
    outcome = _run(folder, JobPlan(rounds=sizes.faulty_rounds, rounds_per_epoch=25), faults)
    said = (
        f"errors after {10 * sizes.faulty_rounds:,} receipts, {faults.kills} SIGKILLs,"
        f" {faults.reorganisations} reorganisations of 3 and 12 blocks"
    )
    errors, most_s = len(outcome.errors), outcome.paid_s[-1]
    return PartFigures(
        rows=[[said, f"{errors}"], ["payment_max_faults_s", f"{most_s:.2f}"]],
        metrics={"exactly_once_errors": float(errors), "payment_max_faults_s": most_s},
        notes=outcome.errors[:5],
    )


def _measure_speed(folder: Path, sizes: MeteringSizes) -> PartFigures:
    limit = signatures_per_s()
    batched = receipts_on_anvil_per_s(folder / "batched", sizes.batched_rounds, "batched")
    single = receipts_on_anvil_per_s(folder / "each", sizes.single_rounds, "each")
    metrics = {
        "receipts_over_signatures": batched / limit,
        "receipts_end_to_end_per_s": batched,
        "submissions_per_s": single,
    }
    return PartFigures(
        rows=[
            ["receipts_over_signatures", f"{batched / limit:.2f}"],
            ["receipts_end_to_end_per_s", f"{batched:,.0f}"],
            ["submissions_per_s", f"{single:,.0f}"],
        ],
        metrics=metrics,
        notes=(
            f"end to end: {10 * sizes.batched_rounds:,} contributions that wait all at once are",
            "verified, journalled, folded into receipts, signed, kept and recorded in batches.",
            f"over signatures: of {limit:,.0f}/s, libsecp256k1 alone on every core, verifying and",
            "signing once each. submissions: a transaction for each receipt.",
        ),
    )


def _measure_outage(folder: Path, sizes: MeteringSizes) -> PartFigures:
    found = measure_slowdown(folder, sizes.outages)
    ratio = found.ratio
    said = f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
    return PartFigures(
        rows=[["outage_slowdown", said + ratio.verdict(_SLOWDOWN_MOST)]],
        metrics={"outage_slowdown": ratio.value, "outage_slowdown_high": ratio.high},
        notes=(
            f"outage_slowdown: a round of digits, {NODES} nodes, with Anvil stopped, over one",
            f"of {1_000 * found.round_s:.0f} ms before and after it; {sizes.outages} outages, with",
            "95 % confidence in brackets. All was paid to the last unit.",
        ),
    )


def _measure_undercount(folder: Path) -> PartFigures:
    unpaid = measure_unpaid(folder)
    return PartFigures(
        rows=[["undercounted_unpaid", f"{unpaid}"]],
        metrics={"undercounted_unpaid": float(unpaid)},
        notes=(
            "undercounted: a coordinator records half of the rounds and a quarter of their",
            "score, and vanishes; each node forces its newest receipt in and closes the epoch.",
        ),
    )


def _measure_gas(folder: Path) -> PartFigures:
    gas = {"gas_aggregate": measure_batched(folder, 10_000), "gas_naive": measure_naive(folder)}
    return PartFigures(
        rows=[[name, f"{used:,.1f}"] for name, used in gas.items()],
        metrics=gas,
        notes=(
            "gas: of a second epoch of 10,000 receipts, nodes known; recorded by their sums,",
            "closed and paid. The naive contract only records, a transaction each.",
        ),
    )


def _run(folder: Path, job: JobPlan, faults: FaultSchedule) -> FaultOutcome:
    """Epochs of a second."""
    with running_anvil(AnvilOptions(), log_file=folder / "anvil.log") as anvil:
        round_ms = 1_000 // job.rounds_per_epoch
        plan = SettlementRun(folder=str(folder), url=anvil.url, job=job, round_ms=round_ms)
        return run_through(plan, faults)


def _p99(ascending: Sequence[float]) -> float:
    return ascending[min(len(ascending) - 1, len(ascending) * 99 // 100)]
