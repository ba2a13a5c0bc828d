"""Chains by name: what each one bears, costs, and takes to be final. One TOML file a chain."""

from functools import cache
from pathlib import Path

import msgspec

from hypergpu.chain.rpc.client import Pace
from hypergpu.refusal import Reason, RefusalError

NONE = "none"
"""No chain: receipts are signed and kept, and settled once one is configured."""
_FOLDER = Path(__file__).parent


class ChainProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the pipeline must know of a chain. Amounts are wei for one unit of gas."""

    chain_id: int
    block_ms: int
    """Between blocks; 0: a block for each transaction."""
    depth: int
    """Blocks on top of a transaction's own that make it final."""
    window_s: int
    """Challenge window of a ledger that is deployed here; at least 30."""
    in_flight_max: int
    """Transactions of one account that the chain's pool holds for sure."""
    batch_max: int
    """Calls in one request to its RPC; 1: it takes no batches."""
    transaction_gas_max: int
    tip_wei: int
    """Least tip that gets into a block."""
    max_fee_cap_wei: int
    """What is stuck beneath it waits and is reported."""
    resend_ms: int
    """The same bytes again after so long in no block."""
    bump_blocks: int
    """A higher fee after so many blocks that did not take it."""
    sources: tuple[str, ...]
    """Where these figures come from."""
    rpc_url: str = ""
    """A public RPC; empty: the operator names one."""
    requests_per_s: int = 0
    """That its public RPC bears; 0: no limit."""
    gas_percent: int = 100
    """Of the gas formula, which was measured on Ethereum's prices."""
    is_local: bool = False
    """Play money: an account may be filled from nothing, and a ledger deployed without asking."""
    sweeps_dust: bool = False
    """Whether what rounding leaves of a pool is worth a transaction to return."""

    @property
    def pace(self) -> Pace:
        """How much its RPC bears."""
        return Pace(self.batch_max, self.requests_per_s)


def profile_names() -> tuple[str, ...]:
    """Every chain by name, `NONE` aside."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


@cache
def chain_profile(name: str) -> ChainProfile:
    """A chain's profile.

    Raises:
        RefusalError: REQUEST_INVALID, there is none of this name.
    """
    if name not in profile_names():
        raise RefusalError(
            Reason.REQUEST_INVALID,
            f"there is no chain {name!r}; there are {', '.join((NONE, *profile_names()))}",
        )
    return msgspec.toml.decode((_FOLDER / f"{name}.toml").read_bytes(), type=ChainProfile)


def profile_of(chain_id: int, *, where: str) -> ChainProfile:
    """The profile of the chain that an RPC is of.

    Raises:
        RefusalError: CHAIN_WRONG, there is none for it.
    """
    profiles = {name: chain_profile(name) for name in profile_names()}
    for profile in profiles.values():
        if profile.chain_id == chain_id:
            return profile
    known = ", ".join(f"{name} ({profile.chain_id})" for name, profile in profiles.items())
    detail = f"the RPC at {where} is of chain {chain_id}, which has no profile; there are {known}"
    raise RefusalError(Reason.CHAIN_WRONG, detail, fix="name the RPC of one of these chains")
