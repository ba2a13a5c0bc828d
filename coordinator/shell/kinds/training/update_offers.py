"""Updates that nodes have offered and not yet sent whole, and the nonces that offers used up."""

import asyncio
from typing import NamedTuple

from coordinator.core.training.job.events import UpdateReceived
from coordinator.shell.store.journal.registry import NONCE_MAX
from hypergpu.assignment import Lease
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, JobId, NodeId
from hypergpu.units import Milliseconds
from hypergpu.v1 import node_pb2


class OfferedUpdate(NamedTuple):
    """An update that its node may send, under the node's newest nonce."""

    job_id: JobId
    received: UpdateReceived
    """The event once it is whole."""
    upload: str
    """Its name in the quarantine."""
    is_fresh: "asyncio.Future[bool]"
    """Once the nonce is used up durably: whether it was above all before."""
    offered_ms: Milliseconds
    phases: node_pb2.PhaseDurations | None
    """What the node said then of its work so far."""


class UpdateOffers:
    """The newest offer of each node, and the journalled marks of nonces of those that were heard
    since the start. A nonce must be above its node's mark.
    """

    def __init__(self) -> None:
        self._marks: dict[NodeId, int] = {}
        self._offers: dict[NodeId, OfferedUpdate] = {}
        self._rejected: dict[tuple[NodeId, JobId], int] = {}

    def knows(self, node: NodeId) -> bool:
        """Whether the node's mark was read from the journal."""
        return node in self._marks

    def learn(self, node: NodeId, mark: int) -> None:
        """The mark in the journal, which may have been passed meanwhile."""
        self._marks[node] = max(mark, self._marks.get(node, 0))

    def check_nonce(self, node: NodeId, nonce: int) -> None:
        """Reject a nonce that is not above all that were used, or above all that may be.

        Raises:
            HyperGPUError: NONCE_REPLAYED.
        """
        if nonce > NONCE_MAX:
            raise HyperGPUError(Reason.NONCE_REPLAYED, f"nonce {nonce} is above {NONCE_MAX}")
        if nonce <= self._marks[node]:
            detail = f"nonce {nonce} is not above {self._marks[node]}"
            raise HyperGPUError(Reason.NONCE_REPLAYED, detail)

    def put(self, offered: OfferedUpdate) -> None:
        """Take the place of the node's former offer, and use the nonce up."""
        node, nonce = offered.received.node, offered.received.update.nonce
        self._marks[node] = max(nonce, self._marks[node])
        self._offers[node] = offered

    def is_open(self, job_id: JobId, received: UpdateReceived) -> bool:
        """Whether this very offer is its node's newest, and its update is still to come: requests
        that bring an update's ranges bear the same offer. A replay of it brings nobody more.
        """
        offer = self._offers.get(received.node)
        if offer is None or offer.job_id != job_id:
            return False
        return _signed_part(offer.received) == _signed_part(received)

    def end(self, offered: OfferedUpdate) -> None:
        """Let nobody go on with an offer: its update is in, or was not what was offered."""
        node = offered.received.node
        if self._offers.get(node) is offered:
            del self._offers[node]

    def is_first_rejection(self, node: NodeId, job_id: JobId, round_: int) -> bool:
        """Whether this is the first of the member's rejected updates while the job is in a round.
        The others are not journalled: anybody may offer late updates as often as calls are let in.
        """
        before, self._rejected[node, job_id] = self._rejected.get((node, job_id)), round_
        return before != round_

    def of(self, node: NodeId, lease: Lease, digest: Digest) -> OfferedUpdate | None:
        """The node's newest offer, if it is of this update under this lease of this job."""
        offer = self._offers.get(node)
        if offer is None:
            return None
        update_event = offer.received
        offered_lease = Lease(offer.job_id, update_event.round, update_event.lease)
        is_this = (offered_lease, update_event.update.blob.digest) == (lease, digest)
        return offer if is_this else None


def _signed_part(received: UpdateReceived) -> tuple[object, ...]:
    """What tells one offer of a node from all others."""
    update = received.update
    return received.round, received.lease, update.blob, update.nonce, update.epoch, update.signature
