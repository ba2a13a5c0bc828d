"""Members of a job and their coming and going, whatever the job's work is.

Members keep their slots for ever: slots key the work and the order of its results, node ids do not.
"""

from collections.abc import Container, Mapping
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from coordinator.core.persistent_map import count_where, replace_items
from coordinator.core.work.funding import Funding
from coordinator.core.work.standing import Standing
from coordinator.core.work.work_commands import ReleaseNode
from coordinator.core.work.work_events import (
    MembershipEvent,
    NodeDraining,
    NodeJoined,
    NodeReadmitted,
)
from hypergpu.ids import JobId, NodeId, Slot, TokenId
from hypergpu.units import Milliseconds


class JobMember(msgspec.Struct, frozen=True, kw_only=True):
    """A node that has ever joined the job. It keeps its slot when it comes back."""

    slot: Slot
    is_present: bool = True
    is_leaving: bool = False
    standing: Standing = Standing()
    token: str = ""
    """Id of the join token that it came by; empty where it is not known."""
    ban: str = ""
    """Why it gets no work in this job any more; empty: it does."""
    address: str = ""
    """Digest of the address that it dials from; empty where it is not known."""

    @property
    def can_work(self) -> bool:
        """Whether the node may take work."""
        return self.is_present and not self.is_leaving and not self.exclusion

    @property
    def exclusion(self) -> str:
        """Why the node gets no work of this job while it is there; empty: it does."""
        return self.ban


class LeasedJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the job of every kind has. Each kind adds its work, and the phases of its own."""

    job_id: JobId
    owner: TokenId = TokenId("")
    """Token that created it."""
    reason: str = ""
    """Why it is in its phase, for people."""
    at_ms: Milliseconds = Milliseconds(0)
    """When the last event happened, in job time."""
    members: Mapping[NodeId, JobMember] = {}
    next_lease: int = 1
    funding: Funding | None = None
    """None: nothing limits the job's work."""


AnyJob = TypeVar("AnyJob", bound=LeasedJob)
_AnyMember = TypeVar("_AnyMember", bound=JobMember)


def membership_rejection(job: LeasedJob, event: MembershipEvent) -> str:
    """Why a node's coming or going changes nothing now; empty: it does."""
    member = job.members.get(event.node)
    if isinstance(event, NodeReadmitted):
        is_banned = member is not None and bool(member.ban)
        return "" if is_banned else f"{event.node} is not banned from {job.job_id}"
    is_present = member is not None and member.is_present
    if isinstance(event, NodeJoined):
        return f"{event.node} is in {job.job_id} already" if is_present else ""
    if not is_present:
        return f"{event.node} is not in {job.job_id}"
    if isinstance(event, NodeDraining) and member is not None and member.is_leaving:
        return f"{event.node} is leaving {job.job_id} already"
    return ""


def next_slot(job: LeasedJob) -> Slot:
    """The slot of a node that has never joined the job."""
    return Slot(len(job.members))


def present_again(member: _AnyMember, event: NodeJoined) -> _AnyMember:
    """A member as it is once it has joined, for the first time or again."""
    return replace(
        member, token=event.token, address=event.address, is_present=True, is_leaving=False
    )


def with_member(job: AnyJob, node: NodeId, member: JobMember) -> AnyJob:
    """The job with the member in place of what it was before."""
    return replace(job, members=replace_items(job.members, {node: member}))


def without_presence(job: AnyJob, node: NodeId) -> AnyJob:
    """The job with the node no longer present. It stays a member, with its slot."""
    member = replace(job.members[node], is_present=False, is_leaving=False)
    return with_member(job, node, member)


def with_leaving(job: AnyJob, node: NodeId) -> AnyJob:
    """The job in which the node finishes its work and gets no more."""
    return with_member(job, node, replace(job.members[node], is_leaving=True))


def release_if_leaving(job: AnyJob, node: NodeId) -> tuple[AnyJob, tuple[ReleaseNode, ...]]:
    """Let a node go that was to leave once its work is done, and now has done it."""
    if not job.members[node].is_leaving:
        return job, ()
    return without_presence(job, node), (ReleaseNode(node, "it has finished its work"),)


def release_all(job: AnyJob, reason: str) -> tuple[AnyJob, tuple[ReleaseNode, ...]]:
    """Let every node go, as the job has ended."""
    present = [node for node, member in job.members.items() if member.is_present]
    members = {
        node: replace(member, is_present=False, is_leaving=False)
        for node, member in job.members.items()
    }
    job = replace(job, members=members)
    return job, tuple(ReleaseNode(node, reason) for node in present)


def free_nodes(job: LeasedJob, busy: Container[NodeId]) -> list[NodeId]:
    """Nodes that can take work and are not busy, in slot order."""
    able = [
        (member.slot, node)
        for node, member in job.members.items()
        if member.can_work and node not in busy
    ]
    return [node for _, node in sorted(able)]


def staying_members(job: LeasedJob) -> frozenset[NodeId]:
    """Nodes that work for the job now and are not about to leave it."""
    return frozenset(
        node for node, member in job.members.items() if member.is_present and not member.is_leaving
    )


def available_count(job: LeasedJob) -> int:
    """How many nodes can take work or are at it. Cheap to ask whenever one comes."""
    return count_where(job.members, _can_work)


def _can_work(member: JobMember) -> bool:
    return member.can_work
