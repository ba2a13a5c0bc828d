"""How nodes reach the coordinator of `hypergpu up --via`: by ports of a rented machine."""

import contextlib
from typing import NamedTuple

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.user.cluster.cluster import Listen, ReadyLine
from hypergpu.user.cluster.ssh import SshDestination, parse_destination
from hypergpu.user.cluster.via import ForwardedPorts, Via, ssh_hostname
from hypergpu.user.terminal.output import note
from hypergpu.wire.credentials import split_address

_LOOPBACK = "127.0.0.1"
_WILDCARDS = {"0.0.0.0": _LOOPBACK, "::": "::1"}  # noqa: S104 - what they are dialled by here


class RentedHost(NamedTuple):
    """The machine whose ports lead here."""

    destination: SshDestination
    host: str
    """What nodes dial, and what the coordinator's certificate names."""


def rented_host(text: str) -> RentedHost | None:
    """The machine that ``--via`` names; None: it names none.

    Raises:
        HyperGPUError: It is no machine, or there is no ssh here.
    """
    if not text:
        return None
    destination = parse_destination(text)
    return RentedHost(destination, ssh_hostname(destination))


def listen_behind(at: Listen, rented: RentedHost | None) -> Listen:
    """Where the coordinator listens: on loopback, unless it was told; and it names that machine.

    Raises:
        HyperGPUError: ADDRESS_UNUSABLE, it would listen without TLS.
    """
    if rented is None:
        return at
    if at.is_plaintext:
        fix = "leave out --plaintext"
        detail = "--via would carry what is not encrypted over the internet"
        raise HyperGPUError(Reason.ADDRESS_UNUSABLE, detail, fix=fix)
    return msgspec.structs.replace(
        at, listen=at.listen or _LOOPBACK, advertise=(rented.host, *at.advertise)
    )


def open_via(
    rented: RentedHost | None, ready: ReadyLine, at: Listen, beside: contextlib.ExitStack
) -> list[str]:
    """Have that machine's ports lead to the coordinator until ``beside`` ends; returns what to say.

    Raises:
        HyperGPUError: FORWARDING_FAILED, with the fix.
    """
    if rented is None:
        return []
    ports = (split_address(ready.address)[1], ready.node_port, ready.bulk_port)
    way = ForwardedPorts(
        rented.destination,
        rented.host,
        _WILDCARDS.get(at.listen, at.listen).strip("[]"),
        tuple(port for port in ports if port),
    )
    beside.enter_context(Via(way, at.data_dir, note))
    port_list = ", ".join(str(port) for port in way.ports)
    return [f"nodes come through {rented.host}, whose ports {port_list} lead here by ssh"]
