"""Receipts and worlds by an engine of one process and of two: the same answers, how much faster."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.metering.host import JobPlan
from benchmarks.ours.table import PartFigures
from hypergpu.crypto import IdentityKey, keccak
from hypergpu.engine.engine import Engine, LocalEngine
from hypergpu.ids import Address
from hypergpu.ledger_terms import Domain, terms_of
from hypergpu.units import Wei
from netsim.run.choices import Choices, chosen_world
from netsim.run.job import run_virtually
from netsim.run.report import RunReport
from netsim.run.world_task import inputs_of, simulate
from payments.core.verify import ReceiptFile, receipt_faults
from payments.shell.receipt_tasks import check_receipts

_WORLD = Path(__file__).parents[3] / "examples" / "worlds" / "five-homes.toml"
_TURNS = 2
_Answer = TypeVar("_Answer")


def engine_task_figures(receipts: int, worlds: int) -> PartFigures:
    """Check so many receipts, and simulate a world with so many seeds."""
    file = _receipt_file(receipts)
    choices = [Choices(world=str(_WORLD), seed=seed) for seed in range(worlds)]
    engines = LocalEngine(1), LocalEngine(2)
    try:
        check_times_s = _by_turns(
            engines,
            lambda engine: check_receipts(engine, file),
            receipt_faults(file.terms, file.receipts),
        )
        sweep_times_s = _by_turns(
            engines,
            lambda engine: _sweep(engine, choices),
            [run_virtually(chosen_world(each)) for each in choices],
        )
    finally:
        for engine in engines:
            engine.close()
    return PartFigures(
        rows=[
            [f"{receipts:,} receipts by one process, s", f"{check_times_s[0]:.1f}"],
            [
                "by two",
                f"{check_times_s[1]:.1f} ({check_times_s[0] / check_times_s[1]:.2f} times as fast)",
            ],
            [f"{worlds} worlds by one process, s", f"{sweep_times_s[0]:.1f}"],
            [
                "by two",
                f"{sweep_times_s[1]:.1f} ({sweep_times_s[0] / sweep_times_s[1]:.2f} times as fast)",
            ],
        ],
        metrics={
            "verify_speedup_2": check_times_s[0] / check_times_s[1],
            "sweep_speedup_2": sweep_times_s[0] / sweep_times_s[1],
        },
        notes=[
            f"By turns, {_TURNS} times each, processes that run already; answers equal this one's.",
            f"Load when it ended: {os.getloadavg()[0]:.1f} over {os.cpu_count()} cores.",
        ],
    )


def _receipt_file(count: int) -> ReceiptFile:
    """A job's receipts, of ten nodes."""
    plan, coordinator = JobPlan(), IdentityKey(keccak(b"a benchmark's coordinator"))
    ledger = Domain(31_337, Address("0x" + "ab" * 20))
    terms = terms_of(coordinator.address, plan.job_id, ledger)
    receipts = []
    for number in range(count // plan.nodes):
        _, row = plan.round_row(number, terms)
        receipts += [plan.receipt(work, coordinator, terms, number) for work in row.updates]
    return ReceiptFile(plan.job_id, terms, Wei(plan.unit_price), tuple(receipts))


def _sweep(engine: Engine, choices: list[Choices]) -> list[RunReport]:
    def one(each: Choices) -> RunReport:
        return simulate(engine, each, inputs_of(chosen_world(each)))

    with ThreadPoolExecutor(len(choices)) as threads:
        return list(threads.map(one, choices))


def _by_turns(
    engines: tuple[Engine, Engine], ask: Callable[[Engine], _Answer], expected: _Answer
) -> tuple[float, float]:
    """Seconds that each engine takes, once its processes run.

    Raises:
        BenchmarkError: An answer is another than this process's.
    """
    seconds = [0.0, 0.0]
    for turn in range(_TURNS + 1):
        for place, engine in enumerate(engines):
            began_s = time.perf_counter()
            if ask(engine) != expected:
                raise BenchmarkError("an engine answers otherwise than one process")
            if turn:
                seconds[place] += (time.perf_counter() - began_s) / _TURNS
    return seconds[0], seconds[1]
