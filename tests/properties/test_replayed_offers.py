"""R10: ten thousand offers of updates that were sent before, forged, or put together of others."""

import random
from collections import defaultdict
from pathlib import Path

import pytest

from coordinator.shell.kinds.training.update_offers import UpdateOffers
from coordinator.shell.store.blobs.upload_store import OpenUpload
from hypergpu.crypto import IdentityKey
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import NodeId
from hypergpu.v1 import node_pb2
from hypergpu.wire.messages import digest_message
from hypergpu.wire.update_requests import UpdateAnswer
from tests.journals import FolderJournal
from tests.properties.test_malformed_calls import UPDATE_BYTES, world_over
from tests.unit.shell.whole_shell import WholeShell

ATTACKS = 10_000
HONEST_EACH = 100
STRANGER = IdentityKey.generate().node_id
REASONS = {
    "replay": {Reason.NONCE_REPLAYED},
    "forge": {Reason.SIGNATURE_INVALID},
    "swap": {Reason.SIGNATURE_INVALID, Reason.LEASE_STALE, Reason.UPDATE_LATE},
    "borrow": {Reason.LEASE_STALE},
}
Offer = node_pb2.OfferUpdateRequest


def attack(kind: str, sent: list[Offer], fresh: Offer, dice: random.Random) -> Offer:
    """An offer that must be refused, made of one that would be taken and of those that were."""
    if kind == "replay":
        return dice.choice(sent)
    if kind == "forge":
        fresh.signature = dice.choice((dice.randbytes(65), dice.choice(sent).signature))
    elif kind == "swap":
        match dice.choice(("digest", "nonce", "round", "lease")):
            case "digest":
                fresh.digest.CopyFrom(digest_message(digest_of(dice.randbytes(8))))
            case "nonce":
                fresh.nonce += dice.randrange(1, 1 << 40)
            case "round":
                fresh.lease.round += dice.randrange(1, 9)
            case "lease":
                fresh.lease.number += dice.randrange(1, 9)
    return fresh


async def reason_against(services: WholeShell, node: NodeId, offer: Offer) -> Reason:
    with pytest.raises(HyperGPUError) as failure:
        await services.intake.let_in(node, offer)
    return failure.value.reason


async def test_no_replayed_forged_or_swapped_offer_is_taken_also_after_a_restart(
    tmp_path: Path,
) -> None:
    dice, reasons = random.Random(10), defaultdict[str, set[Reason]](set)
    async with world_over(FolderJournal(tmp_path), tmp_path) as world:
        services, sent_offers, nonce = world.services, list[Offer](), 0
        newest: OpenUpload | UpdateAnswer | None = None
        for count in range(ATTACKS):
            if count == ATTACKS // 2:
                # A restart forgets what was offered and reads the marks of nonces afresh.
                services, newest = services.replace(offers=UpdateOffers()), None
            fresh = world.signed_offer(dice.randbytes(UPDATE_BYTES), nonce + 1, dice)
            if count % HONEST_EACH == 0:
                newest = await services.intake.let_in(world.node, fresh)
                sent_offers.append(fresh)
                nonce += 1
                continue
            kind = dice.choice(tuple(REASONS))
            node = STRANGER if kind == "borrow" else world.node
            offer = attack(kind, sent_offers, fresh, dice)
            if kind == "replay" and newest is not None and offer is sent_offers[-1]:
                # The newest one opens the very same upload, which is its own.
                again = await services.intake.let_in(node, offer)
                assert isinstance(again, OpenUpload)
                assert isinstance(newest, OpenUpload)
                assert again == newest._replace(is_new=False)
                continue
            reasons[kind].add(await reason_against(services, node, offer))
        # By the thread that writes: an offer is answered before its nonce is durable.
        in_writer = services.intake.driver.in_writer
        assert await in_writer(services.journal.nonce, world.node) == nonce
    assert reasons == REASONS
