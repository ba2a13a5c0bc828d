"""Runs inside a namespace: holds a route, tells what connections get, and takes it back."""

import contextlib
import json
import os
import socket
import sys

from gpu_node.shell.link.route import BbrRoute, RouteError, set_route
from hypergpu.wire.congestion import controls, way_to


def control_to(address: str) -> str:
    """What a connection to it gets, whoever answers."""
    with socket.socket() as plain_socket:
        plain_socket.setblocking(False)
        with contextlib.suppress(OSError):
            plain_socket.connect((address, 9))
        name = plain_socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.partition(b"\0")[0].decode()


def routes(address: str) -> list[str]:
    """Routes of this program, as `ip` shows them."""
    with os.popen(f"ip route show {address} proto 184") as output:  # noqa: S605
        return output.read().split("\n")[:-1]


def main() -> None:
    """Say as JSON what was before, meanwhile and afterwards."""
    address, other = sys.argv[1:3]
    if "unprivileged" in sys.argv:
        controls()  # what Python needs for it may not be readable to others
        os.setuid(65534)
        try:
            set_route(address)
        except RouteError as error:
            sys.stdout.write(json.dumps([error.reason, error.fix]))
        return
    if "measured" in sys.argv:
        before = way_to(address)
        assert before is not None
        device = f"{before.destination} dev {before.device} metric 9"
        os.system(f"ip route add {device} mtu 1280 initcwnd 20")  # noqa: S605
        way = set_route(address)
        (shown_route,) = routes(address)
        kept_words = [word for word in shown_route.split() if word in way.metrics]
        sys.stdout.write(json.dumps([way.metrics, kept_words]))
        return
    route, control_names = BbrRoute(), [control_to(address)]
    route.set_up(address, 9)
    route.set_up(address, 9)  # each dial looks anew
    control_names += [control_to(address), control_to(other)]
    count = len(routes(address))
    left_behind = BbrRoute()  # of a daemon that is killed now
    left_behind.set_up(address, 9)
    route.set_up(address, 9)
    route.close()
    control_names += [control_to(address)]
    sys.stdout.write(json.dumps([control_names, count, routes(address)]))


if __name__ == "__main__":
    main()
