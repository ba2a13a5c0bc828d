"""The parts of this kernel that `tc` can use, found by trying each in a namespace of our own.

The program ``tc`` may be there while the kernel knows none of its queues, so nothing is concluded
from programs, versions or lists of modules.
"""

from collections.abc import Iterator

from netsim.emulation.namespaces import claim_slot, require_namespaces, run_batch
from netsim.link import CongestionControl
from netsim.link.error import NetsimError
from netsim.measure.probe import BackendClaim
from netsim.tc.plan import BRIDGE, KernelPart, Step, redirect_lines

_VETH, _IFB = "veth0", "ifb0"
_ROUTE = "192.0.2.0/24"  # RFC 5737: documentation, on no real network
_NETEM_CLAIMS = frozenset(
    {
        BackendClaim.DELAY,
        BackendClaim.LOSS,
        BackendClaim.REORDERING,
        BackendClaim.DUPLICATION,
        BackendClaim.CONGESTION,
    }
)
"""Jitter is not among them: netem forgets it from packet to packet."""


def kernel_lacks() -> tuple[KernelPart, ...]:
    """Try every part, and return those that failed. Needs root; leaves nothing behind.

    Raises:
        NetsimError: Not even a namespace can be made.
    """
    require_namespaces("tc")
    claim = claim_slot()
    scratch = f"netsim-{claim.slot}.scratch"
    try:
        claim.make([scratch])
        # Each later part uses what the earlier ones left, and fails with its own reason without it.
        return tuple(lack for part, steps in _attempts(scratch) for lack in _try(part, steps))
    finally:
        claim.remove_everything()
        claim.release()


def claims() -> frozenset[BackendClaim]:
    """Return what the queues of this kernel emulate faithfully."""
    missing = {lack.part for lack in kernel_lacks()}
    if missing & {"bridge", "veth"}:
        return frozenset()
    rate = frozenset() if missing & {"tbf", "ingress"} else frozenset({BackendClaim.RATE})
    return rate if "netem" in missing else rate | _NETEM_CLAIMS


def _attempts(scratch: str) -> Iterator[tuple[str, list[Step]]]:
    ip, tc = ("ip", "-n", scratch), ("tc", "-n", scratch)
    root = f"qdisc add dev {_VETH} root"
    yield "bridge", [(ip, [f"link add {BRIDGE} type bridge"])]
    yield "veth", [(ip, [f"link add {_VETH} type veth peer name veth1"])]
    for part, words in (("netem", "delay 1ms"), ("tbf", "rate 1mbit burst 4000 limit 10000")):
        yield part, [(tc, [f"{root} {part} {words}", f"qdisc delete dev {_VETH} root"])]
    redirect = redirect_lines(_VETH, _IFB)
    yield "ingress", [(ip, [f"link add {_IFB} type ifb"]), (tc, redirect)]
    for control in CongestionControl:
        route = f"route replace {_ROUTE} dev lo congctl {control}"
        yield control.value, [(ip, ["link set lo up", route])]


def _try(part: str, steps: list[Step]) -> Iterator[KernelPart]:
    try:
        for program, lines in steps:
            run_batch(program, lines)
    except NetsimError as error:
        yield KernelPart(part, error.detail.partition(" (from ")[0])
