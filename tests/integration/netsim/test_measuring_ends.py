"""The measuring ends as programs: what a receiver takes for its own measurement."""

import socket
import subprocess
import sys
import time

import msgspec

from hypergpu.wire.ports import free_ports
from netsim.measure.arrivals import Arrivals
from netsim.measure.ends import END, HEADER, OFFERED

HOST = "127.0.0.1"
WITHIN_S = 240


def test_datagrams_of_an_earlier_measurement_do_not_end_this_one() -> None:
    (port,) = free_ports(1)
    before_ns = time.monotonic_ns()
    given = msgspec.json.encode({"address": HOST, "port": port}).decode()
    command = [sys.executable, "-m", "netsim.measure", "collect", given]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == b"ready\n"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sending:
            sending.connect((HOST, port))
            sending.send(HEADER.pack(7, before_ns))
            sending.send(HEADER.pack(END, before_ns) + OFFERED.pack(8))
            for number in range(3):
                sending.send(HEADER.pack(number, time.monotonic_ns()))
            sending.send(HEADER.pack(END, time.monotonic_ns()) + OFFERED.pack(4))
        out, _ = receiver.communicate(timeout=WITHIN_S)
    found = msgspec.json.decode(out, type=Arrivals)
    assert found.offered == 4
    assert found.numbers == [0, 1, 2]
