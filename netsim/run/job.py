"""A world's job: on real programs, the part at the coordinator's end; or in virtual time."""

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from msgspec.structs import replace

from coordinator.core.training.job.events import Event, RoundPlanned, RoundRecorded
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile.spec import CODECS, JobSpec
from hypergpu.sites import Sites
from hypergpu.tensors.codec import update_bytes
from hypergpu.tensors.layout import Layout
from hypergpu.units import Milliseconds
from hypergpu.user.client import Coordinator
from hypergpu.user.client.history import RoundPoint, target_reached_at
from hypergpu.user.cluster.cluster import LocalCluster
from hypergpu.user.cluster.folder import RunFolder, run_folder
from hypergpu.user.terminal.watch import JobProgress, Watched, WatchView
from hypergpu.workloads.layouts import numpy_layout
from hypergpu.workloads.registry import build, find
from netsim.emulation.requests import Condition, SetCondition
from netsim.link import NetsimError
from netsim.measure.lateness import ALWAYS_VALID, LatenessVerdict
from netsim.network.programs import ask_links, read_verdict
from netsim.network.timeline import ActionKind, WorldAction, timeline
from netsim.network.world import COORDINATOR, NodeDescription, WorldDescription
from netsim.run.choices import RunOrder, required_job
from netsim.run.report import NOTHING_TRAINED, BatchChange, RunReport
from netsim.virtual.simulation import Simulation
from netsim.virtual.worlds import TransferSizes, described_world

_HORIZON_US = 30 * 24 * 3600 * 1_000_000
"""No job runs longer than a month."""
_RESUME_EVERY_S = 60.0


def netsim_folder(path: str) -> RunFolder:
    """Return the folder of a run: what it leaves, and its mark."""
    return RunFolder(Path(path), ".netsim-run", ("state", "logs"))


def run_job(world: WorldDescription, order: RunOrder, sites: Sites, view: WatchView) -> RunReport:
    """Start everything, train the world's job to its end, carry out its timeline meanwhile.

    Raises:
        HyperGPUError: The coordinator did not start or rejects the job, or the folder is taken.
        NetsimError: The job took longer than it may, or the links are gone.
    """
    spec = required_job(world)
    folder = netsim_folder(order.folder)
    with (
        run_folder(folder),
        LocalCluster(folder.path, order.worker, sites) as cluster,
    ):
        cluster.start_coordinator()
        cluster.start_nodes({node.name: _environment(folder.path, node) for node in world.nodes})
        with cluster.operator() as coordinator:
            job_id = coordinator.submit(spec, beside=order.choices.beside)
            with Watched(coordinator, job_id, view) as job_watch:
                actor = _TimelineActor(cluster, sites.control, world, folder.path)
                progress = _follow(order, job_watch, actor, _JobResumer(coordinator, job_id))
        verdict = asyncio.run(read_verdict(sites.control))
    return _report(world, sites, progress, verdict)


def _report(
    world: WorldDescription, sites: Sites, progress: JobProgress, verdict: LatenessVerdict
) -> RunReport:
    spec, job, history = required_job(world), progress.job, progress.history
    assert job is not None  # noqa: S101 - it was watched to its end
    name = history.metric_name or job.metric_name
    return RunReport(
        world=world.name,
        seed=world.seed,
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
        to_target=target_reached_at(history.evaluations, spec.evaluation.target, name),
    )


def _environment(folder: Path, node: NodeDescription) -> dict[str, str]:
    variables = {}
    if node.memory_bytes:
        variables["HYPERGPU_NODE_WORKER_MEMORY_BYTES"] = str(node.memory_bytes)
    if floor_ms := round(node.step_floor_ms):
        variables["HYPERGPU_NODE_WORKER_STEP_FLOOR_MS"] = str(floor_ms)
        slowness = _slowness_path(folder, node.name).absolute()
        variables["HYPERGPU_WORKER_SLOWNESS_FILE"] = str(slowness)
    return variables


def _slowness_path(folder: Path, name: str) -> Path:
    """Return the file that a node's worker reads before each inner step."""
    return folder / "state" / f"{name}.slowness"


def _follow(
    order: RunOrder, watched: Watched, actor: "_TimelineActor", resumer: "_JobResumer"
) -> JobProgress:
    give_up_at_s = time.monotonic() + order.give_up_after_s
    while not watched.has_ended:
        watched.tick()
        for text in (*actor.act(watched.progress), *resumer.act(watched.progress)):
            watched.say(text)
        if dead := actor.unexpected_ends():
            log = Path(order.folder) / "logs" / f"{dead[0]}.log"
            raise HyperGPUError(Reason.CHILD_ENDED, f"{dead[0]} ended by itself", fix=f"read {log}")
        if time.monotonic() > give_up_at_s:
            what = f"the job was not done after {order.give_up_after_s:.0f} s"
            raise NetsimError(what, "give it longer, --give-up-after, or the world less to do")
    return watched.progress


class _JobResumer:
    """Resumes a job that paused itself, once a minute, as the user of a virtual world does."""

    def __init__(self, coordinator: Coordinator, job_id: str) -> None:
        self._coordinator = coordinator
        self._job_id = job_id
        self._resume_at_s: float | None = None

    def act(self, progress: JobProgress) -> Iterator[str]:
        """Resume when it is due, and say why the job was paused."""
        job, now_s = progress.job, time.monotonic()
        if job is None or job.phase != "paused":
            self._resume_at_s = None
            return
        due_s = self._resume_at_s
        if due_s is None or now_s >= due_s:
            self._resume_at_s = now_s + _RESUME_EVERY_S
        if due_s is None or now_s < due_s:
            return
        try:
            self._coordinator.resume(self._job_id)
        except HyperGPUError as error:
            yield f"the job is paused ({job.reason}) and was not resumed: {error.detail}"
        else:
            yield f"the job had paused itself ({job.reason}) and is resumed"


class _TimelineActor:
    """Carries out actions when they are due, counted from the beginning of the first round."""

    def __init__(
        self, cluster: LocalCluster, control: str, world: WorldDescription, folder: Path
    ) -> None:
        self._cluster = cluster
        self._control = control
        self._folder = folder
        self._slowness: dict[str, float] = {}
        self._actions = timeline(world, _HORIZON_US)
        self._next = next(self._actions, None)
        self._began_at_s: float | None = None
        self._killed: set[str] = set()

    def act(self, progress: JobProgress) -> Iterator[str]:
        """Carry out what is due, and say it."""
        if self._began_at_s is None:
            if progress.job is None or progress.job.phase != "training":
                return
            self._began_at_s = time.monotonic()
        while (action := self._next) is not None:
            if action.at_us > (time.monotonic() - self._began_at_s) * 1e6:
                return
            self._next = next(self._actions, None)
            self._carry_out(action)
            yield action.sentence

    def unexpected_ends(self) -> list[str]:
        """Return the names whose process ended though no action killed it."""
        return [name for name in self._cluster.dead() if name not in self._killed]

    def _carry_out(self, action: WorldAction) -> None:
        match action.kind:
            case ActionKind.CUT | ActionKind.HEAL:
                is_cut = action.kind is ActionKind.CUT
                condition = Condition.CUT if is_cut else Condition.OPEN
                request = SetCondition(action.target, condition)
                asyncio.run(ask_links(self._control, request))
            case ActionKind.IMPAIR | ActionKind.REPAIR:
                self._slow_down(action)
            case ActionKind.KILL:
                self._killed.add(action.target)
                if action.target == COORDINATOR:
                    self._cluster.kill_coordinator()
                else:
                    self._cluster.kill(action.target)
            case ActionKind.START if action.target in self._killed:
                # A node that was killed twice at a time is started once.
                self._killed.discard(action.target)
                if action.target == COORDINATOR:
                    self._cluster.start_coordinator()
                else:
                    self._cluster.restart(action.target)
            case ActionKind.START:
                pass

    def _slow_down(self, action: WorldAction) -> None:
        is_over = action.kind is ActionKind.REPAIR
        factor = 1 / action.slowness if is_over else action.slowness
        slowness = self._slowness[action.target] = self._slowness.get(action.target, 1.0) * factor
        path = _slowness_path(self._folder, action.target)
        draft = path.with_suffix(".draft")
        draft.write_text(f"{slowness:g}", encoding="utf-8")
        draft.replace(path)


WORLD = "world"
_BROKEN = LatenessVerdict(
    is_valid=False, sentence="INVALID: the world broke, its figures mean nothing"
)


def run_virtually(world: WorldDescription) -> RunReport:
    """Simulate a world's job to its end. Equal worlds give equal reports.

    Raises:
        NetsimError: The world has no job or too few nodes for it, or its model cannot be built
            here.
    """
    spec = required_job(world)
    whole = replace(world, job=_without_target(spec))
    simulation = Simulation(described_world(whole, job_sizes(spec)))
    outcome = simulation.run()
    violation_text = "; ".join(outcome.violations)
    return RunReport(
        world=world.name,
        seed=world.seed,
        backend=WORLD,
        phase="broken"
        if violation_text
        else ", ".join(each.value for each in outcome.phases.values()),
        reason=violation_text or "; ".join(filter(None, outcome.reasons.values())),
        rounds=_points(each for records in simulation.rounds.values() for each in records),
        metric=None,
        verdict=_BROKEN if violation_text else ALWAYS_VALID,
        journal=",".join(outcome.journals.values()),
        batches=tuple(
            change for each in simulation.journals.values() for change in _batch_changes(spec, each)
        ),
        strategy=spec.strategy,
        target=spec.evaluation.target,
        note=NOTHING_TRAINED,
    )


def _without_target(spec: JobSpec) -> JobSpec:
    """Return the job without its target, which the made-up metric would reach."""
    return replace(spec, evaluation=replace(spec.evaluation, target=0.0))


def _batch_changes(spec: JobSpec, journal: Sequence[Event]) -> Iterator[BatchChange]:
    """Batches that plans gave nodes, where they or their parts are others than before; at first
    the stated ones.
    """
    stated_batch, newest = spec.training.batch_size, dict[str, tuple[int, int]]()
    for event in journal:
        if not isinstance(event, RoundPlanned):
            continue
        for node, part in event.plan.nodes.items():
            batch = part.batch(stated_batch), part.micro_batch
            if batch != newest.get(node, (stated_batch, 0)):
                yield BatchChange(node, event.plan.round + 1, *batch, part.reason)
            newest[node] = batch


_FIGURES = (
    *("participants", "updates", "samples", "bytes_up", "duration_ms"),
    *("inner_steps", "codecs", "forecast_error"),
)
"""Figures of a round that virtual time gives: it trains nothing, and counts no bytes down."""


def _points(records: Iterable[RoundRecorded]) -> tuple[RoundPoint, ...]:
    """Return recorded rounds, one after another."""
    points: list[RoundPoint] = []
    ended_ms = Milliseconds(0)
    for record in records:
        ended_ms = Milliseconds(ended_ms + record.duration_ms)
        figures = {name: getattr(record, name) for name in _FIGURES}
        number = len(points) + 1
        points.append(RoundPoint(number=number, ended_ms=ended_ms, bytes_down=None, **figures))
    return tuple(points)


def job_sizes(spec: JobSpec) -> TransferSizes:
    """Return the bytes that a participant moves in a round of this job.

    Raises:
        NetsimError: The model takes torch, which is not installed.
    """
    return layout_sizes(_layout(spec), spec.codec.up, spec.codec.down)


def layout_sizes(layout: Layout, up: str, down: str) -> TransferSizes:
    """Return the bytes that a participant moves in a round of a model, by codec."""
    return TransferSizes(
        model=layout.model_bytes if down == "fp32" else update_bytes(layout, down),
        update=update_bytes(layout, up),
        whole=layout.model_bytes,
        codecs={codec: update_bytes(layout, codec) for codec in CODECS},
    )


def _layout(spec: JobSpec) -> Layout:
    entry = find(spec.workload)
    if entry.kind != "torch":
        return numpy_layout(build(entry, spec.options))
    if find_spec("torch") is None:
        what = f"the size of {spec.workload}'s model is not known without torch"
        raise NetsimError(what, "pip install 'hypergpu[torch]'")
    from hypergpu.workloads.networks.task import module_layout

    return module_layout(build(entry, spec.options).model())
