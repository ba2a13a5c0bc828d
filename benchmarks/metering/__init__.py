"""From receipts to money: exactly once through faults, how fast, and for how much gas.

Every figure is looked up on the chain afterwards: each transaction's status, each node's counters.
"""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from coordinator.core.settlement.sealing import Metering
from hypergpu.chain.local.anvil import AnvilOptions, running_anvil

from benchmarks.metering.rates import Amounts, rates
from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.metering.faults import Faults, Outcome, run_through
from benchmarks.ours.metering.gas import naive, of_an_epoch
from benchmarks.ours.metering.plan import Plan
from benchmarks.ours.metering.training import Effort, training_figures
from benchmarks.table.parts import BenchmarkParts, PartFigures

_NODES = 10
_SEED = 5


class Sizes(NamedTuple):
    """How much is measured."""

    receipts_through_faults: int
    faults: Faults
    healthy_epochs: int
    amounts: Amounts
    effort: Effort


QUICK = Sizes(
    receipts_through_faults=5_000,
    faults=Faults(8, 6, _SEED),
    healthy_epochs=20,
    amounts=Amounts(presigned_batches=600, end_to_end=60_000, one_by_one=2_400),
    effort=Effort(submissions=60, outages=6),
)
FULL = Sizes(
    receipts_through_faults=100_000,
    faults=Faults(50, 30, _SEED),
    healthy_epochs=120,
    amounts=Amounts(presigned_batches=1_000, end_to_end=200_000, one_by_one=6_000),
    effort=Effort(submissions=360, outages=20),
)


def parts(is_quick: bool) -> BenchmarkParts:
    """Its parts, each on a chain of its own."""
    sizes = QUICK if is_quick else FULL
    return BenchmarkParts(
        title="Receipts on Anvil, blocks of 30 M gas each second, 10 nodes",
        columns=("", "value"),
        parts={
            "healthy": _in_folder(lambda folder: _healthy(folder, sizes)),
            "faults": _in_folder(lambda folder: _faulty(folder, sizes)),
            "speed": _in_folder(lambda folder: rates(folder, sizes.amounts)),
            "training": _in_folder(lambda folder: training_figures(folder, sizes.effort)),
            "gas": _in_folder(_gas),
        },
        notes=lambda: [
            f"Load when it ended: {os.getloadavg()[0]:.1f} over {os.cpu_count()} cores."
        ],
    )


def _in_folder(measure: Callable[[Path], PartFigures]) -> Callable[[], PartFigures]:
    def part() -> PartFigures:
        with tempfile.TemporaryDirectory() as name:
            return measure(Path(name))

    return part


def _healthy(folder: Path, sizes: Sizes) -> PartFigures:
    """Epochs of a second, in which each node earns five receipts; nothing goes wrong.

    Raises:
        BenchmarkError: something did.
    """
    rounds = 5
    outcome = _outcome(folder, sizes.healthy_epochs * rounds, rounds, Faults(0, 0, _SEED))
    if outcome.errors:
        raise BenchmarkError("; ".join(outcome.errors[:5]))
    seconds = {
        "payment_p99_s": _p99(outcome.times.paid),
        "payment_final_p99_s": _p99(outcome.times.final),
    }
    return PartFigures(
        rows=_in_seconds(seconds),
        metrics=seconds,
        notes=(
            "Payments: against stake, in the window. From a receipt in the journal to the block",
            "that pays it, epochs of 1 s; final is 3 blocks deep.",
        ),
    )


def _faulty(folder: Path, sizes: Sizes) -> PartFigures:
    faults = sizes.faults
    outcome = _outcome(folder, sizes.receipts_through_faults // _NODES, 25, faults)
    what_went_wrong = f"{faults.kills} SIGKILLs, {faults.reorganisations} reorganisations"
    receipts = f"{sizes.receipts_through_faults:,} receipts"
    seconds = {
        "payment_max_faults_s": max(outcome.times.paid),
        "payment_final_max_faults_s": max(outcome.times.final),
    }
    errors = len(outcome.errors)
    return PartFigures(
        rows=[
            [f"errors after {receipts}, {what_went_wrong} of 3 and 12", f"{errors}"],
            *_in_seconds(seconds),
        ],
        metrics={"exactly_once_errors": float(errors), **seconds},
        notes=outcome.errors[:5],
    )


def _gas(folder: Path) -> PartFigures:
    gas = {
        "gas_aggregate": of_an_epoch(folder / "aggregate", Metering.BATCHED, 10_000),
        "gas_packed": of_an_epoch(folder / "packed", Metering.PACKED, 1_000),
        "gas_naive": naive(folder / "naive"),
    }
    return PartFigures(
        rows=[[name, f"{used:,.1f}"] for name, used in gas.items()],
        metrics=gas,
        notes=(
            "Gas: of a second epoch, nodes known; recorded, closed and paid. 10,000 receipts by",
            "their sums, 1,000 with each in the call data; the naive contract only records.",
        ),
    )


def _outcome(folder: Path, receipts_each: int, rounds: int, faults: Faults) -> Outcome:
    with running_anvil(AnvilOptions(), log=folder / "anvil.log") as anvil:
        plan = Plan(
            folder=str(folder),
            url=anvil.url,
            nodes=_NODES,
            receipts_each=receipts_each,
            rounds_per_epoch=rounds,
            round_ms=1_000 // rounds,
            has_stakes=True,
        )
        return run_through(plan, anvil, faults)


def _in_seconds(seconds: Mapping[str, float]) -> list[list[str]]:
    return [[name, f"{value:.2f}"] for name, value in seconds.items()]


def _p99(ascending: Sequence[float]) -> float:
    return ascending[min(len(ascending) - 1, len(ascending) * 99 // 100)]
