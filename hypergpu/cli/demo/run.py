"""The demo from beginning to end: a program over `hypergpu.client` and a cluster of processes."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from hypergpu.cli.demo.fault import NodeFault, NodeReturn
from hypergpu.cli.demo.job import DemoPlan
from hypergpu.cli.demo.race import StrategyTime, race_strategies, sync_ratio
from hypergpu.cli.demo.settlement import (
    ACCOUNTS_NAME,
    DemoPay,
    settle_demo,
    start_with_chain,
)
from hypergpu.cli.demo.summary import FILE_NAME, Summary, say_end
from hypergpu.client import Coordinator, HyperGPUError, JobView
from hypergpu.client.history import History, target_reached_at
from hypergpu.cluster.cluster import LocalCluster
from hypergpu.cluster.folder import RunFolder, run_folder
from hypergpu.cluster.processes import program
from hypergpu.errors import Reason
from hypergpu.jobfile.spec import JobSpec
from hypergpu.sites import Sites, told_sites
from hypergpu.terminal.failure import usage_error
from hypergpu.terminal.figures import span
from hypergpu.terminal.output import is_rich, say
from hypergpu.terminal.progress import JobProgress
from hypergpu.terminal.views import open_view
from hypergpu.terminal.watch import Watched

GIVE_UP_AFTER_S = 300.0
PAUSED_AT_MOST_S = 10.0
"""Time after which a job that paused itself is given up."""
VICTIM = 1
"""Place in the list of the node that is killed."""
PROFILES = ("home-fibre", "home-cable", "home-dsl", "lte-moving", "starlink")
_LEFT = ("state", "logs", "model", FILE_NAME, ACCOUNTS_NAME)


def run_over_lines(net: str, nodes: int, arguments: Sequence[str]) -> None:
    """Become `netsim shape`, which runs the demo with these arguments over one line a node.

    Args:
        net: A backend of netsim.
        nodes: With more than there are profiles, each comes again.
        arguments: Arguments of `hypergpu demo`.
    """
    profiles = [PROFILES[number % len(PROFILES)] for number in range(nodes)]
    demo = program("hypergpu.cli", "demo", *arguments)
    shape = program("netsim", "shape", "--backend", net, *profiles, "--", *demo)
    sys.stdout.flush()
    os.execv(shape[0], shape)  # noqa: S606 - our own program


class Demo(NamedTuple):
    """The cluster that everything is trained on."""

    cluster: LocalCluster
    coordinator: Coordinator
    names: list[str]
    """Names of the nodes."""


def demonstrate(folder: Path, chosen: DemoPlan) -> None:
    """Train, kill, restart, compare, pay, and say how it went.

    Args:
        folder: Gets the summary, the logs and the model.
        chosen: What is trained.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, there is no chain for the metering;
            DEMO_MISSED, the accuracy was missed or the job did not finish; FILE_UNUSABLE, the
            folder has files of these names that no demo left.
    """
    started_at_s = time.monotonic()
    sites = told_sites()
    nodes = chosen.spec.training.nodes
    names = list(sites.nodes) if sites else [f"node-{number}" for number in range(1, nodes + 1)]
    if nodes <= VICTIM:
        raise usage_error(f"{nodes} link is open", "open two or more: the demo kills a node")
    with (
        run_folder(RunFolder(folder, ".hypergpu-demo", _LEFT)),
        LocalCluster(folder, chosen.worker, sites) as cluster,
    ):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if chosen.note:
            say(chosen.note)
        say(f"starting a coordinator and {nodes} nodes as separate processes; logs: {folder}/logs")
        if sites is not None:
            say(f"each node has a line of its own ({sites.backend}): {', '.join(names)}")
        chosen = _start_coordinator(cluster, sites, chosen)
        with cluster.operator() as coordinator:
            demo = Demo(cluster, coordinator, names)
            if chosen.is_fixed:
                _train_fixed(demo, chosen, folder)
                return
            trained = _train(demo, chosen, folder, started_at_s)
            times = race_strategies(
                chosen, trained.history, lambda spec, title: _train_rival(demo, spec, title)
            )
            say()
            pay = settle_demo(cluster, coordinator, trained.job.id, folder / ACCOUNTS_NAME)
    summary = _summary(chosen, trained, times, pay, time.monotonic() - started_at_s)
    say_end(summary, folder)
    if summary.accuracy < chosen.target:
        detail = f"accuracy {summary.accuracy:.4f} is below {chosen.target}"
        raise HyperGPUError(Reason.DEMO_MISSED, detail)


def _start_coordinator(cluster: LocalCluster, sites: Sites | None, chosen: DemoPlan) -> DemoPlan:
    """Start the coordinator; the plan pays nothing where this machine has no chain."""
    if not chosen.spec.pay.unit_price:
        cluster.start_coordinator()
        return chosen
    missing = start_with_chain(cluster, sites, chosen.metering)
    if not missing:
        say("a local chain of play money settles what the work earns: Anvil")
        return chosen
    say(f"{missing}: nothing is paid")
    return chosen._replace(spec=replace(chosen.spec, pay=replace(chosen.spec.pay, unit_price=0)))


class DemoTraining(NamedTuple):
    """The demo's own job, trained."""

    job: JobView
    model_bytes: int
    history: History
    back: NodeReturn


def _train(demo: Demo, chosen: DemoPlan, folder: Path, started_at_s: float) -> DemoTraining:
    """Train the demo's own job, with a node killed half-way."""
    job_id = demo.coordinator.submit(chosen.spec)
    demo.cluster.start_nodes({name: {} for name in demo.names})
    say(f"a token let them join over TLS ({span(time.monotonic() - started_at_s)})")
    victim, spec = demo.names[VICTIM], chosen.spec
    fault = NodeFault(demo.cluster, demo.coordinator, job_id=job_id, victim=victim)
    title = f"{len(demo.names)} nodes train {spec.workload} ({spec.strategy}); {victim} is killed"
    progress = _follow(demo, job_id, f"{title} half-way", fault)
    if fault.back is None:
        raise HyperGPUError(Reason.DEMO_MISSED, f"no update of {victim} was accepted afterwards")
    demo.coordinator.export(job_id, folder / "model", may_overwrite=True)
    detail = demo.coordinator.job(job_id)
    return DemoTraining(detail.job, detail.model_bytes, progress.history, fault.back)


def _train_rival(demo: Demo, spec: JobSpec, title: str) -> History:
    """Train a further job on the same nodes over the same lines, without anybody's death."""
    job_id = demo.coordinator.submit(spec)
    say()
    if not is_rich():
        say(title)
    return _follow(demo, job_id, title).history


def _train_fixed(demo: Demo, chosen: DemoPlan, folder: Path) -> None:
    """Train a job in which nothing depends on time, and say the digest of its model last."""
    job_id = demo.coordinator.submit(chosen.spec)
    demo.cluster.start_nodes({name: {} for name in demo.names})
    title = f"{len(demo.names)} nodes train {chosen.spec.workload}, fixed"
    history = _follow(demo, job_id, title).history
    if any(point.updates != len(demo.names) for point in history.rounds):
        detail = "a node was lost, so that its work was done by others and the model is another one"
        raise HyperGPUError(Reason.DEMO_MISSED, detail, fix="run it on a machine that is less busy")
    made = demo.coordinator.export(job_id, folder / "model", may_overwrite=True)
    say(f"model {made.digest}")


def _follow(demo: Demo, job_id: str, title: str, fault: NodeFault | None = None) -> JobProgress:
    """Watch a job to its end.

    Raises:
        HyperGPUError: DEMO_MISSED, a program ended, or the job did not finish.
    """
    give_up_at_s = time.monotonic() + GIVE_UP_AFTER_S
    active_at_s = time.monotonic()
    with open_view(title=title) as view, Watched(demo.coordinator, job_id, view) as watched:
        while not watched.has_ended:
            events = watched.tick()
            if fault and (text := fault.advance(events, watched.progress.history)):
                watched.say(text)
            if dead := (fault or demo.cluster).dead():
                raise HyperGPUError(Reason.DEMO_MISSED, f"{dead[0]} ended by itself")
            job = watched.progress.job
            if job is None or job.phase != "paused" or (fault and fault.is_paused):
                active_at_s = time.monotonic()
            elif time.monotonic() - active_at_s > PAUSED_AT_MOST_S:
                raise HyperGPUError(Reason.DEMO_MISSED, f"the job paused itself: {job.reason}")
            if time.monotonic() > give_up_at_s:
                raise HyperGPUError(Reason.DEMO_MISSED, f"not done after {GIVE_UP_AFTER_S:.0f} s")
    job = watched.progress.job
    if job is None or job.phase != "finished":
        why = "unknown" if job is None else f"{job.phase}: {job.reason}"
        raise HyperGPUError(Reason.DEMO_MISSED, f"the job did not finish ({why})")
    return watched.progress


def _summary(
    chosen: DemoPlan,
    trained: DemoTraining,
    times: tuple[StrategyTime, ...],
    pay: DemoPay,
    wall_s: float,
) -> Summary:
    job, history = trained.job, trained.history
    return Summary(
        accuracy=job.metric if job.metric is not None else 0.0,
        target=chosen.target,
        to_target=target_reached_at(history.evaluations, chosen.target, history.metric_name),
        rounds=job.round,
        wall_s=round(wall_s, 1),
        bytes_up=job.bytes_up,
        bytes_down=job.bytes_down,
        nodes=chosen.spec.training.nodes,
        updates_accepted=job.updates_accepted,
        updates_refused=job.updates_refused,
        model_bytes=trained.model_bytes,
        model_digest=job.model or "",
        strategy=chosen.spec.strategy,
        sync_ratio=sync_ratio(times),
        runners=times,
        back=trained.back,
        receipts=pay.receipts,
        earned=pay.earned,
        paid=pay.paid,
        transactions=pay.transactions,
        epochs=pay.epochs,
    )
