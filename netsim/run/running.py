"""A job on real programs over open links: the part that runs at the coordinator's site."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hypergpu.cli.cluster.cluster import Cluster
from hypergpu.cli.remote.calls import Coordinator
from hypergpu.cli.show.progress import Progress, with_note
from hypergpu.cli.show.shown import View
from hypergpu.cli.show.watch import Watched
from hypergpu.jobfile import spec_json
from hypergpu.refusal import Reason, RefusalError
from hypergpu.sites import Sites
from netsim.ground import control
from netsim.refusal import RefusedError
from netsim.run.deeds import Deed, DeedKind, deeds
from netsim.run.preparation import held_folder, required_job
from netsim.run.report import RunReport, round_reports
from netsim.worldfile import COORDINATOR, WorldDescription

_HORIZON_US = 30 * 24 * 3600 * 1_000_000
"""No job runs longer than a month."""
RESUME_EACH_S = 60.0


class Order(NamedTuple):
    """What to run and where."""

    world: WorldDescription
    folder: Path
    """Gets state and logs."""
    worker: str
    give_up_after_s: float


def run_job(order: Order, sites: Sites, view: View) -> RunReport:
    """Start everything, train the world's job to its end, do the world's deeds meanwhile.

    Raises:
        RefusalError: The coordinator did not come up, or refuses the job.
        RefusedError: The folder is taken, the job took longer than it may, or the links are gone.
    """
    world = order.world
    spec = required_job(world)
    with held_folder(order.folder), Cluster(order.folder, order.worker, sites) as cluster:
        cluster.start_coordinator()
        cluster.start_nodes({node.name: _environment(node.step_floor_ms) for node in world.nodes})
        with cluster.operator() as coordinator:
            job_id = coordinator.create_job(spec_json(spec), None)
            watched = Watched(coordinator, job_id, view)
            try:
                hand = _Hand(cluster, sites, world)
                progress = _followed(order, watched, hand, _User(coordinator, job_id), view)
            finally:
                watched.close()
        answer = asyncio.run(control.asked(sites.control, control.ReadVerdict()))
    job = progress.job
    if job is None or answer.verdict is None:
        raise AssertionError("a watched job is known, and a verdict was asked for")
    return RunReport(
        world=world.name,
        seed=world.seed,
        backend=sites.backend,
        phase=job.phase,
        reason=job.reason,
        rounds=round_reports(progress.rounds),
        metric=job.metric,
        verdict=answer.verdict,
    )


def _environment(step_floor_ms: float) -> dict[str, str]:
    floor = round(step_floor_ms)
    return {"HYPERGPU_NODE_WORKER_STEP_FLOOR_MS": str(floor)} if floor else {}


def _followed(order: Order, watched: Watched, hand: "_Hand", user: "_User", view: View) -> Progress:
    give_up_at_s = time.monotonic() + order.give_up_after_s
    while not watched.has_ended:
        watched.tick()
        for text in (*hand.act(watched.progress), *user.act(watched.progress)):
            watched.progress = with_note(watched.progress, text)
            view.say(text)
        if dead := hand.dead():
            log = order.folder / "logs" / f"{dead[0]}.log"
            raise RefusalError(Reason.CHILD_ENDED, f"{dead[0]} ended by itself", fix=f"read {log}")
        if time.monotonic() > give_up_at_s:
            what = f"the job was not done after {order.give_up_after_s:.0f} s"
            raise RefusedError(what, "give it longer, --give-up-after, or the world less to do")
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
        except RefusalError as refused:
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

    def __init__(self, cluster: Cluster, sites: Sites, world: WorldDescription) -> None:
        self._cluster = cluster
        self._sites = sites
        self._deeds = deeds(world, _HORIZON_US)
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
            case DeedKind.CUT:
                asyncio.run(control.asked(self._sites.control, control.Cut(deed.name)))
            case DeedKind.HEAL:
                asyncio.run(control.asked(self._sites.control, control.Heal(deed.name)))
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
