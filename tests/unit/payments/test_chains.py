"""Chains are named, described or dialled, and an RPC's secrets are never shown."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hypergpu.errors import HyperGPUError, Reason
from payments.shell.chains import (
    check_url,
    display_url,
    named_chain,
    profile_of_id,
    read_profile,
)


def test_a_public_chain_has_its_own_rpc_and_a_given_one_goes_first() -> None:
    base = named_chain("base-sepolia")
    assert base is not None
    assert base.url.startswith("https://")
    own = named_chain("base-sepolia", "http://127.0.0.1:8545")
    assert own is not None
    assert (own.url, own.profile.chain_id) == ("http://127.0.0.1:8545", 84532)


def test_an_address_alone_has_to_be_asked_for_its_chain() -> None:
    assert named_chain("https://rpc.example/v2/key") is None


def test_an_unknown_chain_gets_slow_figures_and_a_note() -> None:
    profile, note = profile_of_id(999)
    assert not profile.is_local
    assert profile.depth >= 64
    assert "chain 999 has no profile" in note


@pytest.mark.parametrize("chain", ["etherium", "ftp://host", "http://", "http://host:99999"])
def test_a_wrong_name_or_address_is_an_error_with_a_fix(chain: str) -> None:
    with pytest.raises(HyperGPUError) as wrong:
        named_chain(chain)
    assert wrong.value.reason is Reason.ARGUMENT_INVALID
    assert wrong.value.fix


def test_a_wrong_address_is_not_repeated() -> None:
    with pytest.raises(HyperGPUError) as wrong:
        check_url("wss://host/SECRET")
    assert "SECRET" not in str(wrong.value)
    assert display_url("https://user:SECRET@host:8545/SECRET?key=SECRET") == "https://host:8545"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("chain_id = 0", "chain_id"),
        ("depth = 3", "chain_id"),
        ("chain_id = 7\nspeed = 9", "speed"),
        ("chain_id = 7\ntip_wei = 9\nmax_fee_cap_wei = 8", "tip_wei is more"),
        ("chain_id =", "Invalid value"),
    ],
)
def test_a_wrong_profile_names_its_field(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "chain.toml"
    path.write_text(text)
    with pytest.raises(HyperGPUError, match=said) as wrong:
        read_profile(path)
    assert wrong.value.reason is Reason.FILE_UNUSABLE


def test_a_described_chain_is_taken_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "chain.toml"
    path.write_text('chain_id = 7\nrpc_url = "https://rpc.example"\nblock_ms = 500\n')
    stated_chain = named_chain(str(path))
    assert stated_chain is not None
    assert (stated_chain.profile.chain_id, stated_chain.profile.block_ms) == (7, 500)


def test_a_wrong_setting_is_named_with_its_value(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "coordinator", "--data-dir", str(tmp_path), "--port", "0"]
    environment = {**os.environ, "HYPERGPU_COORDINATOR_METERING": "packed"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert "HYPERGPU_COORDINATOR_METERING=packed" in process.stderr
