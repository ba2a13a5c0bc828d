import pytest

from hypergpu.chain.profiles import chain_profile, profile_names, profile_of
from hypergpu.refusal import Reason, RefusalError


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
    with pytest.raises(RefusalError, match="there is no chain 'mars'; there are none, anvil"):
        chain_profile("mars")


@pytest.mark.parametrize("name", profile_names())
def test_a_profile_is_found_by_its_chains_id(name: str) -> None:
    profile = chain_profile(name)
    assert profile_of(profile.chain_id, where="here") == profile


def test_a_chain_without_a_profile_is_refused_with_those_that_have_one() -> None:
    with pytest.raises(
        RefusalError, match=r"the RPC at here is of chain 1, .* anvil \(31337\), "
    ) as no:
        profile_of(1, where="here")
    assert no.value.reason is Reason.CHAIN_WRONG
