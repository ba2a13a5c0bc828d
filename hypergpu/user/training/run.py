"""`Run`: a job that a script or notebook started, or found again."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hypergpu.jobfile.keys import Scalar
from hypergpu.user.client import Coordinator, ExportedModel, History, JobDetail, connect
from hypergpu.user.client.blocking import wait_for
from hypergpu.user.sinks.sink import Sink, named_sinks, with_sinks
from hypergpu.user.terminal.watch import follow, open_view
from hypergpu.user.training.async_run import AsyncRun, StateNames

if TYPE_CHECKING:
    from hypergpu.workloads.networks.tracing import Module, State


class Run:
    """A job. Calls block; a notebook may use them from any cell. `AsyncRun` has the same ones
    without blocking, and says more about each.

    >>> run = hypergpu.train(model, loss=loss, data=data, nodes=3)
    >>> run.watch()
    >>> model.load_state_dict(run.state_dict())
    """

    def __init__(
        self, coordinator: Coordinator, job_id: str, names: StateNames | None = None
    ) -> None:
        self.id = job_id
        self._coordinator = coordinator
        self._asynchronous = AsyncRun(coordinator.asynchronous, job_id, names)

    @classmethod
    def find(cls, job: str | None = None, coordinator: Coordinator | None = None) -> Self:
        """A job by its id or name; the newest without one."""
        coordinator = coordinator or connect()
        return cls(coordinator, coordinator.find_job(job))

    def __repr__(self) -> str:
        detail = self.detail()
        job = detail.job
        # Plans decide how many rounds there are.
        total_text = "" if detail.spec.get("strategy") == "aware" else f" of {job.rounds}"
        return f"<Run {self.id}: {job.phase}, round {job.round}{total_text}>"

    @property
    def sinks(self) -> tuple[Sink | str, ...]:
        """Where `watch` and `result` write each round's figures, besides what they are given."""
        return self._asynchronous.sinks

    @sinks.setter
    def sinks(self, sinks: Sequence[Sink | str]) -> None:
        self._asynchronous.sinks = tuple(sinks)

    def detail(self) -> JobDetail:
        """The job at the moment."""
        return wait_for(self._asynchronous.detail())

    def watch(self, sinks: Sequence[Sink | str] = ()) -> JobDetail:
        """Show the job live until it has ended; interrupting it lets the job go on.

        Args:
            sinks: Where the figures of each round are written, such as ``tensorboard:runs``,
                ``wandb:PROJECT`` or ``mlflow:URI``. Watched again, they go on where they stopped.
        """
        open_sinks = named_sinks([*self.sinks, *sinks])
        with (
            open_view(title=self.id) as view,
            with_sinks(view, self.detail(), open_sinks) as both,
        ):
            follow(self._coordinator, self.id, both)
        return self.detail()

    def result(self, sinks: Sequence[Sink | str] = ()) -> JobDetail:
        """Wait until the job has ended.

        Raises:
            HyperGPUError: JOB_UNSUCCESSFUL, it failed.
        """
        return wait_for(self._asynchronous.result(sinks))

    @property
    def has_ended(self) -> bool:
        """Whether no round follows."""
        return wait_for(self._asynchronous.has_ended())

    def history(self) -> History:
        """Rounds and evaluations so far; its `frame` is a table of pandas."""
        return wait_for(self._asynchronous.history())

    def state_dict(self, which: str = "latest") -> "State":
        """Trained weights, as ``model.load_state_dict`` takes them; ``latest`` or ``best``."""
        return wait_for(self._asynchronous.state_dict(which))

    def save(self, folder: Path | str, which: str = "latest") -> ExportedModel:
        """Write the model, its card and a program that loads it into a folder."""
        return wait_for(self._asynchronous.save(folder, which))

    def predict(self, rows: Any, *, module: "Module | None" = None, **settings: Any) -> Any:
        """What the model says of each row, computed by nodes; see `hypergpu.predict`.

        Args:
            rows: A file, a folder, a DataFrame or a list.
            module: A module of one's own that takes the rows' fields and gives one tensor; the
                trained weights are loaded into it. Else the program's first output is taken.
            settings: As of `hypergpu.predict`, or with a module of `hypergpu.map`.
        """
        settings = {"coordinator": self._coordinator, **settings}
        if module is not None:
            module.load_state_dict(self.state_dict())
            mapping_module = import_module("hypergpu.user.farm.mapping")
            return mapping_module.map(module, data=rows, **settings).result()
        return import_module("hypergpu.user.farm.predicting").predict(self.id, rows, **settings)

    def pause(self) -> None:
        """Stop the job's work now; what was accepted stays, and a resume goes on from it."""
        wait_for(self._asynchronous.pause())

    def resume(self) -> None:
        """Go on after a pause."""
        wait_for(self._asynchronous.resume())

    def stop(self) -> None:
        """End the job; its model stays."""
        wait_for(self._asynchronous.stop())

    def set(self, **changes: Scalar) -> None:
        """Change settings of the running job from its next round on, such as ``lr=0.001``."""
        wait_for(self._asynchronous.set(**changes))
