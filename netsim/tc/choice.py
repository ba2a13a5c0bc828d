"""Which network a world gets: decided from what its links need and what the kernel lacks."""

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from netsim.error import NetsimError
from netsim.tc.plan import Need


class Fallback(StrEnum):
    """What the user wants where the kernel cannot do it."""

    REFUSE = "refuse"
    TUNNEL = "tunnel"


class Network(StrEnum):
    """Who carries the packets."""

    TC = "tc"
    TUNNEL = "tunnel"


class Lack(msgspec.Struct, frozen=True, kw_only=True):
    """A part that this kernel cannot do: it was tried."""

    part: str
    why: str


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A network and why it was chosen."""

    network: Network
    reason: str


def choose(needs: Iterable[Need], lacks: Sequence[Lack], fallback: Fallback) -> Choice:
    """Decide. A world has one network: half of it in the tunnel would not reach the rest.

    Raises:
        NetsimError: A need is lacking and no fallback was asked for.
    """
    why = {lack.part: lack.why for lack in lacks}
    missing = [need for need in needs if need.part in why]
    if not missing:
        return Choice(network=Network.TC, reason="the kernel has all that the links need")
    first = missing[0]
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    reason = f"{first.why}{more}, and this kernel lacks {first.part}: {why[first.part]}"
    if fallback is Fallback.TUNNEL:
        return Choice(network=Network.TUNNEL, reason=reason)
    raise NetsimError(
        reason, "ask for the fallback to the tunnel (--fallback tunnel), or use another kernel"
    )
