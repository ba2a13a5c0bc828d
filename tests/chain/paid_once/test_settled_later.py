"""A job that was created without a chain is paid by the first one, and audited against it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hypergpu.chain.local.anvil import AnvilOptions, running_anvil
from hypergpu.cli.demo.settlement import settled
from hypergpu.cli.ledger.showing import ledger_of, verification_of
from hypergpu.cli.ledger.verifying import verdict_lines
from hypergpu.cli.main import app
from tests.chain.test_settled_jobs import SPEC, soon_settled
from tests.processes import UNREAD, Cluster


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("later")) as cluster:
        cluster.add_nodes(2)
        yield cluster


def test_a_job_of_no_chain_is_audited_against_the_one_that_settles_it(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = cluster.submit(SPEC)
    assert cluster.finished(job_id).phase == "finished"
    with cluster.coordinator.client() as client:
        settled(client, job_id, UNREAD)
        before = verification_of(client, job_id)
    assert (before.is_sound, before.batches) == (True, None)
    assert verdict_lines(before)[-1] == (
        "not yet: no chain was asked what it recorded and paid: the coordinator has none now"
    )

    cluster.coordinator.kill()
    cluster.coordinator.add_flags("--chain", "anvil")
    cluster.coordinator.start()
    with cluster.coordinator.client() as client:
        paid = soon_settled(client, job_id)
        view = ledger_of(client, job_id)
        found = verification_of(client, job_id)
    assert (view.chain_id, found.faults, found.open) == (0, [], [])
    assert found.batches is not None
    assert found.batches >= 3
    assert paid.paid == paid.earned == int(view.spent) > 0

    # Its nodes learn the ledger from the coordinator too, where they have a token of it.
    node = cluster.nodes[0]
    monkeypatch.setenv("HYPERGPU_ADDRESS", cluster.coordinator.address)
    monkeypatch.setenv("HYPERGPU_TOKEN_FILE", str(cluster.coordinator.data_dir / "operator.token"))
    where = ["--state-dir", str(node.state_dir)]
    registered = CliRunner().invoke(app, ["ledger", "register", job_id, *where])
    assert (registered.exit_code, registered.stderr.count("worth nothing")) == (0, 1), registered
    claimed = CliRunner().invoke(app, ["ledger", "claim", job_id, *where])
    assert "nothing is due on 0x" in claimed.stderr, claimed

    with (
        running_anvil(AnvilOptions(), log=tmp_path / "other.log") as other,
        cluster.coordinator.client() as client,
    ):
        elsewhere = verification_of(client, job_id, other.url)
    (opening,) = [one.hash for one in view.transactions if one.purpose == f"open/{job_id}"]
    assert f"holds the opening that it names, {opening}" in verdict_lines(elsewhere)[-1]
