"""A congestion control for the route to the coordinator, and for nothing else of this machine.

Where the user asked for it and the process may. The route is marked as this program's: what was
there before is never changed, and what a killed daemon left behind is taken away by the next one.
"""

import socket
import threading

import structlog

from hypergpu.wire.congestion import (
    BBR,
    FOR_ALL,
    WITHOUT,
    Controls,
    RouteSettings,
    controls,
    ip,
    way_to,
)

log = structlog.get_logger()

PROTOCOL = "184"
"""Marks routes of this program, as others mark theirs; see rtnetlink(7) and `ip route help`."""
_FORBIDDEN = "Operation not permitted"


class NotSetError(Exception):
    """The route cannot have it."""

    def __init__(self, why: str, fix: str) -> None:
        super().__init__(f"{why}: {fix}")
        self.why = why
        self.fix = fix


class Route:
    """Routes with BBR to each address of one host. Every method blocks."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._held: list[RouteSettings] = []
        self._said = ""
        self._is_closed = False

    def hold(self, host: str, port: int) -> None:
        """Before each dial, since the way may be another by now. What hinders it is said once."""
        with self._turn:
            self._release()
            if self._is_closed:
                return
            try:
                addresses = _addresses(host, port)
            except NotSetError as unknown:
                self._say(unknown)
                return
            hindrances = [why for address in addresses if (why := self._hold_one_more(address))]
            if hindrances and not self._held:
                self._say(hindrances[0])

    def close(self) -> None:
        """Take back what was set, for good."""
        with self._turn:
            self._is_closed = True
            self._release()

    def _hold_one_more(self, address: str) -> NotSetError | None:
        """Hold one more; what keeps it from that, if anything does."""
        try:
            self._held.append(hold_route(address))
        except NotSetError as hindered:
            return hindered
        return None

    def _release(self) -> None:
        while self._held:
            way = self._held.pop()
            try:
                _forget(way.address)
            except OSError as broken:
                log.warning("a route was left behind", route=way.destination, reason=str(broken))

    def _say(self, hindered: NotSetError) -> None:
        if str(hindered) != self._said:
            self._said = str(hindered)
            log.warning("the route does not get bbr", reason=hindered.why, fix=hindered.fix)


def hold_route(address: str) -> RouteSettings:
    """Give the route to an address BBR; gives the way it takes.

    Raises:
        NotSetError: With what would help. Nothing was changed then.
    """
    try:
        _forget(address)
        way = way_to(address)
        if way is None:
            raise NotSetError(f"there is no route to {address}", "connect this machine")
        if way.is_local or way.congestion_control == BBR:
            return way
        if way.is_foreign:
            raise NotSetError("its next hop is of the other address family", f"for all: {FOR_ALL}")
        told = ip(address, "add", *way.route(BBR), "proto", PROTOCOL)
        if told.returncode:
            raise hindrance(told.stderr.strip(), way, controls())
        now = way_to(address)
        if now is None or now.congestion_control != BBR:
            _forget(address)
            fix = f"see ip rule; or for all connections: {FOR_ALL}"
            raise NotSetError("another table's route goes before it", fix)
    except OSError as broken:
        fix = "install iproute2; it is there on Linux only"
        raise NotSetError(f"ip cannot be run: {broken}", fix) from broken
    return way


def hindrance(complaint: str, way: RouteSettings, found: Controls) -> NotSetError:
    """What `ip route add` complained of, and what helps."""
    command = f"ip route add {' '.join(way.route(BBR))}"
    if _FORBIDDEN in complaint:
        fix = f"start the node with CAP_NET_ADMIN, or once as root: {command}"
        return NotSetError("this process may not set routes", fix)
    if BBR not in found.available:
        fix = f"as root: {found.loading}" if found.loading else WITHOUT
        return NotSetError(f"the kernel has {' '.join(found.available) or 'none'} only", fix)
    return NotSetError(complaint or "ip route add failed", f"try it as root: {command}")


def _forget(address: str) -> None:
    """Remove the route that this program set, if there is one."""
    ip(address, "del", address, "proto", PROTOCOL)


def _addresses(host: str, port: int) -> list[str]:
    """All of a host's.

    Raises:
        NotSetError: Its name is not known.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as broken:
        raise NotSetError(f"{host} is not known: {broken}", "see whether it resolves") from broken
    return list(dict.fromkeys(str(each[4][0]) for each in found))
