from pathlib import Path

import pytest

from netsim.error import NetsimError
from netsim.link.link import CongestionControl, Link
from netsim.tc.choice import Fallback, Lack, Network, choose
from netsim.tc.commands import commands
from netsim.tc.plan import MOST_HOSTS, Need, address, hardware, needs, plan, remarks
from tests.unit.netsim.tc.worlds import FAR, MIDDLE, PERFECT, RATE_ONLY, SMALL

GOLDEN = Path(__file__).parents[3] / "vectors/netsim/tc_plan.txt"
NO_NETEM = (Lack(part="netem", why="it does not know this kind"),)


def small_text() -> str:
    return "\n".join([*commands(plan(SMALL, MIDDLE, prefix="netsim-0")), ""])


def test_the_plan_of_a_small_world_is_the_committed_one() -> None:
    assert small_text() == GOLDEN.read_text(encoding="utf-8")


def test_every_namespace_of_the_plan_is_among_those_to_remove() -> None:
    planned = plan(SMALL, MIDDLE, prefix="netsim-0")
    made = [line.split()[-1] for line in commands(planned) if " netns add " in line]
    assert tuple(made) == planned.namespaces


def test_no_host_is_called_like_the_router() -> None:
    planned = plan({"router": PERFECT}, MIDDLE, prefix="netsim-0")
    assert len(set(planned.namespaces)) == 3


def test_every_host_has_its_own_addresses_and_short_names_of_devices() -> None:
    planned = plan({f"node-{i}": PERFECT for i in range(600)}, MIDDLE, prefix="netsim-0")
    assert len({port.address for port in planned.ports}) == 601
    assert len({port.hardware for port in planned.ports}) == 601
    assert max(len(port.outside) for port in planned.ports) < 16


def test_the_last_host_has_a_whole_address() -> None:
    assert address(MOST_HOSTS) == "10.77.253.232"
    assert hardware(MOST_HOSTS) == "02:00:00:00:fd:e8"


def test_the_coordinator_answers_each_node_with_the_nodes_congestion_control() -> None:
    coordinator = plan(SMALL, MIDDLE, prefix="netsim-0").ports[0]
    own, to_far = coordinator.routes
    assert own.congestion_control is CongestionControl.CUBIC
    assert to_far.destination == "10.77.0.3/32"
    assert to_far.congestion_control is CongestionControl.BBR


def test_a_perfect_link_needs_its_congestion_control_alone() -> None:
    assert [need.part for need in needs({"a": PERFECT})] == ["cubic"]


def test_a_rate_needs_buckets_and_a_way_around_the_senders_queue() -> None:
    assert {need.part for need in needs({"a": RATE_ONLY})} == {"tbf", "ingress", "cubic"}


def test_remarks_name_the_host_and_the_way() -> None:
    up, down = remarks({"far": FAR})
    assert up.startswith("far, up: netem's bursts")
    assert down.startswith("far, down: netem draws the jitter")


def test_a_kernel_with_everything_gets_tc() -> None:
    choice = choose(needs({"a": FAR}), (), Fallback.REFUSE)
    assert choice.network is Network.TC


def test_a_lack_that_nobody_needs_changes_nothing() -> None:
    choice = choose(needs({"a": RATE_ONLY}), NO_NETEM, Fallback.REFUSE)
    assert choice.network is Network.TC


def test_a_lack_is_refused_with_who_needs_it_and_why() -> None:
    with pytest.raises(NetsimError) as refused:
        choose(needs({"a": FAR}), NO_NETEM, Fallback.REFUSE)
    assert refused.value.detail == (
        "a has a delay of 50 ms on its way up (and 3 more), and this kernel lacks netem:"
        " it does not know this kind"
    )
    assert "fallback to the tunnel" in refused.value.fix


def test_the_tunnel_stands_in_only_when_asked_and_says_why() -> None:
    choice = choose(needs({"a": FAR}), NO_NETEM, Fallback.TUNNEL)
    assert choice.network is Network.TUNNEL
    assert "lacks netem" in choice.reason


def test_a_congestion_control_that_is_missing_is_a_lack_like_others() -> None:
    link = Link(up=RATE_ONLY.up, down=RATE_ONLY.down, congestion_control=CongestionControl.BBR)
    lack = Lack(part="bbr", why="No such file or directory")
    with pytest.raises(NetsimError, match="a's hosts use bbr, and this kernel lacks bbr"):
        choose(needs({"a": link}), [lack], Fallback.REFUSE)


def test_a_need_says_its_part() -> None:
    first = next(needs({"a": FAR}))
    assert first == Need(part="netem", why="a has a delay of 50 ms on its way up")
