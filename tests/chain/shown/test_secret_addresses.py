"""A provider's key is often in the address of its RPC: nobody but the coordinator learns it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hypergpu.chain.local.anvil import Anvil, AnvilOptions, running_anvil
from hypergpu.cli.main import app
from hypergpu.errors import Reason
from hypergpu.jobfile.spec import JobSpec, Pay, TrainingSettings
from hypergpu.wire.token import Role
from tests.processes import Cluster

SPEC = JobSpec(
    workload="null",
    options={"parameters": 64},
    training=TrainingSettings(rounds=1, inner_steps=1, nodes=1),
    pay=Pay(unit_price=1_000),
)
SECRET = "MYSECRETKEY"


@pytest.fixture
def anvil(tmp_path: Path) -> Iterator[Anvil]:
    with running_anvil(AnvilOptions(), log=tmp_path / "anvil.log") as anvil:
        yield anvil


@pytest.fixture
def cluster(tmp_path: Path, anvil: Anvil) -> Iterator[Cluster]:
    secret = anvil.url.replace("://", f"://user:{SECRET}@") + f"/?key={SECRET}"
    with Cluster(tmp_path / "secret", "--chain", "anvil", "--chain-url", secret) as cluster:
        yield cluster


def ledger(cluster: Cluster, *words: str) -> Result:
    with cluster.coordinator.client() as client:
        made = client.create_token(Role.USER, ttl_s=600, uses=0, label="test")
    return CliRunner().invoke(app, ["ledger", *words], env={"HYPERGPU_TOKEN": made.token})


def test_no_secret_of_an_rpc_is_handed_out_and_whoever_asks_names_one_of_his_own(
    cluster: Cluster, anvil: Anvil
) -> None:
    job_id = cluster.submit(SPEC)
    with cluster.coordinator.client() as client:
        answer = client.ledger(job_id)
    assert answer.HasField("chain")
    assert answer.chain.url == ""
    assert SECRET not in str(answer)

    shown = ledger(cluster, "show", job_id)
    assert shown.exit_code == 0
    assert "by an RPC that the coordinator does not name" in shown.stdout
    assert "what was paid is not known" in shown.stderr
    assert "--chain-url URL" in shown.stderr
    verified = ledger(cluster, "verify", job_id)
    assert verified.exit_code == Reason.CHAIN_UNREACHABLE.exit_code
    assert "does not say by which RPC" in verified.stderr
    assert "--chain-url URL" in verified.stderr
    assert SECRET not in shown.output + verified.output

    named = ledger(cluster, "show", job_id, "--chain-url", anvil.url)
    assert named.exit_code == 0
    # It may have come before the ledger itself is in a block.
    assert "--chain-url" not in named.stderr
    assert "does not say by which RPC" not in named.stderr


@pytest.mark.parametrize(
    ("url", "where"),
    [
        (f"http://user:{SECRET}@127.0.0.1:1/v3/{SECRET}", "http://127.0.0.1:1"),
        (f"http://127.0.0.1:1x/v3/{SECRET}", "begins with http:// or https://"),
        (f"wss://127.0.0.1:1/v3/{SECRET}", "begins with http:// or https://"),
    ],
)
def test_what_somebody_named_is_not_repeated_in_errors(
    cluster: Cluster, url: str, where: str
) -> None:
    job_id = cluster.submit(SPEC)
    ended = ledger(cluster, "verify", job_id, "--chain-url", url)
    assert ended.exit_code in {
        Reason.ARGUMENT_INVALID.exit_code,
        Reason.CHAIN_UNREACHABLE.exit_code,
    }
    assert where in ended.stderr
    assert SECRET not in ended.output
