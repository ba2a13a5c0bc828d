from pathlib import Path

import pytest

from benchmarks.house.tree import ROOT
from hypergpu.chain.profiles import chain_profile, profile_names
from hypergpu.chain.profiles.cautious import cautious_profile
from hypergpu.chain.profiles.described import described_profile
from hypergpu.chain.profiles.named import named_chain, profile_of
from hypergpu.errors import HyperGPUError, Reason

OF_THE_MANUAL = (ROOT / "docs/chains.md").read_text("utf-8").split("```toml\n")[-1].split("```")[0]
"""A whole profile."""


@pytest.mark.parametrize("name", profile_names())
def test_every_profile_holds_what_the_pipeline_needs(name: str) -> None:
    profile = chain_profile(name)
    assert profile.chain_id > 0
    assert profile.window_s >= 30
    assert profile.depth >= 0
    assert profile.in_flight_max > 0
    assert profile.tip_wei <= profile.max_fee_cap_wei
    assert profile.sources
    assert profile.is_local or profile.rpc_url.startswith("https://")


def test_chains_are_told_apart_by_their_ids() -> None:
    ids = [chain_profile(name).chain_id for name in profile_names()]
    assert len(set(ids)) == len(ids) >= 5


def test_an_unknown_chain_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(HyperGPUError, match="there is no chain 'mars'; known by name are anvil"):
        chain_profile("mars")


@pytest.mark.parametrize("name", profile_names())
def test_a_profile_is_found_by_its_chains_id(name: str) -> None:
    profile = chain_profile(name)
    assert profile_of(profile.chain_id) == (profile, "")


def test_of_a_chain_without_a_profile_the_worst_is_assumed_and_said() -> None:
    profile, warning = profile_of(4242)
    assert profile == cautious_profile(4242)
    assert not profile.is_local
    known = [chain_profile(name) for name in profile_names()]
    public = [each for each in known if not each.is_local]
    assert profile.depth > max(each.depth for each in known)
    assert profile.window_s > max(each.window_s for each in known)
    assert profile.in_flight_max <= min(each.in_flight_max for each in public)
    assert profile.gas_percent >= max(each.gas_percent for each in known)
    assert profile.transaction_gas_max <= min(each.transaction_gas_max for each in known)
    assert warning.startswith("chain 4242 has no profile; assumed: block_ms = 12000, depth = 64, ")
    assert "tip_wei = 100000000, max_fee_cap_wei = 500000000000, " in warning
    assert "HYPERGPU_CHAIN=./FILE.toml" in warning


def nobody(url: str) -> int:
    raise AssertionError(f"{url} is asked for nothing")


def test_a_chain_is_described_in_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OF_THE_MANUAL, "utf-8")
    found = named_chain(str(path), "https://rpc.example.org/v3/key", nobody)
    assert found.profile == described_profile(path)
    assert found.url == "https://rpc.example.org/v3/key"
    assert found.warning == ""
    assert named_chain(str(path), "", nobody).url == found.profile.rpc_url != ""


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("depth = 32", 'depth = "32"', "depth: expected `int`, got `str`"),
        ("depth = 32", "depth = -1", "depth: expected `int` >= 0"),
        ("depth = 32", "", "it lacks depth"),
        ("depth = 32", "dept = 32", "it has no use for dept; it lacks depth"),
        ("window_s = 3600", "window_s = 29", "window_s: expected `int` >= 30"),
        ("tip_wei = ", "tip_wei = 999999", "is more than max_fee_cap_wei"),
        ("depth = 32", "depth 32", "it is no TOML: Expected '=' after a key"),
    ],
)
def test_what_is_wrong_in_a_profile_is_said(
    tmp_path: Path, before: str, after: str, told: str
) -> None:
    assert before in OF_THE_MANUAL
    path = tmp_path / "mine.toml"
    path.write_text(OF_THE_MANUAL.replace(before, after), "utf-8")
    with pytest.raises(HyperGPUError) as refused:
        described_profile(path)
    assert refused.value.reason is Reason.FILE_UNUSABLE
    assert refused.value.detail.startswith(f"the chain profile {path}: ")
    assert told in refused.value.detail


def test_a_profile_that_is_not_there_is_said(tmp_path: Path) -> None:
    path = tmp_path / "none.toml"
    with pytest.raises(HyperGPUError, match="it cannot be read: No such file or directory"):
        named_chain(str(path), "", nobody)


def test_a_profile_without_an_rpc_asks_for_one_by_the_settings_of_up(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OF_THE_MANUAL.replace("rpc_url", "# rpc_url"), "utf-8")
    with pytest.raises(HyperGPUError, match="has no RPC of its own") as refused:
        named_chain(str(path), "", nobody)
    assert "HYPERGPU_COORDINATOR_CHAIN_URL=URL" in refused.value.fix


def test_an_rpc_that_is_named_beside_an_address_is_asked_instead_of_it() -> None:
    asked: list[str] = []

    def of_mine(url: str) -> int:
        asked.append(url)
        return 77

    found = named_chain("http://127.0.0.1:1", "http://127.0.0.1:2", of_mine)
    assert (asked, found.url) == (["http://127.0.0.1:2"], "http://127.0.0.1:2")


def test_an_address_of_another_protocol_is_refused_and_not_repeated() -> None:
    with pytest.raises(HyperGPUError, match="begins with http:// or https://") as refused:
        named_chain("wss://rpc.example.org/v3/SECRET", "", nobody)
    assert "SECRET" not in str(refused.value)
