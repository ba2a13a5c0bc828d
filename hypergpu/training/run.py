"""`Run`: a job that a script or notebook started, or found again."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from hypergpu.client import ENDED, Coordinator, ExportedModel, History, JobDetail, connect
from hypergpu.client.history import with_event_recorded
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile.spec import Scalar
from hypergpu.terminal.watch import follow, open_view

if TYPE_CHECKING:
    from hypergpu.workloads.networks.tracing import Module, State


class StateNames(NamedTuple):
    """Tensors of a module's state: those that are trained, and those that stay."""

    same: Mapping[str, str]
    """Name of each tensor in the state to the name that it is trained by; tied ones share one."""
    state: Mapping[str, Any]
    """The state as it was when training was started."""

    @classmethod
    def of(cls, model: "Module") -> Self:
        """Those of a module."""
        state = model.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        same = {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
        return cls(same, {name: tensor.detach().clone() for name, tensor in state.items()})


class Run:
    """A job. Calls block; a notebook may use them from any cell.

    >>> run = hypergpu.train(model, loss=loss, data=data, nodes=3)
    >>> run.watch()
    >>> model.load_state_dict(run.state_dict())
    """

    def __init__(
        self, coordinator: Coordinator, job_id: str, names: StateNames | None = None
    ) -> None:
        self.id = job_id
        self._coordinator = coordinator
        self._names = names

    @classmethod
    def find(cls, job: str | None = None, coordinator: Coordinator | None = None) -> Self:
        """A job by its id or name; the newest without one."""
        coordinator = coordinator or connect()
        return cls(coordinator, coordinator.find_job(job))

    def __repr__(self) -> str:
        job = self.detail().job
        return f"<Run {self.id}: {job.phase}, round {job.round} of {job.rounds}>"

    def detail(self) -> JobDetail:
        """The job at the moment."""
        return self._coordinator.job(self.id)

    def watch(self) -> JobDetail:
        """Show the job live until it has ended; interrupting it lets the job go on."""
        with open_view(title=self.id) as view:
            follow(self._coordinator, self.id, view)
        return self.detail()

    def result(self) -> JobDetail:
        """Wait until the job has ended.

        Raises:
            HyperGPUError: JOB_UNSUCCESSFUL, it failed.
        """
        for _ in self._coordinator.watch(self.id):
            pass
        found = self.detail()
        if found.job.phase == "failed":
            raise HyperGPUError(Reason.JOB_UNSUCCESSFUL, f"{self.id} failed: {found.job.reason}")
        return found

    @property
    def has_ended(self) -> bool:
        """Whether no round follows."""
        return self.detail().job.phase in ENDED

    def history(self) -> History:
        """Rounds and evaluations so far."""
        history = History()
        for event in self._coordinator.read_events(self.id).until_newest():
            history = with_event_recorded(history, event)
        return history

    def state_dict(self, which: str = "latest") -> "State":
        """Trained weights, as ``model.load_state_dict`` takes them.

        Args:
            which: ``latest`` or ``best``, as `hypergpu job export` has them.
        """
        from hypergpu.workloads.networks.program import exported_state

        with tempfile.TemporaryDirectory(prefix="hypergpu-") as folder:
            self.save(folder, which)
            trained = exported_state(Path(folder))
        if self._names is None:
            return trained
        return {
            name: trained.get(self._names.same[name], before)
            for name, before in self._names.state.items()
        }

    def save(self, folder: Path | str, which: str = "latest") -> ExportedModel:
        """Write the model, its card and a program that loads it into a folder."""
        return self._coordinator.export(self.id, Path(folder), which=which)

    def pause(self) -> None:
        """Let the open round finish and open no other."""
        self._coordinator.pause(self.id)

    def resume(self) -> None:
        """Go on after a pause."""
        self._coordinator.resume(self.id)

    def stop(self) -> None:
        """End the job; its model stays."""
        self._coordinator.stop(self.id)

    def set(self, **changes: Scalar) -> None:
        """Change settings of the running job from its next round on, such as ``lr=0.001``."""
        self._coordinator.set_parameters(
            self.id, {name: json.dumps(value) for name, value in changes.items()}
        )
