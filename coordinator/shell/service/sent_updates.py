"""Updates that nodes send to the coordinator's own store: who sends them, and how often, is judged
as for a call, then the intake judges the offer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from coordinator.shell.service.calls import parser
from coordinator.shell.service.gates import NodeGate
from coordinator.shell.service.node import UpdateIntake
from coordinator.shell.store.blobs.upload_store import OpenUpload
from coordinator.shell.store.bulk.messages import UpdateSender
from hypergpu.ids import NodeId
from hypergpu.v1 import node_pb2
from hypergpu.wire.messages import digest_value, lease_value
from hypergpu.wire.update_requests import UpdateAnswer

_parse = parser(node_pb2.OfferUpdateRequest)


@dataclass(frozen=True)
class SentUpdates:
    """Judges updates for the bulk processes; see `UpdateTaker`."""

    gate: NodeGate
    intake: UpdateIntake
    check_driving: Callable[[], None] = lambda: None
    """Raises `HyperGPUError` once another coordinator may drive."""

    async def let_in(self, sender: UpdateSender, offer: bytes) -> OpenUpload | UpdateAnswer:
        """Check sender and offer before a byte of the update is read."""
        node = self._admit(sender)
        count_fresh = partial(self.gate.count_offer, node)
        return await self.intake.let_in(node, _parse(offer), count_fresh)

    async def accept(self, sender: UpdateSender, offer: bytes) -> UpdateAnswer:
        """Check the bytes; the update is accepted and durable on return."""
        node, request = self._admit(sender), _parse(offer)
        lease, digest = lease_value(request.lease), digest_value(request.digest)
        await self.intake.commit(node, lease, digest)
        return UpdateAnswer(is_accepted=True)

    def _admit(self, sender: UpdateSender) -> NodeId:
        self.check_driving()
        return self.gate.admit_sender(sender.node, sender.protocol)
