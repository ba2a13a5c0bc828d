"""What settling costs those who train: nothing to wait for, and nothing while its chain is away."""

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
from hypergpu.chain.local.anvil import Anvil, AnvilOptions, running_anvil
from hypergpu.chain.rpc.client import Call, HttpRpc
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.cli.ledger.showing import ledger_of

from benchmarks.ours.cluster import BenchmarkError, Running, running
from benchmarks.ours.estimates import IntervalEstimate, median_of
from benchmarks.ours.metering.acknowledgement import AGAIN, Acknowledged, acknowledged, p99
from benchmarks.table.parts import PartFigures
from hypergpu.client import Coordinator, JobEvent
from hypergpu.jobfile.spec import Evaluation, JobSpec, Pay, TrainingSettings

VOUCHER_MOST_MS = 10.0
SLOWDOWN_MOST = 0.01
NODES = 4
_SETTLING_ROUNDS = 6
"""After each change, until the coordinator has met it and made up for it; they are not counted."""
_COUNTED_ROUNDS = 12
"""Between two changes, after those."""
_SPELL_ROUNDS = _SETTLING_ROUNDS + _COUNTED_ROUNDS
_WINDOW_S = 30
_SETTLED_WITHIN_S = 90.0
_LOOK_S = 0.5


class Effort(NamedTuple):
    """How much is measured."""

    submissions: int
    """Of each of the two jobs."""
    outages: int


class Spell(NamedTuple):
    """The counted rounds between two changes, during which the chain was there, or was not."""

    round_s: float
    """Median."""
    cpu_s: float
    """Of the coordinator, a round."""


class Outage(NamedTuple):
    """A spell without the chain, and those before and after it with it."""

    away: Spell
    there: tuple[Spell, Spell]

    @property
    def slowdown(self) -> float:
        """How much longer a round takes without the chain; below 0: it takes less."""
        return self.away.round_s / statistics.mean(each.round_s for each in self.there) - 1

    @property
    def more_cpu(self) -> float:
        """How much more of the coordinator's CPU time a round takes."""
        return self.away.cpu_s / statistics.mean(each.cpu_s for each in self.there) - 1


def training_figures(folder: Path, effort: Effort) -> PartFigures:
    """Measure both.

    Raises:
        BenchmarkError: an update was refused, a job broke, or not all that it earned was paid.
    """
    acks = acknowledged(folder / "acknowledgement", effort.submissions)
    found = outages(folder / "outage", effort.outages)
    return _figures(effort, acks, found)


def outages(folder: Path, count: int) -> tuple[Outage, ...]:
    """Train while the chain comes and goes, and see that all is paid in the end.

    It goes as a service does that is stopped, with its state whole. Of a killed Anvil the state
    file may have a nonce whose transaction it does not have: that is no outage, but another chain.

    One job all through, so that a spell without the chain is held against its own neighbours: what
    changes slowly on the machine meets both.
    """
    folder.mkdir(parents=True)
    options = AnvilOptions(state_file=folder / "anvil.json")
    with running_anvil(options, log=folder / "anvil.log") as anvil:
        settings = {
            "HYPERGPU_COORDINATOR_CHAIN": "anvil",
            "HYPERGPU_COORDINATOR_CHAIN_URL": anvil.url,
        }
        with running(folder, is_plaintext=True, settings=settings) as cluster:
            cluster.add_nodes(NODES, "numpy")
            spells = list(_spells(cluster, anvil, 2 * count + 1))
    # The chain is there in the first, the third ... and the last one.
    neighbours = zip(spells[0:-2:2], spells[1:-1:2], spells[2::2], strict=True)
    return tuple(Outage(away, (before, after)) for before, away, after in neighbours)


def _round_ends_ms(client: Coordinator, job_id: str) -> Iterator[int]:
    for update in client.watch(job_id):
        kind = update.kind if isinstance(update, JobEvent) else ""
        if kind == "JobPaused":
            raise BenchmarkError(f"the job was paused: {client.job(job_id).job.reason}")
        if isinstance(update, JobEvent) and kind == "RoundRecorded":
            yield update.at_ms


def _spells(cluster: Running, anvil: Anvil, count: int) -> Iterator[Spell]:
    """Train through so many of them; the chain goes and comes between them."""
    rounds = count * _SPELL_ROUNDS
    process = psutil.Process(cluster.coordinator.pid)
    with cluster.client() as client:
        job_id = client.submit(_spec(rounds))
        ends_ms: list[int] = []
        begun_cpu_s = 0.0
        for at_ms in _round_ends_ms(client, job_id):
            ends_ms.append(at_ms)
            within = len(ends_ms) % _SPELL_ROUNDS
            if within == _SETTLING_ROUNDS:
                begun_cpu_s = _cpu_s(process)
            if within == 0:
                cpu_s = (_cpu_s(process) - begun_cpu_s) / _COUNTED_ROUNDS
                counted = itertools.pairwise(ends_ms[-_COUNTED_ROUNDS - 1 :])
                each_s = [(after - before) / 1000 for before, after in counted]
                yield Spell(statistics.median(each_s), cpu_s)
                if len(ends_ms) < rounds:
                    (anvil.stop if anvil.is_running else anvil.start)()
        summary = client.job(job_id).job
        if summary.phase != "finished" or len(ends_ms) != rounds:
            raise BenchmarkError(f"the job is {summary.phase}: {summary.reason}")
        _see_paid(client, job_id, anvil.url)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


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
        training=TrainingSettings(rounds=rounds, inner_steps=50, nodes=NODES),
        evaluation=Evaluation(every=rounds),
        pay=Pay(unit_price=1_000_000),
    )


def _figures(effort: Effort, acks: Acknowledged, found: Sequence[Outage]) -> PartFigures:
    voucher = acks.added_p99_ms()
    slowdown = median_of([outage.slowdown for outage in found])
    cpu = median_of([outage.more_cpu for outage in found])
    round_ms = 1_000 * statistics.median(
        spell.round_s for outage in found for spell in outage.there
    )
    return PartFigures(
        rows=[
            ["voucher_p99_ms", f"{_ms(voucher)} (at most 10){voucher.verdict(VOUCHER_MOST_MS)}"],
            [
                "outage_slowdown",
                f"{_part(slowdown)} (at most 1 %){slowdown.verdict(SLOWDOWN_MOST)}",
            ],
            ["outage_more_cpu", _part(cpu)],
        ],
        metrics={
            "voucher_p99_ms": voucher.value,
            "voucher_p99_ms_high": voucher.high,
            "outage_slowdown": slowdown.value,
            "outage_slowdown_high": slowdown.high,
            "outage_more_cpu": cpu.value,
        },
        notes=(
            "voucher_p99_ms: p99 of acknowledging an update that is there already, with a voucher",
            f"signed afresh, less that of a job that does not pay; {effort.submissions:,} turns of",
            f"{AGAIN} each. Median {_ms(acks.added_median_ms())} ms, CPU time of the",
            f"coordinator {_ms(acks.added_cpu_ms())} ms. The first time, stored, p99 is",
            f"{p99(acks.paying.first_ms):.1f} ms with a voucher, {p99(acks.free.first_ms):.1f}",
            "without one.",
            f"outage_slowdown: a round of digits, {NODES} nodes, with Anvil stopped, against",
            f"{round_ms:.0f} ms before and after it: {len(found)} outages in one job, medians of",
            f"{_COUNTED_ROUNDS} rounds. outage_more_cpu: the same of the coordinator's CPU time.",
            "In brackets 95 % confidence. All was paid to the last unit.",
        ),
    )


def _ms(found: IntervalEstimate) -> str:
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _part(found: IntervalEstimate) -> str:
    return f"{found.value:+.1%} [{found.low:+.1%}, {found.high:+.1%}]"
