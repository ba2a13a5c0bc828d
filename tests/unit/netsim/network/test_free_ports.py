"""Ports for proxies and what listens behind them."""

import socket
import subprocess
import sys
from pathlib import Path

from hypergpu.wire.ports import free_ports


def test_ports_are_distinct_free_and_not_the_kernels_to_give_away() -> None:
    ports = free_ports(4)
    assert len(set(ports)) == 4
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("ascii").split()[0])
    assert first <= 20_000 or max(ports) < first
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET, kind) as probe:
            probe.bind(("127.77.0.1", ports[0]))


def test_processes_that_ask_at_once_are_given_different_ports() -> None:
    program = "from hypergpu.wire.ports import free_ports; print(*free_ports(5))"
    command = [sys.executable, "-c", program]
    asking = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    ports = [int(port) for each in asking for port in each.communicate()[0].split()]
    assert len(set(ports)) == len(ports) == 20
    assert not set(free_ports(5)) & set(ports)
