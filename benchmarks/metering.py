"""From receipts to money: exactly once through faults, how fast, and for how much gas.

Every figure is looked up on the chain afterwards: each node's totals and wallet, to the last unit.
What an outage of the chain costs is told with its interval; nothing is assumed of how readings
scatter, but each is to be independent: a difference between neighbours in time.
"""

import gzip
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.ours.cluster import BenchmarkError, Running, running
from benchmarks.ours.metering.faults import (
    FaultOutcome,
    FaultSchedule,
    receipts_on_anvil_per_s,
    run_through,
    signatures_per_s,
)
from benchmarks.ours.metering.gas import (
    ask_anvil,
    connect,
    contract_at,
    measure_batched,
    measure_naive,
    measure_unpaid,
)
from benchmarks.ours.metering.host import JobPlan, SettlementRun
from benchmarks.ours.table import BenchmarkParts, PartFigures
from hypergpu.jobfile.spec import Evaluation, JobSpec, Pay, TrainingSettings
from hypergpu.ledger_terms import ZERO_ADDRESS
from hypergpu.user.client import JobEvent
from payments.shell.anvil import Anvil, AnvilOptions, running_anvil

LEAST = 6
"""Readings without which no 95 % interval of a median exists."""


class IntervalEstimate(NamedTuple):
    """What was found; with 95 % confidence it lies in [low, high]."""

    value: float
    low: float
    high: float

    def verdict(self, most: float) -> str:
        """What can be said of a limit: kept, missed, or that the interval holds the limit."""
        if self.high <= most:
            return ""
        return " MISSED" if self.low > most else " not shown"


def median_of(readings: Sequence[float]) -> IntervalEstimate:
    """The median, between two of the readings: a sign test's interval.

    Raises:
        ValueError: there are fewer than `LEAST`.
    """
    count = len(readings)
    if count < LEAST:
        raise ValueError(f"{count} readings have no interval, {LEAST} at least do")
    from scipy.stats import quantile_test

    interval = quantile_test(readings, p=0.5).confidence_interval()
    return IntervalEstimate(float(np.median(readings)), float(interval.low), float(interval.high))


NODES = 4
_SETTLING_ROUNDS = 6
"""After each change, until the coordinator has met it and made up for it; they are not counted."""
_COUNTED_ROUNDS = 12
"""Between two changes, after those."""
_SPELL_ROUNDS = _SETTLING_ROUNDS + _COUNTED_ROUNDS
_WINDOW_S = 30
_SETTLED_WITHIN_S = 90.0
_LOOK_S = 0.5


class Slowdown(NamedTuple):
    """How much longer a round takes while the chain is away, as a ratio."""

    ratio: IntervalEstimate
    round_s: float
    """Median of a round while the chain is there."""


def measure_slowdown(folder: Path, count: int) -> Slowdown:
    """Train one job through outages, and see that all is paid in the end.

    Each spell without the chain is compared with its own neighbours, so that slow changes of the
    machine meet both. The chain goes as a service does that is stopped, with its state whole.

    Raises:
        BenchmarkError: The job broke, or not all that it earned was paid.
    """
    folder.mkdir(parents=True, exist_ok=True)
    options = AnvilOptions(state_file=folder / "anvil.json")
    with running_anvil(options, log_file=folder / "anvil.log") as anvil:
        settings = {
            "HYPERGPU_COORDINATOR_CHAIN": "anvil",
            "HYPERGPU_COORDINATOR_CHAIN_URL": anvil.url,
        }
        with running(folder, is_plaintext=True, settings=settings) as cluster:
            cluster.add_nodes(NODES, "numpy")
            spells_s = list(_spells_s(cluster, anvil, 2 * count + 1))
    # The chain is there in the first, the third ... and the last one.
    neighbours = zip(spells_s[0:-2:2], spells_s[1:-1:2], spells_s[2::2], strict=True)
    ratios = [away / statistics.mean((before, after)) for before, away, after in neighbours]
    return Slowdown(median_of(ratios), statistics.median(spells_s[::2]))


def _spells_s(cluster: Running, anvil: Anvil, count: int) -> Iterator[float]:
    """Median round of each spell; the chain goes and comes between them."""
    rounds = count * _SPELL_ROUNDS
    with cluster.client() as client:
        job_id = client.submit(_spec(rounds))
        ends_ms: list[int] = []
        for update in client.watch(job_id):
            if not isinstance(update, JobEvent):
                continue
            if update.kind == "JobPaused":
                raise BenchmarkError(f"the job was paused: {client.job(job_id).job.reason}")
            if update.kind != "RoundRecorded":
                continue
            ends_ms.append(update.at_ms)
            if len(ends_ms) % _SPELL_ROUNDS == 0:
                intervals = itertools.pairwise(ends_ms[-_COUNTED_ROUNDS - 1 :])
                yield statistics.median((after - before) / 1000 for before, after in intervals)
                if len(ends_ms) < rounds:
                    (_stop if anvil.is_running else Anvil.start)(anvil)
        summary = client.job(job_id).job
        if summary.phase != "finished" or len(ends_ms) != rounds:
            raise BenchmarkError(f"the job is {summary.phase}: {summary.reason}")
    _see_paid(anvil.url)


def _stop(anvil: Anvil) -> None:
    """Keep Anvil's state as it is between two blocks, and stop it."""
    web3 = connect(anvil.url)
    ask_anvil(web3, "evm_setIntervalMining", 0)
    state = ask_anvil(web3, "anvil_dumpState")
    if anvil.options.state_file is not None:
        anvil.options.state_file.write_bytes(gzip.decompress(bytes.fromhex(state[2:])))
    anvil.stop()


def _see_paid(url: str) -> None:
    """Wait until the ledger holds nothing but free escrow; its windows pass at once.

    Raises:
        BenchmarkError: It does not come to that, or nothing was paid.
    """
    web3 = connect(url)
    topic = contract_at(web3, "TrainingLedger", ZERO_ADDRESS).events.JobOpened().topic
    (opening_log,) = web3.eth.get_logs({"fromBlock": 0, "topics": [topic]})
    ledger = contract_at(web3, "TrainingLedger", opening_log["address"])
    token = contract_at(web3, "TestToken", ledger.functions.TOKEN().call())
    escrow = ledger.events.JobOpened().process_log(opening_log)["args"]["escrow"]
    give_up_at_s = time.monotonic() + _SETTLED_WITHIN_S
    while time.monotonic() < give_up_at_s:
        balance = token.functions.balanceOf(ledger.address).call()
        if balance == ledger.functions.getJob(opening_log["topics"][1]).call()[2] < escrow:
            return
        time.sleep(_LOOK_S)
        ask_anvil(web3, "evm_increaseTime", _WINDOW_S)
    raise BenchmarkError(f"not all that the job earned was paid within {_SETTLED_WITHIN_S:g} s")


def _spec(rounds: int) -> JobSpec:
    return JobSpec(
        workload="digits-softmax",
        training=TrainingSettings(rounds=rounds, inner_steps=50, nodes=NODES),
        evaluation=Evaluation(every=rounds),
        pay=Pay(unit_price=1_000_000),
    )


_SEED = 5
_LIMITS = 5
"""Readings of the limit before and after; one varies by a third on a shared machine."""
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
    errors_text = (
        f"errors after {10 * sizes.faulty_rounds:,} receipts, {faults.kills} SIGKILLs,"
        f" {faults.reorganisations} reorganisations of 3 and 12 blocks"
    )
    errors, most_s = len(outcome.errors), outcome.paid_s[-1]
    return PartFigures(
        rows=[[errors_text, f"{errors}"], ["payment_max_faults_s", f"{most_s:.2f}"]],
        metrics={"exactly_once_errors": float(errors), "payment_max_faults_s": most_s},
        notes=outcome.errors[:5],
    )


def _measure_speed(folder: Path, sizes: MeteringSizes) -> PartFigures:
    limits = [signatures_per_s() for _ in range(_LIMITS)]
    batched_per_s = receipts_on_anvil_per_s(folder / "batched", sizes.batched_rounds, "batched")
    limit = statistics.median([*limits, *(signatures_per_s() for _ in range(_LIMITS))])
    single = receipts_on_anvil_per_s(folder / "each", sizes.single_rounds, "each")
    metrics = {
        "receipts_over_signatures": batched_per_s / limit,
        "receipts_end_to_end_per_s": batched_per_s,
        "submissions_per_s": single,
    }
    return PartFigures(
        rows=[
            ["receipts_over_signatures", f"{batched_per_s / limit:.2f}"],
            ["receipts_end_to_end_per_s", f"{batched_per_s:,.0f}"],
            ["submissions_per_s", f"{single:,.0f}"],
        ],
        metrics=metrics,
        notes=(
            f"end to end: {10 * sizes.batched_rounds:,} contributions that wait all at once are",
            "verified, journalled, folded into receipts, signed, kept and recorded in batches.",
            f"over signatures: of {limit:,.0f}/s, libsecp256k1 alone on every core, verifying and",
            "signing once each, median of readings before and after. submissions: a transaction",
            "for each receipt.",
        ),
    )


def _measure_outage(folder: Path, sizes: MeteringSizes) -> PartFigures:
    slowdown = measure_slowdown(folder, sizes.outages)
    ratio = slowdown.ratio
    ratio_text = f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
    round_ms = 1_000 * slowdown.round_s
    return PartFigures(
        rows=[["outage_slowdown", ratio_text + ratio.verdict(_SLOWDOWN_MOST)]],
        metrics={"outage_slowdown": ratio.value, "outage_slowdown_high": ratio.high},
        notes=(
            f"outage_slowdown: a round of digits, {NODES} nodes, with Anvil stopped, over one",
            f"of {round_ms:.0f} ms before and after it; {sizes.outages} outages, with",
            "95 % confidence in brackets. All was paid to the last unit.",
        ),
    )


def _measure_undercount(folder: Path) -> PartFigures:
    unpaid_units = measure_unpaid(folder)
    return PartFigures(
        rows=[["undercounted_unpaid", f"{unpaid_units}"]],
        metrics={"undercounted_unpaid": float(unpaid_units)},
        notes=(
            "undercounted: a coordinator records half of the rounds and a quarter of their",
            "score, and vanishes; each node forces its newest receipt in and closes the epoch.",
        ),
    )


def _measure_gas(folder: Path) -> PartFigures:
    gas = {"gas_aggregate": measure_batched(folder, 10_000), "gas_naive": measure_naive(folder)}
    return PartFigures(
        rows=[[name, f"{gas_units:,.1f}"] for name, gas_units in gas.items()],
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
