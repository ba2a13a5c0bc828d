"""A node on the ledger by itself: shares paid at once against a stake, vouchers without anybody."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from hypergpu.chain.local.anvil import Anvil, AnvilOptions, running_anvil
from hypergpu.chain.profiles import chain_profile
from hypergpu.chain.rpc.client import Call
from hypergpu.cli.demo.settlement import settled
from hypergpu.cli.ledger.holding import coordinator_key, held_of
from hypergpu.cli.ledger.reading import ledger_at
from hypergpu.cli.ledger.showing import ledger_of, verification_of
from hypergpu.cli.ledger.stored import VOUCHER_FILE
from hypergpu.cli.main import app
from hypergpu.client import Coordinator
from hypergpu.errors import Reason
from hypergpu.jobfile.spec import Evaluation, JobSpec, Pay, TrainingSettings
from hypergpu.ledger.terms import separator_of
from hypergpu.ledger.typed import sign
from hypergpu.ledger.voucher import SignedVoucher
from hypergpu.units import Wei
from tests.processes import UNREAD, Cluster, Happening

SPEC = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=4, inner_steps=5, nodes=1),
    evaluation=Evaluation(every=4),
    pay=Pay(unit_price=1_000_000, rounds_per_epoch=2),
)
ROUNDS = 40
"""Of work that a voucher vouches for."""
LONG = JobSpec(
    workload="digits-softmax",
    training=TrainingSettings(rounds=100_000, inner_steps=5, nodes=1),
    evaluation=Evaluation(every=1000),
    pay=Pay(unit_price=1_000_000, rounds_per_epoch=100_000, judged=0),
)
ROUND = LONG.pay.most_for(160)
"""What a round of the one node costs."""
WINDOW_S = chain_profile("anvil").window_s


@pytest.fixture(scope="module")
def anvil(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Anvil]:
    log = tmp_path_factory.mktemp("anvil") / "anvil.log"
    with running_anvil(AnvilOptions(), log=log) as anvil:
        yield anvil


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, anvil: Anvil) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("acts")
    with Cluster(folder, "--chain", "anvil", "--chain-url", anvil.url) as cluster:
        cluster.add_nodes(1)
        yield cluster


def acted(cluster: Cluster, anvil: Anvil, *words: str) -> dict[str, Any]:
    """What `hypergpu ledger` did for the one node of the cluster."""
    ended = CliRunner().invoke(app, ["ledger", *words, *_where(cluster, anvil), "--json"])
    assert ended.exit_code == 0, ended.output
    told = json.loads(ended.stdout)
    assert isinstance(told, dict)
    return told


def _where(cluster: Cluster, anvil: Anvil) -> list[str]:
    (node,) = cluster.nodes
    return ["--state-dir", str(node.state_dir), "--chain-url", anvil.url]


def released(cluster: Cluster, anvil: Anvil, job_id: str) -> None:
    """Let the window of the node's claim pass: it is paid then, whatever its stake, and whole."""
    waiting = acted(cluster, anvil, "claim", job_id)
    assert (waiting["hashes"], waiting["amounts"]["paid"]) == ([], "0")
    with ledger_at(anvil.url) as chain:
        chain.rpc.call(Call("evm_increaseTime", (WINDOW_S + 1,)))
        chain.rpc.call(Call("evm_mine"))
    told = acted(cluster, anvil, "claim", job_id)
    assert told["amounts"]["paid"] == told["amounts"]["released"] == waiting["amounts"]["pending"]


def test_a_node_with_a_stake_is_paid_without_waiting_for_the_window(
    cluster: Cluster, anvil: Anvil
) -> None:
    first = cluster.submit(SPEC)
    assert cluster.finished(first).phase == "finished"
    assert len(acted(cluster, anvil, "register", first)["hashes"]) == 1
    assert len(acted(cluster, anvil, "stake", "900000000", first)["hashes"]) == 3

    second = cluster.submit(SPEC)
    assert cluster.finished(second).phase == "finished"
    with cluster.coordinator.client() as client:
        paid = settled(client, second, UNREAD)
        purposes = [row.purpose for row in ledger_of(client, second).transactions]
    assert paid.paid == paid.earned > 0
    assert f"pay/{second}/0/0" in purposes
    assert f"pay/{second}/0/1" not in purposes
    assert acted(cluster, anvil, "dispute", second)["files"] == []


def test_a_voucher_is_redeemed_while_there_is_no_coordinator(
    cluster: Cluster, anvil: Anvil
) -> None:
    job_id = cluster.submit(LONG)
    cluster.wait_for(
        job_id,
        lambda happening: happening.kind == "RoundRecorded" and happening.fields["round"] >= ROUNDS,
    )
    with cluster.coordinator.client() as client:
        client.pause(job_id)
    cluster.coordinator.kill()
    assert "was redeemed" in acted(cluster, anvil, "claim", job_id)["said"]
    released(cluster, anvil, job_id)
    cluster.coordinator.start()


def used_up(cluster: Cluster) -> tuple[str, Happening]:
    """A job of eight rounds whose escrow was enough for four, paused; and the event of the last."""
    training = replace(LONG.training, rounds=8)
    spec = replace(LONG, training=training, pay=replace(LONG.pay, escrow=4 * ROUND))
    job_id = cluster.submit(spec)
    told = cluster.wait_for(job_id, lambda event: at_round(event, 4))
    cluster.wait_for(job_id, lambda _: cluster.job(job_id).job.phase == "paused")
    return job_id, told


def vouch(cluster: Cluster, job_id: str, amount: int) -> None:
    """Have the coordinator's key promise the node more than its work is worth."""
    (node,) = cluster.nodes
    held = held_of(node.state_dir, job_id)
    assert held.voucher is not None
    voucher = replace(held.voucher.voucher, amount=Wei(amount))
    key = coordinator_key(cluster.coordinator.data_dir)
    signed = SignedVoucher(voucher, sign(key, separator_of(held.terms.domain), voucher))
    folder = node.state_dir / "ledger" / f"{job_id}@{held.terms.coordinator}"
    (folder / VOUCHER_FILE).write_bytes(msgspec.json.encode(signed))


def blocks_later(client: Coordinator, job_id: str, count: int) -> None:
    """Return once the coordinator has seen so many blocks more."""

    def height() -> int:
        chain = ledger_of(client, job_id).chain
        assert chain is not None
        return chain.height

    before = height()
    while height() < before + count:
        pass


def test_a_node_that_redeems_pauses_no_job_that_has_escrow_left(
    cluster: Cluster, anvil: Anvil
) -> None:
    job_id, told = used_up(cluster)
    with cluster.coordinator.client() as client:
        # Nothing new is paid for by that. It comes back once all of it is in blocks.
        client.set_parameters(job_id, {"pay.escrow": str(4 * ROUND + 1)})
    assert "was redeemed" in acted(cluster, anvil, "claim", job_id)["said"]
    released(cluster, anvil, job_id)

    (node,) = cluster.nodes
    with cluster.coordinator.client() as client:
        with node.frozen():
            # The epoch is still open, and what its shares are made good with is paid.
            client.set_parameters(job_id, {"pay.escrow": str(5 * ROUND)})
            client.resume(job_id)
            blocks_later(client, job_id, 8)
            assert cluster.job(job_id).job.phase != "paused"
        cluster.wait_for(job_id, lambda event: at_round(event, 5), told.sequence)
        cluster.wait_for(job_id, lambda _: cluster.job(job_id).job.phase == "paused")
        client.set_parameters(job_id, {"pay.escrow": str(12 * ROUND)})
        client.resume(job_id)
        assert cluster.finished(job_id).phase == "finished"
        paid = settled(client, job_id, UNREAD)
        assert verification_of(client, job_id).faults == []
    assert paid.paid == paid.earned == 8 * ROUND


def test_a_job_whose_escrow_runs_short_on_the_ledger_is_paused_before_it_is_worked_for(
    cluster: Cluster, anvil: Anvil
) -> None:
    job_id, told = used_up(cluster)
    with cluster.coordinator.client() as client:
        client.set_parameters(job_id, {"pay.escrow": str(6 * ROUND)})
    # What nobody has worked for is gone from the escrow.
    vouch(cluster, job_id, 6 * ROUND)
    assert "was redeemed" in acted(cluster, anvil, "claim", job_id)["said"]

    (node,) = cluster.nodes
    with cluster.coordinator.client() as client, node.frozen():
        client.resume(job_id)
        # Before the round is opened, or within it: by when the ledger was read.
        cluster.wait_for(job_id, lambda _: cluster.job(job_id).job.phase == "paused", told.sequence)
        said = cluster.job(job_id).job.reason
        (worked,) = ledger_of(client, job_id).nodes
        client.stop(job_id)
    assert f"the escrow of {job_id} has 0 left on the ledger (block " in said
    assert f", {ROUND} less than the round may cost; raise it" in said
    assert worked.samples == 4 * 160
    assert int(worked.vouched) <= 4 * ROUND


def at_round(event: Happening, number: int) -> bool:
    return event.kind == "RoundMetered" and int(event.fields["round"]) == number - 1


def test_a_job_that_is_not_in_the_wallet_is_told(cluster: Cluster, anvil: Anvil) -> None:
    where = _where(cluster, anvil)
    ended = CliRunner().invoke(app, ["ledger", "claim", "job-000000000000", *where])
    assert ended.exit_code == Reason.JOB_UNKNOWN.exit_code
    assert "name one job of it" in ended.stderr
