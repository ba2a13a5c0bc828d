"""Congestion control for `doctor`: what each direction's sender gets here, and what would help."""

import socket
from pathlib import Path

import msgspec

from hypergpu.cli.machine.checks import OK, WARN, Check
from hypergpu.errors import HyperGPUError
from hypergpu.wire.authority import split_address
from hypergpu.wire.congestion import BBR, FOR_ALL, WITHOUT, Controls, Way, way_to

NODE_OPTION = f"start the node as root with --congestion-control {BBR}"


class _Joined(msgspec.Struct):
    """What is looked at of the file in which a node keeps whom it joined."""

    address: str


def joined_host(state_dir: Path) -> str:
    """The coordinator's, of the node on this machine; empty when none has joined."""
    try:
        kept = (state_dir / "coordinator.json").read_bytes()
        return split_address(msgspec.json.decode(kept, type=_Joined).address)[0]
    except (OSError, msgspec.MsgspecError, UnicodeError, HyperGPUError):
        return ""


def way_of(host: str) -> Way | None:
    """How packets get to a host; None when it cannot be told. Blocks."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return way_to(str(found[0][4][0]))
    except (OSError, ValueError):
        return None


def control_check(found: Controls) -> Check:
    """What new connections of this machine get, and whether BBR is to be had."""
    name = "congestion"
    if not found.default:
        return Check(name, OK, "this system does not tell")
    if _is_bbr(found.default):
        return Check(name, OK, f"new connections get {found.default}")
    what = f"new connections get {found.default}, which slows down with each loss"
    if not found.has_bbr:
        what += f"; the kernel has {' '.join(found.available)} only"
        return Check(name, WARN, what, WITHOUT)
    what += "; bbr is there" if not found.loading else "; bbr is not loaded"
    return Check(name, WARN, what, f"for all connections: {found.after_loading(FOR_ALL)}")


def uplink_check(host: str, way: Way | None, found: Controls) -> Check:
    """Of a node's updates: this machine is their sender."""
    name = "uplink"
    if way is None:
        return Check(name, OK, f"the way to the coordinator {host} is not known here")
    if way.is_local:
        return Check(name, OK, f"the coordinator {host} is this machine: nothing gets lost")
    control = way.congestion_control or found.default
    what = f"updates to {host} leave through {way.device} by {control or 'what is not known'}"
    if not control or _is_bbr(control):
        return Check(name, OK, what)
    if not found.has_bbr:
        return Check(name, WARN, what, WITHOUT)
    command = f"ip route replace {' '.join(way.route(BBR))}"
    fix = f"{NODE_OPTION}; or by hand: {found.after_loading(command)}"
    return Check(name, WARN, f"{what}; for models see hypergpu doctor there", fix)


def downlink_check(found: Controls) -> Check:
    """Of models: the coordinator's machine is their sender, and nodes may be anywhere."""
    name = "downlink"
    if not found.default or _is_bbr(found.default):
        return Check(name, OK, f"models leave by {found.default or 'what is not known'}")
    what = f"models leave by {found.default}, which slows down with each loss"
    if not found.has_bbr:
        return Check(name, WARN, what, WITHOUT)
    return Check(name, WARN, what, f"{found.after_loading(FOR_ALL)}; new connections have it")


def _is_bbr(control: str) -> bool:
    return control.startswith(BBR)
