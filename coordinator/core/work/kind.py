"""One kind of work as the driver sees it: its events, its state, and the functions of its machine.

A job's kind follows from the first event of its journal. Everything else about a kind is behind
these functions, so that whoever drives jobs knows no kind by name.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from coordinator.core.work.funding import Funding
from coordinator.core.work.members import LeasedJob
from coordinator.core.work.work_commands import WorkStep
from coordinator.core.work.work_events import StampedEvent
from hypergpu.assignment import FailureCause, Lease
from hypergpu.ids import JobId, NodeId, TokenId
from hypergpu.jobfile.spec import Pay
from hypergpu.ledger_terms import Terms
from hypergpu.packed_work import PackedWork
from hypergpu.signed_spec import SignedSpec
from hypergpu.work_units import WorkUnit


def never(*_: object) -> bool:
    """What a kind answers that has no case of the question."""
    return False


class PendingWork(NamedTuple):
    """Work that a node has and whose result may still come in."""

    lease: int
    """Number of its lease."""
    command: Any
    """The kind's command that gives it out, safe to perform twice."""


class ReceiptForms(NamedTuple):
    """How jobs of a packed kind are paid."""

    pay: Callable[[Any], Pay]
    """``event -> pay``: price and escrow of the job that the event creates."""
    unit: Callable[[Any], WorkUnit]
    """``event -> unit``: what its work is counted in."""
    with_terms: Callable[[Any, Terms, Funding | None], StampedEvent]
    """``(event, terms, funding) -> event``: the event of a job with receipts under these terms."""


class PackedForms(NamedTuple):
    """How a kind reads what users and nodes send it packed. Each raises `HyperGPUError` with the
    reason REQUEST_INVALID for what it cannot read.
    """

    creation_event: Callable[[JobId, TokenId, PackedWork], StampedEvent]
    """``(job_id, owner, work) -> event``: the event that creates the job that a user asks for."""
    result_event: Callable[[Any, NodeId, Lease, PackedWork], StampedEvent | None]
    """``(job, node, lease, result) -> event``: the event of a result; None: that very result is in
    already.
    """
    receipts: ReceiptForms | None = None
    """None: results of the kind have no receipts."""
    with_spec: Callable[[Any, SignedSpec, int], StampedEvent] | None = None
    """``(event, signed, now_s) -> event``: the event of a job whose user signed what it orders; it
    raises `HyperGPUError` where that is not what is asked for. None: the kind has no such specs.
    """


class WorkKind(NamedTuple):
    """A kind of work. Jobs, events and commands are of its own types, which only it knows."""

    name: str
    created: type[StampedEvent]
    """The event that every journal of this kind begins with."""
    events: Any
    """Union of all events of its journals."""
    state: type[LeasedJob]
    """State of its jobs, no other kind's."""
    transition: Callable[[Any, Any], WorkStep]
    """``(job, event) -> step``: an illegal event gives the same state and no commands; the job is
    None only for `created`.
    """
    rejection: Callable[[Any, Any], str]
    """``(job, event) -> reason``: why an event is not legal now; empty: it is."""
    outstanding: Callable[[Any], tuple[Any, ...]]
    """``job -> commands``: those whose answers the job still waits for, safe to perform twice."""
    pending: Callable[[Any, NodeId], tuple[PendingWork, ...]]
    """``(job, node) -> works``: what `outstanding` has for one node, in the order in which the node
    does it.
    """
    hand_back_event: Callable[[NodeId, Lease, str, FailureCause], StampedEvent]
    """``(node, lease, reason, cause) -> event``: the event of a node that gives its work back
    undone. The reason is for people; whatever is decided follows from the cause.
    """
    phase_name: Callable[[Any], str]
    """``job -> name``: the phase that it is in, for people."""
    is_paused: Callable[[Any], bool]
    has_ended: Callable[[Any], bool]
    """Whether the job gives out no more work."""
    is_complete: Callable[[Any], bool]
    """Whether nothing more will be in the job's journal."""
    packed: PackedForms | None = None
    """None: its work has messages of its own."""
    paid_by: Any = ()
    """Types of events that payments fold: nothing else wakes them."""
    is_snapshot_due: Callable[[Any, Any], bool] = never
    """``(job, event) -> claim``: whether the state after the event is worth a snapshot."""
    moves_nodes: Callable[[Any, Any, Any], bool] = never
    """``(before, event, after) -> claim``: whether nodes may be lent anew; before is None at first.
    """
