"""From receipts to money: exactly once through faults, how fast, and for how much gas.

Every figure is looked up on the chain afterwards: each transaction's status, each node's counters.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.metering.rates import Amounts, Rates, rates
from benchmarks.ours.metering.faults import Faults, Outcome, run_through
from benchmarks.ours.metering.gas import naive, of_an_epoch
from benchmarks.ours.metering.plan import Plan
from benchmarks.ours.metering.training import Effort, Figures, training_figures
from benchmarks.table import Table
from coordinator.core.settlement.sealing import Metering
from hypergpu.chain.local.anvil import AnvilOptions, running_anvil

_NODES = 10
_SEED = 5


class Sizes(NamedTuple):
    """How much is measured."""

    receipts_through_faults: int
    faults: Faults
    healthy_epochs: int
    amounts: Amounts
    effort: Effort


class Outcomes(NamedTuple):
    """Of the runs that settle epoch after epoch."""

    healthy: Outcome
    faulty: Outcome


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


def run(is_quick: bool) -> Table:
    """Measure everything, each on a chain of its own."""
    sizes = QUICK if is_quick else FULL
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        healthy = _healthy(folder / "healthy", sizes)
        faulty = _faulty(folder / "faulty", sizes)
        speed = rates(folder / "speed", sizes.amounts)
        training = training_figures(folder / "training", sizes.effort)
        gas = {
            "gas_aggregate": of_an_epoch(folder / "aggregate", Metering.BATCHED, 10_000),
            "gas_packed": of_an_epoch(folder / "packed", Metering.PACKED, 1_000),
            "gas_naive": naive(folder / "naive"),
        }
    return _table(sizes, Outcomes(healthy, faulty), speed, training, gas)


def _healthy(folder: Path, sizes: Sizes) -> Outcome:
    """Epochs of a second, in which each node earns five receipts; nothing goes wrong."""
    rounds = 5
    return _outcome(folder, sizes.healthy_epochs * rounds, rounds, Faults(0, 0, _SEED))


def _faulty(folder: Path, sizes: Sizes) -> Outcome:
    return _outcome(folder, sizes.receipts_through_faults // _NODES, 25, sizes.faults)


def _outcome(folder: Path, receipts_each: int, rounds: int, faults: Faults) -> Outcome:
    folder.mkdir()
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


def _table(
    sizes: Sizes,
    outcomes: Outcomes,
    speed: Rates,
    training: Figures,
    gas: dict[str, float],
) -> Table:
    healthy, faulty = outcomes
    errors = (*healthy.errors, *faulty.errors)
    times = healthy.times
    payment = {
        "payment_p99_s": _p99(times.paid),
        "payment_final_p99_s": _p99(times.final),
        "payment_max_faults_s": max(faulty.times.paid),
        "payment_final_max_faults_s": max(faulty.times.final),
    }
    faults = sizes.faults
    what_went_wrong = f"{faults.kills} SIGKILLs, {faults.reorganisations} reorganisations"
    receipts = f"{sizes.receipts_through_faults:,} receipts"
    rows = [
        [f"errors after {receipts}, {what_went_wrong} of 3 and 12", f"{len(errors)}"],
        *speed.rows,
        *([name, f"{used:,.1f}"] for name, used in gas.items()),
        *([name, f"{seconds:.2f}"] for name, seconds in payment.items()),
        *training.rows,
    ]
    return Table(
        title="Receipts on Anvil, blocks of 30 M gas each second, 10 nodes",
        columns=("", "value"),
        rows=rows,
        metrics={
            "exactly_once_errors": float(len(errors)),
            **speed.metrics,
            **gas,
            **payment,
            **training.metrics,
        },
        notes=(
            *errors[:5],
            *speed.notes,
            "Gas: of a second epoch, nodes known; recorded, closed and paid. 10,000 receipts by",
            "their sums, 1,000 with each in the call data; the naive contract only records.",
            "Payments: against stake, in the window. From a receipt in the journal to the block",
            "that pays it, epochs of 1 s; final is 3 blocks deep.",
            *training.notes,
            f"Load when it ended: {os.getloadavg()[0]:.1f} over {os.cpu_count()} cores.",
        ),
    )


def _p99(ascending: Sequence[float]) -> float:
    return ascending[min(len(ascending) - 1, len(ascending) * 99 // 100)]
