"""The table of kinds of work: all that drives, replays and performs jobs goes through its entries.

`coordinator.shell.kinds` holds the table itself.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from coordinator.core.hub.health import HealthEvidence
from coordinator.core.work.demand import JobDemand
from coordinator.core.work.kind import WorkKind
from coordinator.core.work.members import LeasedJob
from coordinator.core.work.work_events import StampedEvent
from coordinator.shell.driver.work_runtime import WorkRuntime
from hypergpu.blobs import BlobRef
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId
from hypergpu.serving.tuned_model import ModelVersion, TuningSource, VersionDelta
from hypergpu.tensors.layout import Layout
from hypergpu.units import Milliseconds
from hypergpu.workloads.entry import OptionValue


class TrainedModelFiles(NamedTuple):
    """A model that a job trained, and what makes it one that answers."""

    workload: str
    options: Mapping[str, OptionValue]
    layout: Layout
    manifest: BlobRef | None
    """The job's data, with the base that it fine-tunes; None: it has none."""
    version: ModelVersion
    delta: VersionDelta | None = None
    """What leads to the version from the one before; None: there is none."""
    has_ended: bool = False
    """Whether no further version comes."""
    is_base: bool = False
    """Whether it is the model before any training, whose adapter need not be stored anywhere."""


def no_evidence(*_: object) -> list[HealthEvidence]:
    """What a kind's events say of nodes' health, where they say nothing."""
    return []


def no_reason(*_: object) -> str:
    """Why a node does not meet the requirements of a kind that has none."""
    return ""


def no_trained_model(runtime: Any, source: TuningSource) -> TrainedModelFiles:
    """The model of a job of a kind that trains none."""
    detail = f"{source.job} is a {type(runtime.job).__name__}, which trains no model"
    raise HyperGPUError(Reason.REQUEST_INVALID, detail, fix="name a fine-tuning")


def no_substitute(*_: object) -> None:
    """None: a job of a kind that needs each of its commands is paused instead."""
    return


class WorkPerformer(Protocol):
    """Carries out what jobs of one kind have commanded; a kind's own performer extends it."""

    def perform(self, runtime: Any, command: Any) -> None:
        """Start a command and return at once."""

    async def take_up(self, runtime: Any) -> None:
        """Go on with a job after a start of this process."""

    def after_drain(self, runtime: Any) -> None:
        """Do what follows on a drain that changed the job; nothing, where a kind has nothing."""

    def after_command(self, runtime: Any, command: str, took_ms: Milliseconds) -> None:
        """Do what follows on a long command, by its name."""


@dataclass(frozen=True)
class ShellKind:
    """A kind of work with whatever drives and performs it here."""

    core: WorkKind
    _: KW_ONLY
    runtime: Callable[[Any, int], WorkRuntime[Any]]
    """Makes the runtime of a job: ``(job, next_sequence) -> runtime``."""
    performer: Callable[[Any], WorkPerformer]
    """Makes what performs its commands, once at the start, of the resources in
    `coordinator.shell.kinds.performers`.
    """
    demand: Callable[[Any], JobDemand]
    """Nodes that a job of the kind can use, ``runtime -> demand``, while it has not ended."""
    uses_nodes: Callable[[Any], bool]
    """``job -> bool``: whether it can use nodes in the phase it is in."""
    unmet_reason: Callable[[Any, Any], str] = no_reason
    """Why a connected node does not meet a job's requirements: ``(runtime, stream) -> reason``;
    empty: it does.
    """
    while_recovering: tuple[type, ...] = ()
    """Commands that go out before a job is taken up again."""
    evidence: Callable[[Any, Any, Any], list[HealthEvidence]] = no_evidence
    """What an event says of nodes' health: ``(before, event, after) -> evidence``."""
    trained_model: Callable[[Any, TuningSource], TrainedModelFiles] = no_trained_model
    """The model of a job, for jobs that serve it: ``(runtime, source) -> files``."""
    without: Callable[[str, int, str], StampedEvent | None] = no_substitute
    """Event by which a job goes on without a command that broke too often: ``(name, number, why)``;
    None: the job is paused.
    """

    def stored_event(self, body_json: bytes) -> Any:
        """Read a row.

        Raises:
            msgspec.ValidationError: it is no event of the kind that this version knows.
        """
        return self._events.decode(body_json)

    def stored_state(self, stored: bytes) -> Any:
        """Read a snapshot.

        Raises:
            msgspec.ValidationError: another version of the machine wrote it.
        """
        return self._states.decode(stored)

    @cached_property
    def _events(self) -> msgspec.json.Decoder[Any]:
        return msgspec.json.Decoder(self.core.events)

    @cached_property
    def _states(self) -> msgspec.json.Decoder[Any]:
        return msgspec.json.Decoder(self.core.state)


class KindTable:
    """Kinds of work by the event that their journals begin with.

    Args:
        kinds: The first is of journals whose first row is damaged behind a sound snapshot.
    """

    def __init__(self, *kinds: ShellKind) -> None:
        self._kinds = kinds
        self._by_event = {kind.core.created.__name__: kind for kind in kinds}
        self._by_state: dict[type, ShellKind] = {kind.core.state: kind for kind in kinds}

    def __iter__(self) -> Iterator[ShellKind]:
        return iter(self._kinds)

    def with_kind(self, kind: ShellKind) -> "KindTable":
        """The table with one more kind."""
        return KindTable(*self._kinds, kind)

    def of_journal(self, first_row: str) -> ShellKind:
        """The kind of a journal that begins with an event of that name."""
        return self._by_event.get(first_row, self._kinds[0])

    def begun_by(self, event: StampedEvent) -> ShellKind | None:
        """The kind of a job that the event creates; None: it creates none."""
        return self._by_event.get(type(event).__name__)

    def by_name(self, name: str) -> ShellKind | None:
        """The kind of that name; None: this coordinator drives none."""
        return next((kind for kind in self._kinds if kind.core.name == name), None)

    def of_job(self, job: LeasedJob) -> ShellKind:
        """The kind of a job."""
        return self._by_state[type(job)]


OneKind = TypeVar("OneKind", bound=WorkRuntime[Any])


class RuntimesOfKind(MutableMapping[JobId, OneKind]):
    """Those of all runtimes that are of one kind, for services of that kind alone.

    Args:
        runtimes: All of them; changes go through to it.
        kind: Type of the runtimes of the kind.
    """

    def __init__(self, runtimes: dict[JobId, WorkRuntime[Any]], kind: type[OneKind]) -> None:
        self._all = runtimes
        self._kind = kind

    def __getitem__(self, job_id: JobId) -> OneKind:
        runtime = self._all[job_id]
        if not isinstance(runtime, self._kind):
            raise KeyError(job_id)
        return runtime

    def __setitem__(self, job_id: JobId, runtime: OneKind) -> None:
        self._all[job_id] = runtime

    def __delitem__(self, job_id: JobId) -> None:
        del self._all[job_id]

    def __iter__(self) -> Iterator[JobId]:
        return (job_id for job_id, each in self._all.items() if isinstance(each, self._kind))

    def __len__(self) -> int:
        return sum(isinstance(each, self._kind) for each in self._all.values())


Runtimes = Mapping[JobId, WorkRuntime[Any]]
"""Runtimes of jobs of every kind."""
