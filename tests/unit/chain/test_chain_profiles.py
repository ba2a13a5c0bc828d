import pytest

from hypergpu.chain.profiles import chain_profile, profile_names
from hypergpu.refusal import RefusalError


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
