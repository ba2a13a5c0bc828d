"""A coordinator takes no job whose escrow its ledger refuses, and goes on with the others."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from hypergpu.chain.rpc.client import Call, HttpRpc
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.cli.ledger.showing import ledger_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.jobfile.spec import Evaluation, JobSpec, Pay, TrainingSettings
from tests.chain.refused.tokens import PAUSED_SLOT
from tests.chain.test_settled_jobs import soon_settled
from tests.processes import Cluster

SPEC = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=2, inner_steps=5, nodes=1),
    evaluation=Evaluation(every=2),
    pay=Pay(unit_price=1_000_000, rounds_per_epoch=2),
)
FREE = replace(SPEC, pay=Pay())


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, "--chain", "anvil") as cluster:
        cluster.add_nodes(1)
        yield cluster


def set_paused(cluster: Cluster, job_id: str, *, is_paused: bool) -> None:
    """Have the guardian of a job's ledger pause it, or end the pause."""
    with cluster.coordinator.client() as client:
        view = ledger_of(client, job_id)
    assert view.chain is not None
    rpc = HttpRpc(HttpTransport(view.chain.url))
    value = "0x" + f"{int(is_paused):064x}"
    rpc.call(Call("anvil_setStorageAt", (view.contract, PAUSED_SLOT, value)))
    rpc.call(Call("evm_mine"))
    rpc.close()


def test_a_job_is_refused_while_its_ledger_is_paused_and_taken_behind_the_pause(
    cluster: Cluster,
) -> None:
    before = cluster.submit(SPEC)
    assert cluster.finished(before).phase == "finished"
    with cluster.coordinator.client() as client:
        soon_settled(client, before)
    set_paused(cluster, before, is_paused=True)
    with pytest.raises(HyperGPUError, match="the ledger's guardian has paused it") as refused:
        cluster.submit(SPEC)
    assert refused.value.reason is Reason.ESCROW_SHORT
    assert "and submit it again" in refused.value.fix
    assert cluster.finished(cluster.submit(FREE)).phase == "finished"
    set_paused(cluster, before, is_paused=False)
    assert cluster.finished(cluster.submit(SPEC)).phase == "finished"


def test_a_price_that_no_escrow_holds_is_refused_and_the_next_job_is_paid(
    cluster: Cluster,
) -> None:
    training = replace(SPEC.training, rounds=100_000)
    pay = replace(SPEC.pay, unit_price=9 * 10**23)
    with pytest.raises(HyperGPUError, match="the ledger holds an escrow of at most") as refused:
        cluster.submit(replace(SPEC, training=training, pay=pay))
    assert refused.value.reason is Reason.SPEC_INVALID
    assert cluster.finished(cluster.submit(SPEC)).phase == "finished"
