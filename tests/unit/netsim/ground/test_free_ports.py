"""Ports for proxies and what listens behind them."""

import socket
from pathlib import Path

from netsim.ground.proxied import free_ports


def test_ports_are_distinct_free_and_not_the_kernels_to_give_away() -> None:
    ports = free_ports(4)
    assert len(set(ports)) == 4
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("ascii").split()[0])
    assert first <= 20_000 or max(ports) < first
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET, kind) as probe:
            probe.bind(("127.77.0.1", ports[0]))
