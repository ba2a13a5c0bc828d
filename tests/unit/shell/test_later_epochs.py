"""Offers under leases over several rounds whose epoch closes while the node works."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from coordinator.core.training.job import events
from coordinator.core.training.job.state import AcceptedUpdate, Job, Model
from coordinator.core.training.trust.quality import offered_contribution
from coordinator.core.work import work_events
from coordinator.core.work.leases import WorkState
from coordinator.shell.store.blobs.upload_store import QUARANTINE, OpenUpload
from hypergpu.blobs import BlobRef
from hypergpu.crypto import IdentityKey, sign
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, NodeId
from hypergpu.jobfile.spec import JobSpec, Pay, TrainingSettings
from hypergpu.ledger_terms import Domain, terms_of
from hypergpu.statements import Contribution, is_signed_by
from hypergpu.tensors.codec import update_bytes
from hypergpu.tensors.layout import TensorSpec, layout_of
from hypergpu.units import Bytes, Samples
from hypergpu.v1 import node_pb2
from hypergpu.wire.messages import digest_message, digest_value, lease_value
from hypergpu.wire.update_requests import UpdateAnswer
from tests.properties.test_malformed_calls import write_part
from tests.unit.job_states import ALICE, at, node_plan, plan_event
from tests.unit.shell.whole_shell import JOB, WholeShell, driving, services_in

LAYOUT = layout_of((TensorSpec("weight", (9, 33)),))
CONTENT = bytes(update_bytes(LAYOUT, "int4"))
SPEC = JobSpec(
    workload="digits-softmax",
    strategy="aware",
    training=TrainingSettings(rounds=20, inner_steps=2, batch_size=4, nodes=2),
    pay=Pay(rounds_per_epoch=1),
)
TERMS = terms_of(Address("0x" + "b1" * 20), JOB, Domain(31_337, Address("0x" + "c0" * 20)))


class LongLeaseKit:
    """A coordinator, and a node at work under a lease of round and epoch 0."""

    def __init__(self, services: WholeShell) -> None:
        self.services = services
        self.key = IdentityKey.generate()
        self._nonce = 0

    @property
    def job(self) -> Job:
        return self.services.jobs[JOB].job

    @property
    def node(self) -> NodeId:
        return self.key.node_id

    async def submit(self, *happened: events.Event) -> None:
        """Let this happen."""
        for event in happened:
            assert await self.services.driver.submit(JOB, event) == ""

    def model(self, rounds: int) -> Model:
        """A model that is on disk."""
        content = rounds.to_bytes(4, "little") + bytes(LAYOUT.model_bytes - 4)
        return Model(rounds, self.services.blobs.put(content, keep_s=0))

    async def begin(self) -> None:
        """Have both nodes at work."""
        first = events.ModelInitialised(
            at_ms=at(0), model=self.model(0), partition_sizes=(Samples(10_000),)
        )
        await self.submit(
            events.JobCreated(at_ms=at(0), job_id=JOB, spec=SPEC, terms=TERMS),
            first,
            work_events.NodeJoined(at_ms=at(0), node=ALICE),
            work_events.NodeJoined(at_ms=at(0), node=self.node),
            plan_event(0, {ALICE: node_plan(2), self.node: replace(node_plan(1), rounds=9)}),
        )
        self.services.jobs[JOB].layout = LAYOUT

    async def close_round(self) -> None:
        """Close the open round, and open the next one: an epoch each."""
        round_ = self.job.open_round
        update = AcceptedUpdate(BlobRef(digest_of(b"hers"), Bytes(4)), Samples(0), 0)
        update_event = events.UpdateReceived(
            at_ms=at(0),
            node=ALICE,
            round=round_.number,
            lease=round_.participants[ALICE].lease,
            update=update,
        )
        number = round_.number + 1
        fold_event = events.AggregateReady(
            at_ms=at(0), round=round_.number, model=self.model(number)
        )
        await self.submit(update_event, fold_event, plan_event(number, {ALICE: node_plan(2)}))

    def contribution(self, epoch: int | None) -> Contribution:
        """What the node signs under its newest nonce."""
        return offered_contribution(self.job, self.node, self._update(epoch))

    def offer(self, epoch: int | None, *, signed: int | None = None) -> node_pb2.OfferUpdateRequest:
        """An offer that says to be of an epoch, and is signed for it or for another."""
        self._nonce += 1
        contribution = self.contribution(epoch if signed is None else signed)
        return node_pb2.OfferUpdateRequest(
            lease=node_pb2.Lease(job_id=JOB, round=0, number=contribution.lease),
            digest=digest_message(contribution.update),
            size_bytes=contribution.update_bytes,
            nonce=self._nonce,
            signature=sign(self.key, TERMS.domain.separator(), contribution),
            epoch=epoch,
        )

    def _update(self, epoch: int | None) -> AcceptedUpdate:
        blob = BlobRef(digest_of(CONTENT), Bytes(len(CONTENT)))
        return AcceptedUpdate(blob, Samples(0), 0, nonce=self._nonce, epoch=epoch)

    async def send(self, request: node_pb2.OfferUpdateRequest) -> OpenUpload | UpdateAnswer:
        """What the coordinator answers to an offer."""
        return await self.services.intake.let_in(self.node, request)

    async def refusal(self, request: node_pb2.OfferUpdateRequest) -> Reason:
        """Why an offer is refused for good."""
        with pytest.raises(HyperGPUError) as failure:
            await self.send(request)
        return failure.value.reason

    async def commit(self, request: node_pb2.OfferUpdateRequest) -> None:
        """Have the update accepted."""
        lease, digest = lease_value(request.lease), digest_value(request.digest)
        await self.services.intake.commit(self.node, lease, digest)

    def bring(self, opened: OpenUpload | UpdateAnswer) -> None:
        """Send all that an upload lacks."""
        assert isinstance(opened, OpenUpload)
        write_part(self.services.settings.data_dir / QUARANTINE / opened.name, CONTENT)


@pytest.fixture
async def kit(tmp_path: Path) -> AsyncIterator[LongLeaseKit]:
    services = services_in(tmp_path)
    async with driving(services):
        kit = LongLeaseKit(services)
        await kit.begin()
        yield kit


async def test_an_offer_of_a_closed_epoch_is_told_the_open_one_before_a_byte_is_stored(
    kit: LongLeaseKit,
) -> None:
    await kit.close_round()
    await kit.close_round()
    old = kit.offer(0)
    assert await kit.send(old) == UpdateAnswer(open_epoch=2)
    with pytest.raises(HyperGPUError) as failure:
        await kit.commit(old)
    assert failure.value.reason is Reason.OFFSET_MISMATCH
    assert kit.job.tally.updates_rejected == 0
    again = await kit.send(kit.offer(2))
    assert isinstance(again, OpenUpload)
    assert again.missing


async def test_an_epoch_that_closes_while_the_bytes_come_is_signed_for_again_and_no_byte_sent_twice(
    kit: LongLeaseKit,
) -> None:
    await kit.close_round()
    first = kit.offer(1)
    kit.bring(await kit.send(first))
    await kit.close_round()
    with pytest.raises(HyperGPUError) as failure:
        await kit.commit(first)
    assert failure.value.reason is Reason.EPOCH_CLOSED
    assert await kit.send(kit.offer(1)) == UpdateAnswer(open_epoch=2)
    again = kit.offer(2)
    upload = await kit.send(again)
    assert isinstance(upload, OpenUpload)
    assert not upload.missing
    await kit.commit(again)
    assert kit.job.long_leases[kit.node].work is WorkState.RECEIVED
    assert kit.job.tally.updates_rejected == 0
    assert await kit.send(kit.offer(2)) == UpdateAnswer(is_accepted=True)


async def test_what_is_measured_bears_the_epoch_and_the_signature_of_the_offer_that_was_taken(
    kit: LongLeaseKit,
) -> None:
    for _ in range(3):
        await kit.close_round()
    offer = kit.offer(3)
    kit.bring(await kit.send(offer))
    await kit.commit(offer)
    await kit.close_round()
    rows = kit.services.jobs[JOB].recent_entries(0)
    assert rows is not None
    bodies = [each.body_json for each in rows if each.kind == "RoundMeasured"]
    updates = msgspec.json.decode(bodies[-1], type=events.RoundMeasured).updates
    (own,) = [each for each in updates if each.contribution.node == kit.node]
    assert (own.contribution.epoch, own.contribution.round) == (3, 0)
    assert is_signed_by(kit.node, TERMS.domain.separator(), own.contribution, own.signature)


@pytest.mark.parametrize("epoch", [3, 2**32 - 1])
async def test_an_epoch_ahead_of_the_open_one_is_refused(kit: LongLeaseKit, epoch: int) -> None:
    await kit.close_round()
    await kit.close_round()
    assert await kit.refusal(kit.offer(epoch)) is Reason.SIGNATURE_INVALID


@pytest.mark.parametrize(("stated", "signed"), [(0, 1), (2, 0), (2, 1)])
async def test_an_epoch_that_the_signature_does_not_cover_is_refused(
    kit: LongLeaseKit, stated: int, signed: int
) -> None:
    await kit.close_round()
    await kit.close_round()
    forged_offer = kit.offer(stated, signed=signed)
    assert await kit.refusal(forged_offer) is Reason.SIGNATURE_INVALID


async def test_an_offer_for_another_ledger_is_not_told_an_epoch(kit: LongLeaseKit) -> None:
    await kit.close_round()
    offer = kit.offer(0)
    elsewhere = Domain(1, TERMS.domain.contract).separator()
    offer.signature = sign(kit.key, elsewhere, kit.contribution(0))
    assert await kit.refusal(offer) is Reason.SIGNATURE_INVALID


async def test_a_void_lease_is_not_told_an_epoch(kit: LongLeaseKit) -> None:
    offer = kit.offer(0)
    await kit.close_round()
    back = events.ShardHandedBack(
        at_ms=at(0), node=kit.node, round=0, lease=offer.lease.number, reason="busy"
    )
    await kit.submit(back)
    assert await kit.refusal(offer) is Reason.UPDATE_LATE


async def test_an_open_offer_that_is_shown_again_is_told_the_epoch_that_opened_meanwhile(
    kit: LongLeaseKit,
) -> None:
    offer = kit.offer(0)
    await kit.send(offer)
    await kit.close_round()
    assert await kit.send(offer) == UpdateAnswer(open_epoch=1)


async def test_a_node_of_the_version_before_goes_on_under_the_epoch_of_its_lease(
    kit: LongLeaseKit,
) -> None:
    await kit.close_round()
    offer = kit.offer(None)
    kit.bring(await kit.send(offer))
    await kit.close_round()
    await kit.commit(offer)
    assert kit.job.long_leases[kit.node].work is WorkState.RECEIVED
