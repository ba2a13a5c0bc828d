"""What a node signs for an update, and what the coordinator refuses to take on its word."""

from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
from msgspec.structs import replace

from hypergpu.crypto import sign
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId
from hypergpu.jobfile.spec import CodecChoice, JobSpec, Pay, TrainingSettings
from hypergpu.ledger_terms import Terms
from hypergpu.part_file import Span
from hypergpu.v1 import node_pb2
from hypergpu.wire.messages import terms_value
from hypergpu.wire.update_requests import UpdateAnswer
from tests.node_client import NOBODY_LOST, WireNode, contribution, next_assignment
from tests.processes import Cluster

PARAMETERS = 4096
SPEC = JobSpec(
    workload="null",
    options={"parameters": PARAMETERS},
    training=TrainingSettings(rounds=9, inner_steps=2, batch_size=50, nodes=1),
    codec=CodecChoice("fp32", "fp32"),
    pay=Pay(rounds_per_epoch=2),
)
UPDATE = np.full(PARAMETERS, 0.25, np.float32).tobytes()


class Signer:
    """A node with an assignment."""

    def __init__(self, node: WireNode, assignment: node_pb2.Assignment) -> None:
        self.node = node
        self.assignment = assignment
        self.job_id = JobId(assignment.lease.job_id)

    @property
    def terms(self) -> Terms:
        return terms_value(self.assignment.terms)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("signatures"), *NOBODY_LOST) as cluster:
        yield cluster


@pytest.fixture
async def signer(cluster: Cluster) -> AsyncIterator[Signer]:
    node = WireNode(cluster.coordinator.address, cluster.coordinator.node_address)
    await node.join(cluster.coordinator.node_token())
    stream = node.control([("null", 1)])
    job_id = cluster.submit(SPEC)
    yield Signer(node, await next_assignment(stream))
    await node.close()
    with cluster.coordinator.client() as client:
        client.stop(job_id)


async def test_an_assignment_names_all_that_is_signed(signer: Signer) -> None:
    assert signer.terms.match(signer.job_id)
    assert signer.terms.domain.chain_id == 0
    assert signer.assignment.terms.epoch == 0


async def test_an_update_signed_as_assigned_is_accepted(signer: Signer) -> None:
    offer = signer.node.offer(signer.assignment, UPDATE)
    await signer.node.submit(offer, UPDATE)
    again = signer.node.offer(signer.assignment, UPDATE)
    assert await signer.node.ask(again) == UpdateAnswer(is_accepted=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("samples", 101),
        ("inner_steps", 3),
        ("epoch", 1),
        ("compute_ms", 5),
        ("update_bytes", 1),
        ("job", "0" * 64),
        ("shard", "0" * 64),
        ("model", "0" * 64),
        ("node", "0x" + "a1" * 20),
    ],
)
async def test_an_update_signed_as_other_work_is_refused_before_a_byte_is_stored(
    signer: Signer, field: str, value: int | str
) -> None:
    offer = signer.node.offer(signer.assignment, UPDATE)
    signed_contribution = contribution(signer.node.key, signer.assignment, UPDATE, offer.nonce)
    altered_contribution = replace(signed_contribution, **{field: value})
    offer.signature = sign(signer.node.key, signer.terms.domain.separator(), altered_contribution)
    with pytest.raises(HyperGPUError) as failure:
        await signer.node.submit(offer, UPDATE)
    assert failure.value.reason is Reason.SIGNATURE_INVALID
    answer = await signer.node.ask(signer.node.offer(signer.assignment, UPDATE))
    assert answer == UpdateAnswer(missing=(Span(0, len(UPDATE)),))


async def test_an_unsigned_update_is_refused(signer: Signer) -> None:
    offer = signer.node.offer(signer.assignment, UPDATE)
    offer.ClearField("signature")
    with pytest.raises(HyperGPUError) as failure:
        await signer.node.submit(offer, UPDATE)
    assert failure.value.reason is Reason.SIGNATURE_INVALID
