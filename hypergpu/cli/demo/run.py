"""The demo from beginning to end."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from msgspec.structs import replace

from hypergpu.cli.demo.job import Plan, plan
from hypergpu.cli.demo.race import COLUMNS, Race, footnotes, rows
from hypergpu.cli.demo.rivals import raced
from hypergpu.cli.demo.settlement import (
    ACCOUNTS_NAME,
    METERINGS,
    check_metering,
    settled,
    start_with_chain,
)
from hypergpu.cli.demo.summary import FILE_NAME, Summary, summary_lines, summary_of, write_summary
from hypergpu.client import Coordinator
from hypergpu.client.history import History
from hypergpu.client.values import JobView
from hypergpu.cluster.cluster import Cluster
from hypergpu.cluster.folder import RunFolder, run_folder
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile.spec import JobSpec
from hypergpu.sites import Sites, told_sites
from hypergpu.terminal.failure import usage_error
from hypergpu.terminal.figures import span
from hypergpu.terminal.output import is_rich, say, say_table
from hypergpu.terminal.progress import Progress, with_note
from hypergpu.terminal.views import View, open_view
from hypergpu.terminal.watch import Watched

GIVE_UP_AFTER_S = 300.0
VICTIM = 1
"""The node that is killed, by its place in the list."""
AWAY_S = 1.0
NEVER = 1 << 62
"""More samples than any job has."""
_LEFT = ("state", "logs", "model", FILE_NAME, ACCOUNTS_NAME)


def demonstrate(
    folder: Path, *, nodes: int, is_short: bool, worker: str = "", metering: str = METERINGS[0]
) -> None:
    """Train, kill, restart, and say how it went.

    Args:
        folder: Gets the summary, the logs and the model.
        nodes: How many train; over links that are held open, one on each.
        is_short: Fewer rounds.
        worker: ``torch`` or ``numpy``; when empty, what is installed.
        metering: How receipts reach the chain.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, there is no such metering, or no chain for it; DEMO_MISSED,
            the accuracy was missed or the job did not finish; FILE_UNUSABLE, the folder has things
            of such names that no demo left.
    """
    started_at_s = time.monotonic()
    sites = told_sites()
    names = list(sites.nodes) if sites else [f"node-{number}" for number in range(1, nodes + 1)]
    nodes = len(names)
    if nodes <= VICTIM:
        raise usage_error(f"{nodes} link is open", "open two or more: the demo kills a node")
    check_metering(metering)
    chosen = plan(nodes, is_short=is_short, worker=worker, metering=metering)
    if chosen.note:
        say(chosen.note)
    with (
        run_folder(RunFolder(folder, ".hypergpu-demo", _LEFT)),
        Cluster(folder, chosen.worker, sites) as cluster,
    ):
        signal.signal(signal.SIGTERM, _interrupt)
        say(f"starting a coordinator and {nodes} nodes as separate processes; logs: {folder}/logs")
        chosen = _start_coordinator(cluster, sites, chosen, metering)
        with cluster.operator() as coordinator:
            ordered = _ordered(cluster, coordinator, chosen, names)
            say(f"a token let them join over TLS ({span(time.monotonic() - started_at_s)})")
            fault = Fault(cluster, names[VICTIM], work_samples(chosen))
            trained = _trained(fault, coordinator, ordered, folder)
            rest = Trainer(cluster, coordinator)
            race = raced(chosen, trained.history, rest.train, is_short=is_short)
            _say_race(race, chosen.target, fault.victim)
            pay = settled(cluster, coordinator, trained.job.id, folder / ACCOUNTS_NAME)
    wall_s = time.monotonic() - started_at_s
    summary = summary_of(trained.job, nodes=nodes, wall_s=wall_s, race=race, pay=pay)
    _conclude(summary, trained.model_bytes, chosen, folder)


def _start_coordinator(cluster: Cluster, sites: Sites | None, chosen: Plan, metering: str) -> Plan:
    """Start the coordinator; the plan pays nothing where this machine has no chain."""
    if sites is not None:
        say(f"each node has a line of its own ({sites.backend}): {', '.join(sites.nodes)}")
    missing = start_with_chain(cluster, sites, metering)
    if not missing:
        say("a local chain of play money settles what the work earns: Anvil")
        return chosen
    say(f"{missing}: nothing is paid")
    pay = replace(chosen.spec.pay, unit_price=0)
    return chosen._replace(spec=replace(chosen.spec, pay=pay))


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class Ordered(NamedTuple):
    """The demo's own job."""

    job_id: str
    plan: Plan


def _ordered(
    cluster: Cluster, coordinator: Coordinator, chosen: Plan, names: Sequence[str]
) -> Ordered:
    """Create the job, then let its nodes join."""
    job_id = coordinator.submit(chosen.spec)
    cluster.start_nodes({name: {} for name in names})
    return Ordered(job_id, chosen)


class Trained(NamedTuple):
    """What the demo's own job came to."""

    job: JobView
    model_bytes: int
    history: History


def _trained(fault: "Fault", coordinator: Coordinator, ordered: Ordered, folder: Path) -> Trained:
    job_id, spec = ordered.job_id, ordered.plan.spec
    nodes = spec.training.nodes
    title = f"{nodes} nodes train {spec.workload} ({spec.strategy}); {fault.victim} is killed"
    with open_view(title=f"{title} half-way") as view:
        progress = _followed(fault, coordinator, job_id, view)
    job = _finished(progress)
    coordinator.export(job_id, folder / "model", may_overwrite=True)
    return Trained(job, coordinator.job(job_id).model_bytes, progress.history)


def _finished(progress: Progress) -> JobView:
    job = progress.job
    if job is None or job.phase != "finished":
        why = "unknown" if job is None else f"{job.phase}: {job.reason}"
        raise HyperGPUError(Reason.DEMO_MISSED, f"the job did not finish ({why})")
    return job


class Trainer:
    """Further jobs on the same nodes over the same lines, without anybody's death."""

    def __init__(self, cluster: Cluster, coordinator: Coordinator) -> None:
        self._cluster = cluster
        self._coordinator = coordinator

    def train(self, spec: JobSpec, title: str) -> History:
        """See `Train`.

        Raises:
            HyperGPUError: DEMO_MISSED, it did not finish.
        """
        job_id = self._coordinator.submit(spec)
        say()
        with open_view(title=title) as view:
            if not is_rich():
                say(title)
            nobody = Fault(self._cluster, "", NEVER)
            progress = _followed(nobody, self._coordinator, job_id, view)
            _finished(progress)
        return progress.history


def _followed(fault: "Fault", coordinator: Coordinator, job_id: str, view: View) -> Progress:
    """Watch the job; half-way kill a node and start it again."""
    watched = Watched(coordinator, job_id, view)
    give_up_at_s = time.monotonic() + GIVE_UP_AFTER_S
    try:
        while not watched.has_ended:
            watched.tick()
            if text := fault.advance(watched.progress.history):
                watched.progress = with_note(watched.progress, text)
                view.say(text)
            if dead := fault.dead():
                raise HyperGPUError(Reason.DEMO_MISSED, f"{dead[0]} ended by itself")
            if time.monotonic() > give_up_at_s:
                raise HyperGPUError(Reason.DEMO_MISSED, f"not done after {GIVE_UP_AFTER_S:.0f} s")
        return watched.progress
    finally:
        watched.close()


def work_samples(chosen: Plan) -> int:
    """Samples of the whole job: planned rounds differ in size, so they tell when half is done."""
    training = chosen.spec.training
    return training.rounds * training.inner_steps * training.batch_size * training.nodes


class Fault:
    """One node's death and return: half-way it is killed, a second later it starts again."""

    def __init__(self, cluster: Cluster, victim: str, samples: int) -> None:
        """Of ``samples`` in all, half are trained on before it happens."""
        self.cluster = cluster
        self.victim = victim
        self._samples = samples
        self._killed_at_s: float | None = None
        self.is_over = False

    def dead(self) -> list[str]:
        """Whose process ended though it was not killed here."""
        is_away = self._killed_at_s is not None and not self.is_over
        gone = {self.victim} if is_away else set()
        return [name for name in self.cluster.dead() if name not in gone]

    def advance(self, history: History) -> str:
        """Do what is due; returns it in words, or nothing."""
        if self.is_over:
            return ""
        if self._killed_at_s is None:
            if 2 * sum(each.samples for each in history.rounds) < self._samples:
                return ""
            self._killed_at_s = time.monotonic()
            return f"SIGKILL to {self.victim} (process {self.cluster.kill(self.victim)})"
        if time.monotonic() - self._killed_at_s < AWAY_S:
            return ""
        self.is_over = True
        return f"{self.victim} started again (process {self.cluster.restart(self.victim)})"


def _say_race(race: Race, target: float, victim: str) -> None:
    say()
    say_table(COLUMNS, rows(race), empty="")
    for line in footnotes(target, victim):
        say(line)


def _conclude(summary: Summary, model_bytes: int, chosen: Plan, folder: Path) -> None:
    path = write_summary(summary, folder)
    say()
    for line in summary_lines(summary, model_bytes):
        say(line)
    say(f"written    {path}, {folder / ACCOUNTS_NAME}, {folder / 'model'}")
    if summary.accuracy < chosen.target:
        detail = f"accuracy {summary.accuracy:.4f} is below {chosen.target}"
        raise HyperGPUError(Reason.DEMO_MISSED, detail)
