"""What callers see of a job. The owner of some nodes sees the job, and of its nodes only their own:
a journal row is cut by its form, not by its kind, so that later events tell nothing of others.
"""

import math
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.structs import replace

from coordinator.core.training.job.state import Job, Participant
from coordinator.core.training.waiting import standing_reason
from coordinator.core.work.members import LeasedJob
from coordinator.shell import translate
from coordinator.shell.kinds.training.demand import lacks_data
from coordinator.shell.nodes.connected_nodes import ConnectedNodes
from coordinator.shell.service.calls import Caller
from coordinator.shell.store.journal.records import Entry
from hypergpu.crypto import is_node_id
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId, NodeId, Slot, TokenId
from hypergpu.v1 import job_pb2

OwnNodes = frozenset[NodeId] | None
"""Nodes that a caller may see; None: all."""
_NOTHING = object()
_LACKING_MOST = 50


def may_see(job: LeasedJob, own: OwnNodes) -> bool:
    """Whether a job is to be shown: one of the caller's nodes has ever had a part in it."""
    return own is None or not own.isdisjoint(job.members)


def require_visible(job: LeasedJob, own: OwnNodes) -> None:
    """Refuse a job that no node of the caller has had a part in.

    Raises:
        HyperGPUError: ROLE_FORBIDDEN.
    """
    if not may_see(job, own):
        detail = f"no node that joined with this token has had a part in {job.job_id}"
        raise HyperGPUError(Reason.ROLE_FORBIDDEN, detail, fix="use a viewer's or a user's token")


def require_owner(caller: Caller, job_id: JobId, owner: TokenId) -> None:
    """Refuse a caller who may not change a job.

    Raises:
        HyperGPUError: ROLE_FORBIDDEN.
    """
    if not caller.may_change(owner):
        whose = f"belongs to token {owner}" if owner else "is an operator's to change"
        raise HyperGPUError(
            Reason.ROLE_FORBIDDEN,
            f"{job_id} {whose}",
            fix="use the token that created the job, or an operator's",
        )


def participants(
    connected: ConnectedNodes, job: Job, own: OwnNodes = None
) -> list[job_pb2.ParticipantSummary]:
    """The open round's participants in slot order, then those that rest.

    Args:
        connected: Tells names and progress.
        job: The job.
        own: Only these nodes are told; None: all.
    """
    round_, nodes_without_data = job.round, _without_data(connected, job)
    works = {**(round_.participants if round_ is not None else {}), **job.long_leases}
    ordered_works = sorted(works.items(), key=lambda item: item[1].slot)
    taking_part = [
        _summary(connected, node, participant, standing_reason(job.members[node], participant))
        for node, participant in ordered_works
    ]
    resting_nodes = [
        _resting(connected, node, job.members[node].slot, why)
        for node, why in (sorted(round_.resting.items()) if round_ is not None else ())
        if node not in works
    ]
    summaries = (*taking_part, *resting_nodes, *nodes_without_data)
    return [each for each in summaries if own is None or NodeId(each.node_id) in own]


def _without_data(connected: ConnectedNodes, job: Job) -> list[job_pb2.ParticipantSummary]:
    """Nodes that have no part in the job since they lack the data set that it asks for."""
    return [
        _resting(connected, node, Slot(0), why)
        for node in sorted(connected.streams)
        if node not in job.members and (why := lacks_data(job, connected, node))
    ][:_LACKING_MOST]


def _summary(
    connected: ConnectedNodes, node: NodeId, participant: Participant, why: str
) -> job_pb2.ParticipantSummary:
    message = translate.participant_summary(node, participant, connected.progress.get(node))
    message.reason = why or message.reason
    message.name = connected.name_of(node)
    return message


def _resting(
    connected: ConnectedNodes, node: NodeId, slot: Slot, why: str
) -> job_pb2.ParticipantSummary:
    return job_pb2.ParticipantSummary(
        node_id=node,
        slot=slot,
        state="resting",
        loss=math.nan,
        reason=why,
        name=connected.name_of(node),
    )


def own_entries(entries: Iterable[Entry], own: OwnNodes) -> Iterable[Entry]:
    """Rows without what they tell of others' nodes; rows about those alone are left out."""
    if own is None:
        return entries
    cut = ((entry, _cut(msgspec.json.decode(entry.body_json), own)) for entry in entries)
    return [
        replace(entry, body_json=msgspec.json.encode(body))
        for entry, body in cut
        if body is not _NOTHING
    ]


def _cut(value: Any, own: frozenset[NodeId]) -> Any:
    """A JSON value without objects, keys and pairs that name another's node."""
    match value:
        case {"node": str(node)} if _is_foreign(node, own):
            return _NOTHING
        case {"contribution": {"node": str(node)}} if _is_foreign(node, own):
            return _NOTHING
        case [str(node), *_] if _is_foreign(node, own):
            return _NOTHING
        case dict():
            pairs = ((key, _cut(one, own)) for key, one in value.items())
            return {
                key: one for key, one in pairs if one is not _NOTHING and not _is_foreign(key, own)
            }
        case list():
            return [one for each in value if (one := _cut(each, own)) is not _NOTHING]
        case _:
            return value


def _is_foreign(name: str, own: frozenset[NodeId]) -> bool:
    return is_node_id(name) and name not in own
