"""A job on real programs over open links: the part that runs at the coordinator's site."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hypergpu.client import Coordinator
from hypergpu.client.history import reached
from hypergpu.cluster.cluster import Cluster
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.sites import Sites
from hypergpu.terminal.progress import Progress, with_note
from hypergpu.terminal.views import View
from hypergpu.terminal.watch import Watched
from netsim.error import NetsimError
from netsim.measure.network import Verdict
from netsim.network.ground import control
from netsim.network.world import COORDINATOR, NodeDescription, WorldDescription
from netsim.run.deeds import Deed, DeedKind, deeds
from netsim.run.preparation import held_folder, required_job
from netsim.run.report import RunReport

_HORIZON_US = 30 * 24 * 3600 * 1_000_000
"""No job runs longer than a month."""
RESUME_EACH_S = 60.0


class Order(NamedTuple):
    """What to run and where."""

    world: WorldDescription
    beside: Path
    """Where a relative path of the job's data starts."""
    folder: Path
    """Gets state and logs."""
    worker: str
    give_up_after_s: float


def run_job(order: Order, sites: Sites, view: View) -> RunReport:
    """Start everything, train the world's job to its end, do the world's deeds meanwhile.

    Raises:
        HyperGPUError: The coordinator did not come up, or refuses the job.
        NetsimError: The folder is taken, the job took longer than it may, or the links are gone.
    """
    world = order.world
    spec = required_job(world)
    with held_folder(order.folder), Cluster(order.folder, order.worker, sites) as cluster:
        cluster.start_coordinator()
        cluster.start_nodes({node.name: _environment(order, node) for node in world.nodes})
        with cluster.operator() as coordinator:
            job_id = coordinator.submit(spec, beside=order.beside)
            watched = Watched(coordinator, job_id, view)
            try:
                hand = _Hand(cluster, sites, order)
                progress = _followed(order, watched, hand, _User(coordinator, job_id), view)
            finally:
                watched.close()
        answer = asyncio.run(control.asked(sites.control, control.ReadVerdict()))
    if answer.verdict is None:
        raise AssertionError("a verdict was asked for")
    return _report(order, sites, progress, answer.verdict)


def _report(order: Order, sites: Sites, progress: Progress, verdict: Verdict) -> RunReport:
    spec, job, history = required_job(order.world), progress.job, progress.history
    if job is None:
        raise AssertionError("a watched job is known")
    name = history.metric_name or job.metric_name
    return RunReport(
        world=order.world.name,
        seed=order.world.seed,
        backend=sites.backend,
        phase=job.phase,
        reason=job.reason,
        rounds=history.rounds,
        metric=job.metric,
        verdict=verdict,
        strategy=spec.strategy,
        metric_name=name,
        target=spec.evaluation.target,
        evaluations=history.evaluations,
        to_target=reached(history.evaluations, spec.evaluation.target, name),
    )


def _environment(order: Order, node: NodeDescription) -> dict[str, str]:
    floor = round(node.step_floor_ms)
    if not floor:
        return {}
    slowness = _slowness_path(order, node.name)
    return {
        "HYPERGPU_NODE_WORKER_STEP_FLOOR_MS": str(floor),
        "HYPERGPU_WORKER_SLOWNESS_FILE": str(slowness.absolute()),
    }


def _slowness_path(order: Order, name: str) -> Path:
    """What its worker reads before each inner step."""
    return order.folder / "state" / f"{name}.slowness"


def _followed(order: Order, watched: Watched, hand: "_Hand", user: "_User", view: View) -> Progress:
    give_up_at_s = time.monotonic() + order.give_up_after_s
    while not watched.has_ended:
        watched.tick()
        for text in (*hand.act(watched.progress), *user.act(watched.progress)):
            watched.progress = with_note(watched.progress, text)
            view.say(text)
        if dead := hand.dead():
            log = order.folder / "logs" / f"{dead[0]}.log"
            raise HyperGPUError(Reason.CHILD_ENDED, f"{dead[0]} ended by itself", fix=f"read {log}")
        if time.monotonic() > give_up_at_s:
            what = f"the job was not done after {order.give_up_after_s:.0f} s"
            raise NetsimError(what, "give it longer, --give-up-after, or the world less to do")
    return watched.progress


class _User:
    """Resumes what paused itself, once a minute, as the user of a virtual world does."""

    def __init__(self, coordinator: Coordinator, job_id: str) -> None:
        self._coordinator = coordinator
        self._job_id = job_id
        self._patience = Patience(RESUME_EACH_S)

    def act(self, progress: Progress) -> Iterator[str]:
        """Resume when it is due and say why it was paused."""
        job = progress.job
        is_paused = job is not None and job.phase == "paused"
        if job is None or not self._patience.is_out(is_waiting=is_paused, now_s=time.monotonic()):
            return
        try:
            self._coordinator.resume(self._job_id)
        except HyperGPUError as refused:
            yield f"the job is paused ({job.reason}) and was not resumed: {refused.detail}"
        else:
            yield f"the job had paused itself ({job.reason}) and is resumed"


class Patience:
    """Whether something has been waited for long enough, each time anew."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since_s: float | None = None

    def is_out(self, *, is_waiting: bool, now_s: float) -> bool:
        """Whether the wait has lasted for the limit; then the next begins."""
        if not is_waiting:
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s < self._limit_s:
            return False
        self._since_s = now_s
        return True


class _Hand:
    """Does what is due. Time counts from the beginning of the first round."""

    def __init__(self, cluster: Cluster, sites: Sites, order: Order) -> None:
        self._cluster = cluster
        self._sites = sites
        self._order = order
        self._slowness: dict[str, float] = {}
        self._deeds = deeds(order.world, _HORIZON_US)
        self._next = next(self._deeds, None)
        self._began_at_s: float | None = None
        self._killed: set[str] = set()

    def act(self, progress: Progress) -> Iterator[str]:
        """Do what is due and say it."""
        if self._began_at_s is None:
            if progress.job is None or progress.job.phase != "training":
                return
            self._began_at_s = time.monotonic()
        while (deed := self._next) is not None:
            if deed.at_us > (time.monotonic() - self._began_at_s) * 1e6:
                return
            self._next = next(self._deeds, None)
            self._do(deed)
            yield deed.sentence

    def dead(self) -> list[str]:
        """Whose process ended though nobody here killed it."""
        return [name for name in self._cluster.dead() if name not in self._killed]

    def _do(self, deed: Deed) -> None:
        is_coordinator = deed.name == COORDINATOR
        match deed.kind:
            case DeedKind.CUT | DeedKind.HEAL:
                asked = control.Cut if deed.kind is DeedKind.CUT else control.Heal
                asyncio.run(control.asked(self._sites.control, asked(deed.name)))
            case DeedKind.SLOW | DeedKind.HASTEN:
                self._stretch(deed)
            case DeedKind.KILL:
                self._killed.add(deed.name)
                if is_coordinator:
                    self._cluster.kill_coordinator()
                else:
                    self._cluster.kill(deed.name)
            case DeedKind.START if deed.name in self._killed:
                # Who was killed twice at a time is started once.
                self._killed.discard(deed.name)
                if is_coordinator:
                    self._cluster.start_coordinator()
                else:
                    self._cluster.restart(deed.name)
            case DeedKind.START:
                pass

    def _stretch(self, deed: Deed) -> None:
        factor = deed.factor if deed.kind is DeedKind.SLOW else 1 / deed.factor
        self._slowness[deed.name] = self._slowness.get(deed.name, 1.0) * factor
        path = _slowness_path(self._order, deed.name)
        draft = path.with_suffix(".draft")
        draft.write_text(f"{self._slowness[deed.name]:g}", encoding="utf-8")
        draft.replace(path)
