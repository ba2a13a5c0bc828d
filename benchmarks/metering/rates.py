"""The speeds of settling as rows, each with what it is held against."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from coordinator.core.settlement.sealing import SealingRule

from benchmarks.ours.metering.speed import Rate, end_to_end, one_by_one, presigned
from benchmarks.table.parts import PartFigures

RECEIPTS_PER_BATCH = SealingRule().receipts_max


class Amounts(NamedTuple):
    """How much is sent."""

    presigned_batches: int
    end_to_end: int
    one_by_one: int


def rates(folder: Path, amounts: Amounts) -> PartFigures:
    """Measure all three, each on a chain of its own."""
    measured = {
        "receipts_per_s": presigned(
            folder / "presigned", amounts.presigned_batches, RECEIPTS_PER_BATCH
        ),
        "receipts_end_to_end_per_s": end_to_end(folder / "end", amounts.end_to_end),
        "submissions_per_s": one_by_one(folder / "each", amounts.one_by_one),
    }
    rows = [row for name, rate in measured.items() for row in _rows(name, rate)]
    notes = (
        f"receipts_per_s: batches of {RECEIPTS_PER_BATCH:,}, the coordinator's own size, by their",
        "sums, signed before they are timed: from the first byte sent to the last block.",
        f"receipts_end_to_end_per_s: {amounts.end_to_end:,} contributions that wait all at once:",
        "verified in one thread, countersigned and kept in SQLite in another, 1,000 at a time, by",
        "the coordinator's own code, sealed, in blocks. Training brings as many in an hour as this",
        "takes in seconds: the figure says how much of a core receipts cost it.",
        f"submissions_per_s: {amounts.one_by_one:,} receipts with a transaction each, from the",
        "journal into blocks.",
        "Limits: in the same run. CPU: of all threads of our process, and of Anvil's.",
    )
    return PartFigures(rows=rows, metrics=_metrics(measured), notes=notes)


def _rows(name: str, rate: Rate) -> list[list[str]]:
    of_limits = [
        [f"  {limit.name}: {limit.per_s:,.0f}/s, of that", f"{rate.per_s / limit.per_s:.2f}"]
        for limit in rate.limits
    ]
    cpu = f"{rate.cpu_us:,.1f}, {rate.chain_cpu_us:,.1f}"
    return [[name, f"{rate.per_s:,.0f}"], *of_limits, ["  our CPU and Anvil's, us each", cpu]]


def _metrics(measured: Mapping[str, Rate]) -> dict[str, float]:
    metrics = {name: rate.per_s for name, rate in measured.items()}
    for name, rate in measured.items():
        metrics[f"{name.removesuffix('_per_s')}_over_limit"] = max(
            rate.per_s / limit.per_s for limit in rate.limits
        )
        metrics[f"{name.removesuffix('_per_s')}_cpu_us"] = rate.cpu_us
    return metrics
