"""What settling costs those who train: nothing to wait for, and nothing while its chain is away."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.ours.cluster import BenchmarkError, Running, running
from benchmarks.ours.metering.acknowledgement import Acknowledged, acknowledged, p99
from hypergpu.chain.local.anvil import Anvil, AnvilOptions, running_anvil
from hypergpu.chain.rpc.client import Call, HttpRpc
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.cli.ledger.showing import ledger_of
from hypergpu.cli.remote.calls import Coordinator
from hypergpu.jobfile import spec_json
from hypergpu.spec import Evaluation, JobSpec, Pay, Training

VOUCHER_MOST_MS = 10.0
SLOWDOWN_MOST = 0.01
WARM_UP_ROUNDS = 5
NODES = 4
_WINDOW_S = 30
_SETTLED_WITHIN_S = 90.0
_LOOK_S = 0.5


class Effort(NamedTuple):
    """How much is measured."""

    submissions: int
    """Of each of the two jobs."""
    pairs: int
    rounds: int
    """Of each training."""


class Pair(NamedTuple):
    """The same training twice, one after the other: medians of its rounds."""

    there_s: float
    away_s: float

    @property
    def slowdown(self) -> float:
        """How much longer a round takes without the chain; below 0: it takes less."""
        return self.away_s / self.there_s - 1


class _Course(NamedTuple):
    """What becomes of the chain during a training."""

    begun: Callable[[], None]
    """Called a few rounds after the job's beginning."""
    ended: Callable[[], None]
    """Called when the last round is over."""


class Figures(NamedTuple):
    """Rows for people, metrics for whoever checks."""

    rows: Sequence[Sequence[str]]
    metrics: dict[str, float]
    notes: Sequence[str]


def training_figures(folder: Path, effort: Effort) -> Figures:
    """Measure both.

    Raises:
        BenchmarkError: an update was refused, a job broke, or not all that it earned was paid.
    """
    acks = acknowledged(folder / "acknowledgement", effort.submissions)
    pairs = outages(folder / "outage", effort)
    return _figures(effort, acks, pairs)


def outages(folder: Path, effort: Effort) -> tuple[Pair, ...]:
    """Train in pairs, with the chain and without, and see that all is paid in the end."""
    folder.mkdir(parents=True)
    options = AnvilOptions(state_file=folder / "anvil.json")
    with running_anvil(options, log=folder / "anvil.log") as anvil:
        settings = {
            "HYPERGPU_COORDINATOR_CHAIN": "anvil",
            "HYPERGPU_COORDINATOR_CHAIN_URL": anvil.url,
        }
        with running(folder, is_plaintext=True, settings=settings) as cluster:
            cluster.add_nodes(NODES, "numpy")
            return tuple(_pairs(cluster, anvil, effort))


def _pairs(cluster: Running, anvil: Anvil, effort: Effort) -> Iterator[Pair]:
    there = _Course(begun=_nothing, ended=_nothing)
    away = _Course(begun=anvil.kill, ended=anvil.start)
    for number in range(effort.pairs):
        # Which one goes first changes, so that a machine that slows down favours neither.
        order = (away, there) if number % 2 else (there, away)
        medians = {course: _median_s(cluster, anvil.url, effort.rounds, course) for course in order}
        yield Pair(there_s=medians[there], away_s=medians[away])


def _median_s(cluster: Running, url: str, rounds: int, course: _Course) -> float:
    """Train once; gives the median of the rounds after the chain's course was set."""
    with cluster.client() as client:
        job_id = client.create_job(spec_json(_spec(rounds)), None)
        ends_ms: list[int] = []
        for message in client.watch(job_id, 0):
            if message.HasField("event") and message.event.kind == "RoundRecorded":
                ends_ms.append(message.event.at_ms)
                if len(ends_ms) == WARM_UP_ROUNDS - 1:
                    course.begun()
        summary = client.job(job_id).job
        if summary.phase != "finished" or len(ends_ms) != rounds:
            raise BenchmarkError(f"the job is {summary.phase}: {summary.reason}")
        course.ended()
        _see_paid(client, job_id, url)
    measured = itertools.pairwise(ends_ms[WARM_UP_ROUNDS - 1 :])
    return statistics.median((after - before) / 1000 for before, after in measured)


def _nothing() -> None:
    """The chain is left alone."""


def _see_paid(client: Coordinator, job_id: str, url: str) -> None:
    """Wait until the chain has paid what the job earned; its challenge windows pass at once.

    Raises:
        BenchmarkError: that does not come, or settling has halted.
    """
    give_up_at_s = time.monotonic() + _SETTLED_WITHIN_S
    rpc = HttpRpc(HttpTransport(url))
    try:
        while time.monotonic() < give_up_at_s:
            view = ledger_of(client, job_id)
            paid = sum(int(node.paid or 0) for node in view.nodes)
            earned = sum(int(node.earned) for node in view.nodes)
            if view.chain is not None and view.chain.halted:
                raise BenchmarkError(f"settling has halted: {view.chain.halted}")
            if view.is_over and not view.unmeasured_rounds and paid == earned > 0:
                return
            time.sleep(_LOOK_S)
            rpc.call(Call("evm_increaseTime", (_WINDOW_S,)))
    finally:
        rpc.close()
    raise BenchmarkError(f"what {job_id} earned was not paid within {_SETTLED_WITHIN_S:g} s")


def _spec(rounds: int) -> JobSpec:
    return JobSpec(
        workload="digits-softmax",
        training=Training(rounds=rounds, inner_steps=50, nodes=NODES),
        evaluation=Evaluation(every=rounds),
        pay=Pay(unit_price=1_000_000),
    )


def _figures(effort: Effort, acks: Acknowledged, pairs: Sequence[Pair]) -> Figures:
    slowdowns = sorted(pair.slowdown for pair in pairs)
    added_ms, slowdown = acks.added_p99_ms, statistics.median(slowdowns)
    round_ms = 1_000 * statistics.median(pair.there_s for pair in pairs)
    return Figures(
        rows=[
            ["voucher_p99_ms", f"{added_ms:.2f} (at most 10){_missed(added_ms, VOUCHER_MOST_MS)}"],
            [
                "outage_slowdown",
                f"{slowdown:+.1%} (at most 1 %){_missed(slowdown, SLOWDOWN_MOST)}",
            ],
        ],
        metrics={"voucher_p99_ms": added_ms, "outage_slowdown": slowdown},
        notes=(
            "voucher_p99_ms: p99 of acknowledging an update that is there already, with a voucher",
            f"signed afresh, less that of a job that does not pay; {effort.submissions:,} in turn.",
            f"The first time, stored: {p99(acks.paying.first_ms):.1f} ms with a voucher, without",
            f"one {p99(acks.free.first_ms):.1f}.",
            f"outage_slowdown: a round of digits, {NODES} nodes, Anvil killed after the job began,",
            f"against {round_ms:.0f} ms with Anvil there: medians, in {effort.pairs} pairs from",
            f"{slowdowns[0]:+.1%} to {slowdowns[-1]:+.1%}. All was paid to the last unit.",
        ),
    )


def _missed(value: float, most: float) -> str:
    return " MISSED" if value > most else ""
