"""The demo from beginning to end: a program over `hypergpu.client` and a cluster of processes."""

import signal
import time
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from hypergpu.cli.demo.fault import FaultView, NodeFault, Return
from hypergpu.cli.demo.job import DemoPlan
from hypergpu.cli.demo.race import Race, run_race
from hypergpu.cli.demo.settlement import (
    ACCOUNTS_NAME,
    Settled,
    check_metering,
    settled,
    start_with_chain,
)
from hypergpu.cli.demo.summary import FILE_NAME, say_end, summary_of
from hypergpu.client import Coordinator, HyperGPUError, JobDetail
from hypergpu.client.history import History, target_reached_at
from hypergpu.cluster.cluster import LocalCluster
from hypergpu.cluster.folder import RunFolder, run_folder
from hypergpu.errors import Reason
from hypergpu.jobfile.spec import JobSpec
from hypergpu.sites import Sites, told_sites
from hypergpu.terminal.failure import usage_error
from hypergpu.terminal.figures import span
from hypergpu.terminal.output import is_rich, say
from hypergpu.terminal.progress import JobProgress, with_note
from hypergpu.terminal.views import View, open_view
from hypergpu.terminal.watch import Watched

GIVE_UP_AFTER_S = 300.0
VICTIM = 1
"""The node that is killed, by its place in the list."""
_LEFT = ("state", "logs", "model", FILE_NAME, ACCOUNTS_NAME)


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
        HyperGPUError: ARGUMENT_INVALID, there is no such metering, or no chain for it;
            DEMO_MISSED, the accuracy was missed or the job did not finish; FILE_UNUSABLE, the
            folder has files of these names that no demo left.
    """
    started_at_s = time.monotonic()
    sites = told_sites()
    nodes = chosen.spec.training.nodes
    names = list(sites.nodes) if sites else [f"node-{number}" for number in range(1, nodes + 1)]
    if nodes <= VICTIM:
        raise usage_error(f"{nodes} link is open", "open two or more: the demo kills a node")
    check_metering(chosen.metering)
    with (
        run_folder(RunFolder(folder, ".hypergpu-demo", _LEFT)),
        LocalCluster(folder, chosen.worker, sites) as cluster,
    ):
        signal.signal(signal.SIGTERM, _interrupt)
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
            race = run_race(chosen, trained.history, lambda spec, title: _rival(demo, spec, title))
            say()
            pay = settled(cluster, coordinator, trained.detail.job.id, folder / ACCOUNTS_NAME)
    _conclude(chosen, trained, race, pay, folder=folder, wall_s=time.monotonic() - started_at_s)


def _start_coordinator(cluster: LocalCluster, sites: Sites | None, chosen: DemoPlan) -> DemoPlan:
    """Start the coordinator; the plan pays nothing where this machine has no chain."""
    if not chosen.is_paid:
        cluster.start_coordinator()
        return chosen
    missing = start_with_chain(cluster, sites, chosen.metering)
    if not missing:
        say("a local chain of play money settles what the work earns: Anvil")
        return chosen
    say(f"{missing}: nothing is paid")
    return chosen._replace(spec=replace(chosen.spec, pay=replace(chosen.spec.pay, unit_price=0)))


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class DemoTraining(NamedTuple):
    """What became of the demo's own job."""

    detail: JobDetail
    history: History
    back: Return


def _train(demo: Demo, chosen: DemoPlan, folder: Path, started_at_s: float) -> DemoTraining:
    """Train the demo's own job, with a node killed half-way."""
    job_id = demo.coordinator.submit(chosen.spec)
    demo.cluster.start_nodes({name: {} for name in demo.names})
    say(f"a token let them join over TLS ({span(time.monotonic() - started_at_s)})")
    victim, spec = demo.names[VICTIM], chosen.spec
    fault = NodeFault(demo.cluster, demo.coordinator, job_id=job_id, victim=victim)
    title = f"{len(demo.names)} nodes train {spec.workload} ({spec.strategy}); {victim} is killed"
    with open_view(title=f"{title} half-way") as view:
        progress = _follow(demo, job_id, FaultView(view, fault), fault)
    if fault.back is None:
        raise HyperGPUError(Reason.DEMO_MISSED, f"no update of {victim} was accepted afterwards")
    demo.coordinator.export(job_id, folder / "model", may_overwrite=True)
    return DemoTraining(demo.coordinator.job(job_id), progress.history, fault.back)


def _rival(demo: Demo, spec: JobSpec, title: str) -> History:
    """Train a further job on the same nodes over the same lines, without anybody's death."""
    job_id = demo.coordinator.submit(spec)
    say()
    if not is_rich():
        say(title)
    with open_view(title=title) as view:
        return _follow(demo, job_id, view, None).history


def _train_fixed(demo: Demo, chosen: DemoPlan, folder: Path) -> None:
    """Train a job in which nothing depends on time, and say the digest of its model last."""
    job_id = demo.coordinator.submit(chosen.spec)
    demo.cluster.start_nodes({name: {} for name in demo.names})
    with open_view(title=f"{len(demo.names)} nodes train {chosen.spec.workload}, fixed") as view:
        history = _follow(demo, job_id, view, None).history
    if any(point.updates != len(demo.names) for point in history.rounds):
        detail = "a node was lost, so that its work was done by others and the model is another one"
        raise HyperGPUError(Reason.DEMO_MISSED, detail, fix="run it on a machine that is less busy")
    made = demo.coordinator.export(job_id, folder / "model", may_overwrite=True)
    say(f"model {made.digest}")


def _follow(demo: Demo, job_id: str, view: View, fault: NodeFault | None) -> JobProgress:
    """Watch a job to its end.

    Raises:
        HyperGPUError: DEMO_MISSED, a program ended, or the job did not finish.
    """
    watched = Watched(demo.coordinator, job_id, view)
    give_up_at_s = time.monotonic() + GIVE_UP_AFTER_S
    try:
        while not watched.has_ended:
            watched.tick()
            if fault and (text := fault.advance(watched.progress.history)):
                watched.progress = with_note(watched.progress, text)
                view.say(text)
            if dead := (fault.dead() if fault else demo.cluster.dead()):
                raise HyperGPUError(Reason.DEMO_MISSED, f"{dead[0]} ended by itself")
            if time.monotonic() > give_up_at_s:
                raise HyperGPUError(Reason.DEMO_MISSED, f"not done after {GIVE_UP_AFTER_S:.0f} s")
    finally:
        watched.close()
    job = watched.progress.job
    if job is None or job.phase != "finished":
        why = "unknown" if job is None else f"{job.phase}: {job.reason}"
        raise HyperGPUError(Reason.DEMO_MISSED, f"the job did not finish ({why})")
    return watched.progress


def _conclude(
    chosen: DemoPlan,
    trained: DemoTraining,
    race: Race,
    pay: Settled,
    *,
    folder: Path,
    wall_s: float,
) -> None:
    there = target_reached_at(
        trained.history.evaluations, chosen.target, trained.history.metric_name
    )
    summary = summary_of(trained.detail, race, pay, trained.back)
    summary = msgspec.structs.replace(
        summary, wall_s=round(wall_s, 1), target=chosen.target, to_target=there
    )
    say_end(summary, folder)
    if summary.accuracy < chosen.target:
        detail = f"accuracy {summary.accuracy:.4f} is below {chosen.target}"
        raise HyperGPUError(Reason.DEMO_MISSED, detail)
