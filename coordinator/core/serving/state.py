"""A served model: its nodes, and which of them hold it now."""

from collections.abc import Mapping
from enum import Enum

from coordinator.core.work.leases import LeasedWork
from coordinator.core.work.members import JobMember, LeasedJob
from hypergpu.ids import NodeId
from hypergpu.serving.serve_request import ServeRequest


class ServePhase(Enum):
    """Where a served model is. Snapshots hold the values: they never change."""

    SERVING = "serving"
    PAUSED = "paused"
    STOPPED = "stopped"


class ServeMember(JobMember, frozen=True, kw_only=True):
    """A node that has ever joined the job."""

    failures_in_a_row: int = 0
    """Times that it gave its replica back since it was there anew or the job was resumed."""
    refusal: str = ""
    """Why it gets no replica while it is there; empty: it does."""

    @property
    def exclusion(self) -> str:
        """Why the node gets no work of this job while it is there; empty: it does."""
        return self.ban or self.refusal


class LeasedReplica(LeasedWork, frozen=True, kw_only=True):
    """A replica that a node has, or gave back."""


class ServeJob(LeasedJob, frozen=True, kw_only=True):
    """One served model."""

    request: ServeRequest
    phase: ServePhase = ServePhase.SERVING
    members: Mapping[NodeId, ServeMember] = {}
    leases: Mapping[NodeId, LeasedReplica] = {}
    """Nodes that hold the model, or load it."""
    refusals: tuple[LeasedReplica, ...] = ()
    """Newest replicas that came back, of nodes that get none any more."""
