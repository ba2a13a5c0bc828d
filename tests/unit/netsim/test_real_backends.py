"""What real backends rest on: plans of tc networks, free ports, lateness, statistics."""

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hypergpu.units import Microseconds
from hypergpu.wire.free_ports import free_ports
from netsim.emulation.namespaces import COORDINATOR, NamespaceHost, host_address
from netsim.link import (
    COORDINATOR_LINK,
    UNLIMITED,
    CongestionControl,
    Link,
    LinkDirection,
    NatKind,
    NetsimError,
    Shape,
)
from netsim.measure.ends import Arrivals, mean_run, percentile
from netsim.measure.lateness import (
    BUCKETS,
    Lateness,
    LatenessCounter,
    allowed_us,
    bucket,
    bucket_end_us,
)
from netsim.measure.probe import probe_readings, rate_reading
from netsim.network.backends import Links, choose_backend
from netsim.network.options import Backend, Fallback
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
from netsim.tc.traffic_control import missing_part

BEHIND_NAT = Links(nodes={"attic": Shape(link=UNLIMITED, nat=NatKind.SYMMETRIC)})
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
    planned_steps = steps(ROUTER, ports(near=RATE_ONLY, far=FAR))
    text = "".join(
        f"{' '.join(program)} {line}\n" for program, lines in planned_steps for line in lines
    )
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


def test_ports_are_distinct_free_and_not_the_kernels_to_give_away() -> None:
    ports = free_ports(4)
    assert len(set(ports)) == 4
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("ascii").split()[0])
    assert first <= 20_000 or max(ports) < first
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET, kind) as probe:
            probe.bind(("127.77.0.1", ports[0]))


def test_processes_that_ask_at_once_are_given_different_ports() -> None:
    program = "from hypergpu.wire.free_ports import free_ports; print(*free_ports(5))"
    command = [sys.executable, "-c", program]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    ports = [int(port) for each in children for port in each.communicate()[0].split()]
    assert len(set(ports)) == len(ports) == 20
    assert not set(free_ports(5)) & set(ports)


def reading_of(late_us: list[int], limit_us: int = 1000) -> Lateness:
    counter = LatenessCounter()
    for each in late_us:
        counter.add(each, limit_us)
    return counter.reading()


@pytest.mark.parametrize(("delay_us", "allowed"), [(0, 1000), (50_000, 1000), (150_000, 3000)])
def test_a_packet_may_be_late_by_a_millisecond_or_two_percent(delay_us: int, allowed: int) -> None:
    assert allowed_us(delay_us) == allowed


def test_a_run_is_invalid_when_more_than_one_packet_in_a_hundred_is_too_late() -> None:
    assert reading_of([10] * 99 + [1001]).is_valid
    assert not reading_of([10] * 98 + [1001] * 2).is_valid
    assert reading_of([10] * 98 + [1001] * 2).verdict().sentence.startswith("INVALID: ")


def test_a_percentile_is_at_most_an_eighth_too_high_and_never_too_low() -> None:
    for late_us in [*range(5000), 123_456, 10**9]:
        assert late_us <= bucket_end_us(bucket(late_us)) <= late_us * 1.125
        assert bucket(late_us) < BUCKETS


def test_the_percentile_of_many_is_the_one_of_the_sorted_list() -> None:
    assert reading_of(list(range(1, 101)), 1000).percentile_us(0.5) == pytest.approx(50, rel=0.125)
    assert reading_of([5] * 99 + [700]).percentile_us(0.99) == 5


def test_a_reading_since_an_earlier_one_holds_only_what_came_after() -> None:
    counter = LatenessCounter()
    counter.add(5000, 1000)
    earlier = counter.reading()
    counter.add(7, 1000)
    added_lateness = counter.reading().since(earlier)
    assert added_lateness == Lateness(packets=1, late_packets=0, total_us=7, buckets={7: 1})
    assert added_lateness.is_valid


def test_nothing_carried_is_valid() -> None:
    assert Lateness().verdict().sentence.startswith("VALID: ")


MS_NS = 10**6


def arrivals(numbers: Sequence[int], offered: int, *, delay_ms: float = 5) -> Arrivals:
    return Arrivals(
        offered=offered,
        payload_bytes=97,
        numbers=numbers,
        sent_ns=[number * MS_NS for number in numbers],
        received_ns=[round((place + delay_ms) * MS_NS) for place in range(len(numbers))],
    )


def test_loss_counts_every_probe_that_never_came_once() -> None:
    assert arrivals([0, 1, 1, 3], 5).loss() == pytest.approx(0.4)


def test_bursts_are_neighbours_that_were_lost_together() -> None:
    assert mean_run({0, 3, 5}, 8) == pytest.approx((2 + 1 + 2) / 3)
    assert mean_run({0, 1}, 2) == 0


def test_the_rate_counts_headers_and_the_time_between_first_and_last() -> None:
    assert arrivals(range(11), 11).bits_per_s() == pytest.approx(1_000_000)


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0


def test_readings_put_what_was_asked_beside_what_was_measured() -> None:
    asked_direction = LinkDirection(delay_us=Microseconds(5000), bits_per_s=1_000_000, loss=0.1)
    readings_by_name = {
        each.name: each for each in probe_readings("up", asked_direction, arrivals([0, 1, 2, 3], 5))
    }
    assert readings_by_name["up_loss_percent"].error == pytest.approx(10)
    assert readings_by_name["up_delay_ms"].configured == pytest.approx(5.736)
    assert readings_by_name["up_burst_packets"].measured == 1


def test_the_rate_of_a_bottleneck_is_taken_while_probes_wait_there() -> None:
    """Each millisecond one leaves; twenty came at once, the sender slept, then twenty more."""
    flood = Arrivals(
        offered=40,
        payload_bytes=97,
        numbers=range(40),
        sent_ns=[0] * 20 + [100 * MS_NS] * 20,
        received_ns=[at * MS_NS for at in (*range(1, 21), *range(101, 121))],
    )
    asked_direction = LinkDirection(delay_us=Microseconds(0), bits_per_s=1_000_000)
    assert rate_reading("up", asked_direction, flood).ratio == pytest.approx(0)
    assert flood.bits_per_s() < 400_000


def test_the_proxy_is_refused_for_nodes_behind_a_nat_before_anything_starts() -> None:
    with pytest.raises(NetsimError, match="attic stands behind a NAT") as failure:
        choose_backend(Backend.PROXY, BEHIND_NAT, Fallback.REFUSE)
    assert "use the tunnel" in failure.value.fix
    choice = choose_backend(Backend.TUNNEL, BEHIND_NAT, Fallback.REFUSE)
    assert choice == (Backend.TUNNEL, "")
