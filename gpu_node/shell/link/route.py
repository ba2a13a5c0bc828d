"""A congestion control for the route to the coordinator, and for nothing else of this machine.

Where the user asked for it and the process may. The route is marked as this program's: other routes
are never changed, and the route that a killed daemon left behind is removed by the next one.
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


class RouteError(Exception):
    """The route cannot get BBR."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(f"{reason}: {fix}")
        self.reason = reason
        self.fix = fix


class BbrRoute:
    """Routes with BBR to each address of one host. Every method blocks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._routes: list[RouteSettings] = []
        self._warned = ""
        self._is_closed = False

    def set_up(self, host: str, port: int) -> None:
        """Set the routes before a dial: the way may be another by now. Warns once of an error."""
        with self._lock:
            self._remove()
            if self._is_closed:
                return
            errors: list[RouteError] = []
            try:
                for address in _addresses(host, port):
                    try:
                        self._routes.append(set_route(address))
                    except RouteError as error:
                        errors.append(error)
            except RouteError as error:
                errors.append(error)
            if errors and not self._routes:
                self._warn(errors[0])

    def close(self) -> None:
        """Remove the routes, for good."""
        with self._lock:
            self._is_closed = True
            self._remove()

    def _remove(self) -> None:
        while self._routes:
            route = self._routes.pop()
            try:
                _delete(route.address)
            except OSError as error:
                log.warning("a route was left behind", route=route.destination, reason=str(error))

    def _warn(self, error: RouteError) -> None:
        if str(error) != self._warned:
            self._warned = str(error)
            log.warning("the route does not get bbr", reason=error.reason, fix=error.fix)


def set_route(address: str) -> RouteSettings:
    """Give the route to an address BBR; returns the route.

    Raises:
        RouteError: With a fix. Nothing was changed then.
    """
    try:
        _delete(address)
        way = way_to(address)
        if way is None:
            raise RouteError(f"there is no route to {address}", "connect this machine")
        if way.is_local or way.congestion_control == BBR:
            return way
        if way.is_foreign:
            raise RouteError("its next hop is of the other address family", f"for all: {FOR_ALL}")
        process = ip(address, "add", *way.route(BBR), "proto", PROTOCOL)
        if process.returncode:
            raise route_error(process.stderr.strip(), way, controls())
        now = way_to(address)
        if now is None or now.congestion_control != BBR:
            _delete(address)
            fix = f"see ip rule; or for all connections: {FOR_ALL}"
            raise RouteError("another table's route goes before it", fix)
    except OSError as error:
        fix = "install iproute2; it is there on Linux only"
        raise RouteError(f"ip cannot be run: {error}", fix) from error
    return way


def route_error(complaint: str, way: RouteSettings, found: Controls) -> RouteError:
    """The error for a complaint of `ip route add`, with a fix."""
    command = f"ip route add {' '.join(way.route(BBR))}"
    if _FORBIDDEN in complaint:
        fix = f"start the node with CAP_NET_ADMIN, or once as root: {command}"
        return RouteError("this process may not set routes", fix)
    if BBR not in found.available:
        fix = f"as root: {found.loading}" if found.loading else WITHOUT
        return RouteError(f"the kernel has {' '.join(found.available) or 'none'} only", fix)
    return RouteError(complaint or "ip route add failed", f"try it as root: {command}")


def _delete(address: str) -> None:
    """Remove the route that this program set, if there is one."""
    ip(address, "del", address, "proto", PROTOCOL)


def _addresses(host: str, port: int) -> list[str]:
    """The addresses of a host.

    Raises:
        RouteError: The host's name is not known.
    """
    try:
        address_infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RouteError(f"{host} is not known: {error}", "see whether it resolves") from error
    return list(dict.fromkeys(str(each[4][0]) for each in address_infos))
