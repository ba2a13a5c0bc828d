"""How `up` starts a coordinator, and one that hangs before it serves."""

import sys
from pathlib import Path

import pytest

from coordinator.__main__ import main as coordinator
from hypergpu.cli.up import settled_by
from hypergpu.client.settings import resolve_settings
from hypergpu.cluster.coordinator import (
    SettlingBy,
    wait_until_ready,
)
from hypergpu.cluster.processes import start
from hypergpu.errors import HyperGPUError

OF_A_CHAIN = ["CHAIN_URL", "LEDGER_CONTRACT"]


def test_a_coordinator_that_never_says_it_serves_is_killed() -> None:
    child = start([sys.executable, "-c", "import time; time.sleep(600)"], is_read=True)
    assert child.stdout is not None
    with child.stdout, pytest.raises(HyperGPUError, match="ended with status 137"):
        wait_until_ready(child, 0.5)
    assert child.poll() == -9


def test_settings_of_payments_reach_the_coordinator_by_its_environment() -> None:
    assert SettlingBy("anvil", retries_halted=True).environment() == {
        "HYPERGPU_COORDINATOR_CHAIN": "anvil",
        "HYPERGPU_COORDINATOR_RETRY_PAYMENTS": "1",
    }
    assert SettlingBy().environment() == {}


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HYPERGPU_CONFIG", str(tmp_path / "none.toml"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("CHAIN", "COORDINATOR_CHAIN", *(f"COORDINATOR_{each}" for each in OF_A_CHAIN)):
        monkeypatch.delenv(f"HYPERGPU_{name}", raising=False)


@pytest.mark.usefixtures("nothing_set")
@pytest.mark.parametrize("name", ["CHAIN", *OF_A_CHAIN])
def test_up_refuses_what_would_settle_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"HYPERGPU_COORDINATOR_{name}", "http://127.0.0.1:8545")
    with pytest.raises(HyperGPUError, match=f"nothing would be settled by .*_{name} ") as refused:
        settled_by(resolve_settings())
    assert "HYPERGPU_CHAIN=NAME" in refused.value.fix
    monkeypatch.setenv("HYPERGPU_CHAIN", "none")
    assert settled_by(resolve_settings())["HYPERGPU_COORDINATOR_CHAIN"] == "none"


@pytest.mark.usefixtures("nothing_set")
def test_up_without_anything_of_a_chain_settles_on_none() -> None:
    assert settled_by(resolve_settings()) == {
        "HYPERGPU_COORDINATOR_CHAIN": "none",
        "HYPERGPU_COORDINATOR_CHAIN_URL": "",
    }


def test_a_setting_that_cannot_be_is_named_as_it_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert coordinator(["--port", "70000"]) == 2
    assert capsys.readouterr().err == (
        "ARGUMENT_INVALID (6002): port: Input should be less than or equal to 65535. Fix:"
        " correct HYPERGPU_COORDINATOR_PORT, or the flag: see hypergpu-coordinator --help\n"
    )
