"""One node at work for a job without a plan, with an update that it has still to offer."""

from pathlib import Path
from typing import NamedTuple, Self

from coordinator.core.training.job import events
from coordinator.core.training.job.state import AcceptedUpdate, Model
from coordinator.core.training.trust.quality import offered_contribution
from coordinator.core.work import work_events
from coordinator.shell.store.blobs.upload_store import QUARANTINE, OpenUpload
from coordinator.shell.store.bulk.messages import UpdateSender
from hypergpu.blobs import BlobRef
from hypergpu.crypto import IdentityKey, sign
from hypergpu.digests import digest_of
from hypergpu.ids import Address, JobId, NodeId
from hypergpu.jobfile.spec import JobSpec, TrainingSettings, Trust
from hypergpu.ledger_terms import Domain, terms_of
from hypergpu.protocol import PROTOCOL
from hypergpu.tensors.codec import encode_update
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.v1 import node_pb2
from hypergpu.wire.messages import digest_message
from hypergpu.wire.update_requests import UpdateAnswer
from tests.properties.test_malformed_calls import write_part
from tests.unit.aggregation.fold_files import LAYOUT, random_flat
from tests.unit.shell.whole_shell import JOB, WholeShell

SPEC = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=5, inner_steps=2, batch_size=4, nodes=1),
    trust=Trust(rule="mean"),
)
TERMS = terms_of(Address("0x" + "b1" * 20), JOB, Domain(31_337, Address("0x" + "c0" * 20)))
_NOW = Milliseconds(0)


class UpdateOffer(NamedTuple):
    """An update and what its node sends of it."""

    job_id: JobId
    node: NodeId
    content: bytes
    folder: Path
    request: node_pb2.OfferUpdateRequest

    @classmethod
    async def begin(cls, services: WholeShell) -> Self:
        """Create the job, have the node join, and make its update."""
        key = IdentityKey.generate()
        base = b"".join(part.tobytes() for part in random_flat(0))
        first = Model(0, services.blobs.put(base, keep_s=-1))
        for event in (
            events.JobCreated(at_ms=_NOW, job_id=JOB, spec=SPEC, terms=TERMS),
            events.ModelInitialised(at_ms=_NOW, model=first, partition_sizes=(Samples(10_000),)),
            work_events.NodeJoined(at_ms=_NOW, node=key.node_id),
        ):
            assert await services.driver.submit(JOB, event) == ""
        runtime = services.jobs[JOB]
        runtime.layout = LAYOUT
        content = encode_update(LAYOUT, SPEC.codec.up, random_flat(1, 0.01)).payload.tobytes()
        blob = BlobRef(digest_of(content), Bytes(len(content)))
        update = AcceptedUpdate(blob, Samples(0), 0, nonce=1)
        contribution = offered_contribution(runtime.job, key.node_id, update)
        request = node_pb2.OfferUpdateRequest(
            lease=node_pb2.Lease(job_id=JOB, round=0, number=contribution.lease),
            digest=digest_message(contribution.update),
            size_bytes=contribution.update_bytes,
            nonce=1,
            signature=sign(key, TERMS.domain.separator(), contribution),
        )
        folder = services.settings.data_dir / QUARANTINE
        return cls(JOB, key.node_id, content, folder, request)

    @property
    def sender(self) -> UpdateSender:
        """Its node, as a bulk process names it."""
        return UpdateSender(self.node, str(PROTOCOL))

    @property
    def raw(self) -> bytes:
        """The offer as it comes."""
        return self.request.SerializeToString()

    def bring(self, opened: OpenUpload | UpdateAnswer) -> None:
        """Send all that the upload lacks."""
        assert isinstance(opened, OpenUpload)
        write_part(self.folder / opened.name, self.content)
