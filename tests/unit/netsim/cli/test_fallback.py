import pytest

from netsim.cli.asked import links_of_profiles
from netsim.error import NetsimError
from netsim.network.ground.backend import Backend
from netsim.network.ground.choosing import Chosen, chosen
from netsim.tc.choice import Fallback


@pytest.mark.parametrize("backend", [Backend.PROXY, Backend.TUNNEL])
def test_only_the_kernels_queues_have_a_fallback(backend: Backend) -> None:
    asked = links_of_profiles(["home-dsl"], 0)
    assert chosen(backend, asked, Fallback.REFUSE) == Chosen(backend)
    with pytest.raises(NetsimError, match=f"{backend} has no fallback"):
        chosen(backend, asked, Fallback.TUNNEL)
