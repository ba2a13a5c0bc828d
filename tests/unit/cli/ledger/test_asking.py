"""Whom a command asks that names no RPC."""

from pathlib import Path

import pytest

from hypergpu.chain.profiles import chain_profile
from hypergpu.cli.deployment.ground import Place
from hypergpu.cli.ledger.asking import nodes_rpc, operators_rpc
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address
from hypergpu.ledger.typed import Domain
from tests.unit.cli.fake_service import JOB, FakeService, operator_token, serving

BASE = chain_profile("base-sepolia")
LEDGER = Address("0x" + "ab" * 20)
MINE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine knows no coordinator and no chain."""
    for name in ("CHAIN", "COORDINATOR_CHAIN_URL", "ADDRESS", "TOKEN", "TOKEN_FILE"):
        monkeypatch.delenv(f"HYPERGPU_{name}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("HYPERGPU_CONFIG", str(tmp_path / "config.toml"))


def test_a_node_asks_whom_it_is_told_to_or_the_public_rpc_of_its_chain() -> None:
    assert nodes_rpc(MINE, Domain(31337, LEDGER), "job-a") == MINE
    assert nodes_rpc(MINE, Domain(BASE.chain_id, LEDGER), "job-a") == MINE
    assert nodes_rpc("", Domain(BASE.chain_id, LEDGER), "job-a") == BASE.rpc_url


@pytest.mark.parametrize("chain_id", [31337, 424_242])
def test_a_node_of_a_chain_without_a_public_rpc_is_told_to_name_one(chain_id: int) -> None:
    with pytest.raises(HyperGPUError, match=f"no RPC of chain {chain_id} is known here") as refused:
        nodes_rpc("", Domain(chain_id, LEDGER), "job-a")
    assert refused.value.reason is Reason.ARGUMENT_INVALID
    assert "--chain-url URL" in refused.value.fix


def test_an_operator_asks_whom_the_coordinator_is_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HyperGPUError, match="no chain is named"):
        operators_rpc("")
    monkeypatch.setenv("HYPERGPU_CHAIN", "base-sepolia")
    assert operators_rpc("") == BASE.rpc_url
    assert operators_rpc(MINE) == MINE
    monkeypatch.setenv("HYPERGPU_CHAIN", "anvil")
    with pytest.raises(HyperGPUError, match="is started by the coordinator, which posts its bond"):
        operators_rpc("")


@pytest.mark.parametrize("named", ["flag", "environment"])
def test_the_rpc_that_an_operator_names_counts_before_the_address_that_names_the_chain(
    monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setenv("HYPERGPU_CHAIN", "http://127.0.0.1:1")
    if named == "environment":
        monkeypatch.setenv("HYPERGPU_COORDINATOR_CHAIN_URL", MINE)
    given = MINE if named == "flag" else ""
    assert operators_rpc(given) == MINE
    # Nobody answers there: it is asked, and no other.
    with pytest.raises(HyperGPUError, match=r"127\.0\.0\.1:9 "):
        Place(chain_url=given).named()


def test_a_node_beside_its_coordinator_asks_what_that_asks_for_the_same_ledger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = Address("0x" + "cd" * 20)
    service = FakeService()
    service.domain, service.chain_url = Domain(31337, LEDGER), MINE
    with serving(service) as port:
        monkeypatch.setenv("HYPERGPU_TOKEN", operator_token(port))
        assert nodes_rpc("", Domain(31337, LEDGER), JOB) == MINE
        with pytest.raises(HyperGPUError, match="no RPC of chain 31337 is known here"):
            nodes_rpc("", Domain(31337, other), JOB)
