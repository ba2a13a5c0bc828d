"""The plan of a tc network: its commands, its parts of the kernel, its numbers."""

from pathlib import Path

import pytest

from hypergpu.units import Microseconds
from netsim.emulation.namespaces import COORDINATOR, NamespaceHost, host_address
from netsim.link import COORDINATOR_LINK, UNLIMITED, CongestionControl, Link, LinkDirection
from netsim.tc.network import missing_part
from netsim.tc.plan import (
    FRAME_BYTES,
    HOSTS_MAX,
    KernelPart,
    QueuePort,
    change_steps,
    needs,
    queues,
    steps,
)

GOLDEN = Path(__file__).parents[2] / "vectors/netsim/tc_plan.txt"
ROUTER = "netsim-0.router"
NO_NETEM = [KernelPart("netem", "Specified qdisc kind is unknown")]


def way(delay_ms: float = 0, mbit_s: float = 0, **others: float) -> LinkDirection:
    return LinkDirection(
        delay_us=Microseconds(round(delay_ms * 1000)),
        bits_per_s=round(mbit_s * 1_000_000),
        **others,  # type: ignore[arg-type]
    )


RATE_ONLY = Link(up=way(mbit_s=5), down=way(mbit_s=20))
FAR = Link(
    up=way(50, 5, loss=0.01, burst_packets=4),
    down=way(50, 20, jitter_us=3000),
    congestion_control=CongestionControl.BBR,
)


def ports(**links: Link) -> tuple[QueuePort, ...]:
    hosts = {COORDINATOR: COORDINATOR_LINK, **links}
    return tuple(
        QueuePort(NamespaceHost(name, host_address(n), f"netsim-0-{name}"), link, n)
        for n, (name, link) in enumerate(hosts.items(), start=1)
    )


def test_the_commands_of_a_small_world_are_the_committed_ones() -> None:
    planned = steps(ROUTER, ports(near=RATE_ONLY, far=FAR))
    text = "".join(f"{' '.join(program)} {line}\n" for program, lines in planned for line in lines)
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_every_host_has_its_own_addresses_and_short_names_of_devices() -> None:
    many = ports(**{f"node-{i}": UNLIMITED for i in range(600)})
    assert len({port.host.address for port in many}) == 601
    assert max(len(port.outside) for port in many) < 16
    assert host_address(HOSTS_MAX) == "10.77.253.232"


@pytest.mark.parametrize(
    ("before", "after", "verbs"),
    [
        (RATE_ONLY, RATE_ONLY, []),
        (RATE_ONLY, Link(up=way(mbit_s=1), down=way(mbit_s=2)), ["change", "change"]),
        (RATE_ONLY, UNLIMITED, ["delete", "delete"]),
        (UNLIMITED, RATE_ONLY, ["add", "add", "add"]),
    ],
)
def test_a_change_keeps_queues_of_the_same_kinds(
    before: Link, after: Link, verbs: list[str]
) -> None:
    old, new = ports(a=before)[1], ports(a=after)[1]
    lines = [line for _, lines in change_steps(ROUTER, old, new) for line in lines]
    assert [line.split()[1] for line in lines if line.startswith("qdisc")] == verbs


@pytest.mark.parametrize(
    ("link", "parts"),
    [
        (UNLIMITED, {"cubic"}),
        (RATE_ONLY, {"tbf", "ingress", "cubic"}),
        (FAR, {"netem", "tbf", "ingress", "bbr"}),
    ],
)
def test_a_link_needs_only_the_parts_that_it_uses(link: Link, parts: set[str]) -> None:
    assert {need.part for need in needs({"a": link})} == parts


def test_a_missing_part_is_named_with_who_needs_it_and_why() -> None:
    assert missing_part(needs({"a": FAR}), NO_NETEM) == (
        "a has a delay of 50 ms up (and 3 more), and this kernel lacks netem:"
        " Specified qdisc kind is unknown"
    )
    assert missing_part(needs({"a": RATE_ONLY}), NO_NETEM) == ""
    assert "a's hosts use bbr" in missing_part(needs({"a": FAR}), [KernelPart("bbr", "unknown")])


def test_a_bucket_counts_frames_and_holds_two_at_least() -> None:
    assert queues(way(mbit_s=15)) == ("tbf rate 15140000bit burst 3028 limit 189250",)
    (slowest,) = queues(way(mbit_s=0.01))
    assert slowest.endswith(f"burst {2 * FRAME_BYTES} limit {2 * FRAME_BYTES}")


@pytest.mark.parametrize("delay_ms", [1, 50, 300])
def test_netem_never_drops_for_want_of_room(delay_ms: int) -> None:
    (netem,) = queues(way(delay_ms))
    under_way = delay_ms * 10_000_000_000 // (8000 * FRAME_BYTES)
    assert int(netem.split()[2]) > under_way


def test_netem_gets_the_chain_of_bursts_and_keeps_the_order_under_jitter() -> None:
    assert queues(way()) == ()
    (lossy,) = queues(way(50, loss=0.02, burst_packets=4))
    assert lossy.endswith("loss gemodel 0.510204% 25% 100% 0%")
    (jittery,) = queues(way(50, jitter_us=5000, duplication=0.1, reordering=0.2))
    assert jittery.endswith(
        "delay 50000us 5000us distribution normal duplicate 10% reorder 20% rate 10000000000bit"
    )
