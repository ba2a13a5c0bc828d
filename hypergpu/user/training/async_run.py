"""`AsyncRun`: a job that a program with an event loop started, or found again."""

import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile.keys import Scalar
from hypergpu.programs.ties import Tie, tie_of
from hypergpu.user.client import (
    ENDED,
    AsyncCoordinator,
    ExportedModel,
    History,
    JobDetail,
    JobEvent,
    connect_async,
)
from hypergpu.user.client.connection import RESTARTING
from hypergpu.user.client.history import with_event_recorded
from hypergpu.user.sinks.sink import Sink, named_sinks, with_sinks
from hypergpu.user.terminal.watch import (
    SUMMARY_EVERY_S,
    JobProgress,
    WatchView,
    open_view,
    with_event,
    with_job,
    with_participants,
)

if TYPE_CHECKING:
    from hypergpu.workloads.networks.tracing import Module, State

_NEWEST_WAIT_S = 1.0


class StateNames(NamedTuple):
    """Tensors of a module's state: those that are trained, and those that stay."""

    same: Mapping[str, str]
    """Name of each tensor in the state to the name that it is trained by; tied ones share one."""
    state: Mapping[str, Any]
    """The state as it was when training was started."""

    @classmethod
    def of(cls, model: "Module") -> Self:
        """Those of a module."""
        state = dict(model.state_dict(keep_vars=True))
        # A module may keep anything as its extra state.
        tensors = {name: each for name, each in state.items() if hasattr(each, "untyped_storage")}
        first: dict[Tie, str] = {}
        same = {name: first.setdefault(tie_of(tensor), name) for name, tensor in tensors.items()}
        return cls(same, state | {name: each.detach().clone() for name, each in tensors.items()})


class AsyncRun:
    """A job. Its calls are coroutines; `Run` has the same for programs without an event loop.

    >>> run = await hypergpu.AsyncRun.find("cats")
    >>> await run.result()
    >>> state = await run.state_dict()
    """

    def __init__(
        self, coordinator: AsyncCoordinator, job_id: str, names: StateNames | None = None
    ) -> None:
        self.id = job_id
        self.sinks: tuple[Sink | str, ...] = ()
        """Where `watch` and `result` write each round's figures, besides what they are given."""
        self._coordinator = coordinator
        self._names = names

    @classmethod
    async def find(
        cls, job: str | None = None, coordinator: AsyncCoordinator | None = None
    ) -> Self:
        """A job by its id or name; the newest without one."""
        coordinator = coordinator or await connect_async()
        return cls(coordinator, await coordinator.find_job(job))

    async def detail(self) -> JobDetail:
        """The job at the moment."""
        return await self._coordinator.job(self.id)

    async def has_ended(self) -> bool:
        """Whether no round follows."""
        return (await self.detail()).job.phase in ENDED

    async def watch(self, sinks: Sequence[Sink | str] = ()) -> JobDetail:
        """Show the job until it has ended; cancelling it lets the job go on.

        Args:
            sinks: Where the figures of each round are written, such as ``tensorboard:runs``,
                ``wandb:PROJECT`` or ``mlflow:URI``. Watched again, they go on where they stopped.
        """
        with open_view(title=self.id) as view:
            await self._follow(view, sinks)
        return await self.detail()

    async def result(self, sinks: Sequence[Sink | str] = ()) -> JobDetail:
        """Wait until the job has ended.

        Raises:
            HyperGPUError: JOB_UNSUCCESSFUL, it failed.
        """
        await self._follow(WatchView(), sinks)
        detail = await self.detail()
        if detail.job.phase == "failed":
            raise HyperGPUError(Reason.JOB_UNSUCCESSFUL, f"{self.id} failed: {detail.job.reason}")
        return detail

    async def _follow(self, view: WatchView, sinks: Sequence[Sink | str]) -> None:
        detail = await self.detail()
        open_sinks = await asyncio.to_thread(named_sinks, [*self.sinks, *sinks])
        with with_sinks(view, detail, open_sinks) as both:
            progress = with_job(JobProgress(), detail.job, tuple(detail.participants))
            asked_at_s = 0.0
            async for update in self._coordinator.watch(self.id):
                if isinstance(update, JobEvent):
                    progress = with_event(progress, update)
                    # A sink may wait for a disk or a server.
                    await asyncio.to_thread(both.event, update, progress)
                else:
                    progress = with_participants(progress, update.participants)
                if (now_s := asyncio.get_running_loop().time()) - asked_at_s >= SUMMARY_EVERY_S:
                    asked_at_s, progress = now_s, await self._with_summary(progress)
                both.refresh(progress)
            both.refresh(await self._with_summary(progress))

    async def _with_summary(self, progress: JobProgress) -> JobProgress:
        try:
            detail = await self.detail()
        except HyperGPUError as error:
            if error.reason not in RESTARTING:
                raise
            return progress
        return with_job(progress, detail.job, tuple(detail.participants))

    async def history(self) -> History:
        """Rounds and evaluations so far; its `frame` is a table of pandas."""
        history, events = History(), self._coordinator.read_events(self.id)
        try:
            while True:  # the stream itself would go on with later events
                async with asyncio.timeout(_NEWEST_WAIT_S):
                    event = await anext(events)
                history = with_event_recorded(history, event)
        except (TimeoutError, StopAsyncIteration):
            return history

    async def state_dict(self, which: str = "latest") -> "State":
        """Trained weights, as ``model.load_state_dict`` takes them.

        Args:
            which: ``latest`` or ``best``, as `hypergpu job export` has them.
        """
        from hypergpu.workloads.networks.program import as_before, exported_state

        with tempfile.TemporaryDirectory(prefix="hypergpu-") as folder:
            await self._coordinator.export(
                self.id, Path(folder), which=which, is_weights_alone=True
            )
            state = await asyncio.to_thread(exported_state, Path(folder))
        if self._names is None:
            return state
        return {
            name: as_before(state.get(self._names.same.get(name, ""), before), before)
            for name, before in self._names.state.items()
        }

    async def save(self, folder: Path | str, which: str = "latest") -> ExportedModel:
        """Write the model, its card and a program that loads it into a folder. Of a run of
        `hypergpu.train` it evaluates data without the module's code.
        """
        return await self._coordinator.export(self.id, Path(folder), which=which)

    async def pause(self) -> None:
        """Stop the job's work now; what was accepted stays, and a resume goes on from it."""
        await self._coordinator.pause(self.id)

    async def resume(self) -> None:
        """Go on after a pause."""
        await self._coordinator.resume(self.id)

    async def stop(self) -> None:
        """End the job; its model stays."""
        await self._coordinator.stop(self.id)

    async def set(self, **changes: Scalar) -> None:
        """Change settings of the running job from its next round on, such as ``lr=0.001``."""
        await self._coordinator.set_parameters(
            self.id, {name: json.dumps(value) for name, value in changes.items()}
        )
