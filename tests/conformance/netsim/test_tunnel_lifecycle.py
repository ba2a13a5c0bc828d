import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hypergpu.units import Microseconds
from netsim.emulation import namespaces
from netsim.link import CongestionControl, Link, LinkDirection, NetsimError
from netsim.measure.probe import ProbedLink
from netsim.tunnel.tunnel import Tunnel

pytestmark = pytest.mark.needs("tunnel")

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 240
OURS = f"test{os.getpid()}"


def link(delay_ms: int = 1, control: CongestionControl = CongestionControl.CUBIC) -> Link:
    way = LinkDirection(delay_us=Microseconds(delay_ms * 1000), bits_per_s=0)
    return Link(up=way, down=way, congestion_control=control)


def present() -> set[str]:
    """The namespaces of these tests; others may run beside them."""
    return {each.name for each in namespaces.FOLDER.glob(f"*-{OURS}")}


async def arrives(network: ProbedLink) -> float:
    probes = await network.probes("up", count=20, gap_us=Microseconds(1000))
    return 1 - probes.loss()


async def test_every_packet_is_accounted_for() -> None:
    lossy = LinkDirection(delay_us=Microseconds(1000), bits_per_s=20_000_000, loss=0.1)
    async with Tunnel({"a": Link(up=lossy, down=lossy)}, link(0)) as tunnel:
        probes = await tunnel.probe("a").probes("up", count=3000, gap_us=Microseconds(300))
        up = (await tunnel.statistics()).ports["a"].up
    assert up.offered == up.lost + up.overflowed + up.delivered
    assert up.lost > 0
    # The datagrams that end the measurement may be among those that the router lost.
    assert 0 <= up.lost + up.overflowed - (3000 - len(probes.numbers)) <= 20


async def test_a_link_that_is_set_changes_under_way() -> None:
    async with Tunnel({"a": link(1)}, link(0)) as tunnel:
        probed_link = tunnel.probe("a")
        await tunnel.set_link("a", link(80))
        slow = await probed_link.probes("up", count=20, gap_us=Microseconds(1000))
    assert min(slow.delays_ms()) >= 80


async def test_two_runs_at_once_keep_out_of_each_other() -> None:
    async with Tunnel({"a": link()}, link()) as one, Tunnel({"a": link()}, link()) as other:
        assert one.host("a").namespace != other.host("a").namespace
        assert await arrives(one.probe("a")) == 1
        assert await arrives(other.probe("a")) == 1


async def test_a_router_that_is_gone_is_told_and_nothing_is_left() -> None:
    async with Tunnel({OURS: link()}, link()) as tunnel:
        os.kill(tunnel.router_pid, signal.SIGKILL)
        with pytest.raises(NetsimError, match="router is gone"):
            await tunnel.statistics()
    assert present() == set()


def test_without_root_the_tunnel_is_refused_before_anything_is_made() -> None:
    program = (
        "import os\n"
        "from netsim.link import NetsimError\n"
        "from netsim.tunnel.tunnel import require_tunnel\n"
        "os.setuid(65534)\n"
        "try:\n    require_tunnel()\nexcept NetsimError as error:\n    print(error)\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "needs root" in child.stdout
    assert "use sudo" in child.stdout
