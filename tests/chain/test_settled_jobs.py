"""A coordinator with an Anvil of its own pays what a job earns on the chain, to the last unit."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from hypergpu.chain.rpc.client import Call, HttpRpc
from hypergpu.chain.rpc.transport import HttpTransport
from hypergpu.cli.demo.settlement import Settled, settled
from hypergpu.cli.ledger.account import LedgerView
from hypergpu.cli.ledger.proof.files import exported, verified_file
from hypergpu.cli.ledger.showing import ledger_of, verification_of
from hypergpu.client import Coordinator
from hypergpu.errors import HyperGPUError
from hypergpu.jobfile.spec import Evaluation, JobSpec, Pay, TrainingSettings
from tests.processes import UNREAD, Cluster

SPEC = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=6, inner_steps=5, nodes=2),
    evaluation=Evaluation(every=3),
    pay=Pay(unit_price=1_000_000, rounds_per_epoch=2),
)


SMALL_ESCROW = 2 * SPEC.pay.most_for(320)
"""Of two rounds at full quality."""


LOOKS = 12
"""At a job's ledger while it trains."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("settled"), "--chain", "anvil") as cluster:
        cluster.add_nodes(2)
        yield cluster


def soon_settled(client: Coordinator, job_id: str) -> Settled:
    """All that is going to be paid, on a chain whose blocks are ten seconds apart by its clock."""
    chain = ledger_of(client, job_id).chain
    assert chain is not None
    rpc = HttpRpc(HttpTransport(chain.url))
    rpc.call(Call("anvil_setBlockTimestampInterval", (10,)))
    rpc.close()
    return settled(client, job_id, UNREAD)


def test_what_a_job_earns_is_paid_to_the_last_unit(cluster: Cluster, tmp_path: Path) -> None:
    job_id = cluster.submit(SPEC)
    assert cluster.finished(job_id).phase == "finished"
    with cluster.coordinator.client() as client:
        paid = soon_settled(client, job_id)
        view = ledger_of(client, job_id)
        found = verification_of(client, job_id)
        path = tmp_path / "receipts.jsonl"
        made = exported(client, job_id, path)
        # Another block may have come meanwhile.
        assert replace(exported(client, job_id, path), block=made.block) == made
        path.with_name("other").write_text("mine")
        with pytest.raises(HyperGPUError, match="FILE_PRESENT"):
            exported(client, job_id, path.with_name("other"))
    assert view.chain is not None
    offline = verified_file(path, view.chain.url)
    assert (offline.is_sound, offline.open, offline.batches) == (True, [], found.batches)
    assert offline.receipts == made.receipts == 12
    assert paid.receipts == 12
    assert paid.paid == paid.earned == int(view.spent) > 0
    assert view.chain_id == 31337
    assert found.faults == []
    assert found.batches is not None
    assert found.batches >= 3
    assert all(node.paid == node.earned == node.vouched for node in view.nodes)
    assert view.pay is not None
    for node, tiers in zip(view.nodes, view.pay.nodes, strict=True):
        assert tiers.vouched == tiers.recorded == tiers.paid == tiers.final == node.paid
        assert (tiers.receipts_recorded, tiers.due) == (node.contributions, [])


def test_a_job_that_trains_meanwhile_is_never_found_wrong(cluster: Cluster, tmp_path: Path) -> None:
    many = replace(SPEC, training=replace(SPEC.training, rounds=100_000, inner_steps=1))
    job_id, path, early, looks = cluster.submit(many), tmp_path / "early.jsonl", 0, 0
    with cluster.coordinator.client() as client:
        url = rpc_of(client, job_id)
        while not early or looks < LOOKS or contributions(ledger_of(client, job_id)) == early:
            if ledger_of(client, job_id).pay is None:
                continue  # The ledger itself is in no block yet.
            found, looks = verification_of(client, job_id), looks + 1
            assert found.faults == []
            if found.batches is None:
                assert "the opening of the job is in no block yet" in found.open[0]
            if found.batches and not early:
                exported(client, job_id, path)
                early = verified_file(path, url).receipts
            assert not early or verified_file(path, url).faults == []
        client.stop(job_id)
        soon_settled(client, job_id)
        newer = contributions(ledger_of(client, job_id)) - early
    told = verified_file(path, url)
    assert (told.faults, told.receipts, told.newer) == ([], early, newer)
    assert newer > 0


def contributions(view: LedgerView) -> int:
    return sum(node.contributions for node in view.nodes)


def rpc_of(client: Coordinator, job_id: str) -> str:
    chain = ledger_of(client, job_id).chain
    assert chain is not None
    return chain.url


def test_a_coordinator_killed_while_it_settles_pays_once_at_the_same_address(
    cluster: Cluster,
) -> None:
    job_id = cluster.submit(SPEC)
    assert cluster.finished(job_id).phase == "finished"
    with cluster.coordinator.client() as client:
        before = rpc_of(client, job_id)
    cluster.coordinator.kill()
    cluster.coordinator.start()
    with cluster.coordinator.client() as client:
        paid = soon_settled(client, job_id)
        assert rpc_of(client, job_id) == before
    assert paid.paid == paid.earned > 0


def test_a_job_stops_before_work_that_its_escrow_does_not_cover_and_goes_on_with_more(
    cluster: Cluster,
) -> None:
    spec = replace(SPEC, pay=replace(SPEC.pay, escrow=SMALL_ESCROW))
    job_id = cluster.submit(spec)
    cluster.wait_for(job_id, lambda _: cluster.job(job_id).job.phase == "paused")
    # The judge of the last round may still be at work when the next one is not opened.
    cluster.wait_for(job_id, lambda told: told.kind == "RoundMetered" and told.fields["round"] == 1)
    said = cluster.job(job_id).job.reason
    assert f"the escrow of {SMALL_ESCROW} does not cover the next round" in said
    assert "hypergpu job set pay.escrow=" in said
    with cluster.coordinator.client() as client:
        at_pause = ledger_of(client, job_id)
        assert 0 < sum(int(node.vouched) for node in at_pause.nodes) <= SMALL_ESCROW
        assert sum(node.samples for node in at_pause.nodes) == 2 * 320
        refused = spec.pay.most_for(320 * 60)
        with pytest.raises(HyperGPUError, match=r"training\.rounds must be more"):
            client.set_parameters(job_id, {"pay.escrow": str(refused), "training.rounds": "1"})
        client.set_parameters(job_id, {"pay.escrow": str(spec.pay.most_for(320 * 6))})
        client.resume(job_id)
    assert cluster.finished(job_id).phase == "finished"
    with cluster.coordinator.client() as client:
        paid = soon_settled(client, job_id)
        purposes = [row.purpose for row in ledger_of(client, job_id).transactions]
        assert verification_of(client, job_id).faults == []
    assert paid.paid == paid.earned > SMALL_ESCROW
    assert f"fund/{job_id}/{spec.pay.most_for(320 * 6)}" in purposes
    assert f"fund/{job_id}/{refused}" not in purposes
