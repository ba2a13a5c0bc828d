"""A node on the ledger by itself: paid at once against a stake, and by voucher without anybody."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from hypergpu.chain.local.anvil import Anvil, AnvilOptions, running_anvil
from hypergpu.cli.demo.settlement import settled
from hypergpu.cli.ledger.showing import ledger_of
from hypergpu.cli.main import app
from hypergpu.refusal import Reason
from hypergpu.spec import Evaluation, JobSpec, Pay, Training
from tests.processes import Cluster

SPEC = JobSpec(
    workload="digits-softmax",
    training=Training(rounds=4, inner_steps=5, nodes=1),
    evaluation=Evaluation(every=4),
    pay=Pay(unit_price=1_000_000, rounds_per_epoch=2),
)
ROUNDS = 40
"""Of work that a voucher vouches for."""
LONG = JobSpec(
    workload="digits-softmax",
    training=Training(rounds=100_000, inner_steps=5, nodes=1),
    evaluation=Evaluation(every=1000),
    pay=Pay(unit_price=1_000_000, rounds_per_epoch=100_000, judged=0),
)


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


def test_a_node_with_a_stake_is_paid_without_waiting_for_the_window(
    cluster: Cluster, anvil: Anvil
) -> None:
    first = cluster.submit(SPEC)
    assert cluster.finished(first).phase == "finished"
    assert len(acted(cluster, anvil, "register", first)["hashes"]) == 1
    assert len(acted(cluster, anvil, "stake", "900000000", first)["hashes"]) == 2

    second = cluster.submit(SPEC)
    assert cluster.finished(second).phase == "finished"
    with cluster.coordinator.client() as client:
        paid = settled(client, second)
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
    said = acted(cluster, anvil, "claim", job_id)["said"]
    assert "was redeemed" in said
    assert ", 0 paid" not in said
    cluster.coordinator.start()


def test_a_job_that_is_not_in_the_wallet_is_told(cluster: Cluster, anvil: Anvil) -> None:
    where = _where(cluster, anvil)
    ended = CliRunner().invoke(app, ["ledger", "claim", "job-000000000000", *where])
    assert ended.exit_code == Reason.JOB_UNKNOWN.exit_code
    assert "name one job of it" in ended.stderr
