"""Chains by name: what each one bears, costs, and takes to be final. One TOML file a chain."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from hypergpu.errors import HyperGPUError, Reason

if TYPE_CHECKING:
    from hypergpu.chain.rpc.client import Pace

NONE = "none"
"""No chain: receipts are signed and kept, and settled once one is configured."""
_FOLDER = Path(__file__).parent
Count = Annotated[int, Meta(ge=0)]
Some = Annotated[int, Meta(ge=1)]
WINDOW_S_LEAST = 30
"""The ledger's own least, `Roles.SHORTEST_WINDOW`."""


class ChainProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the pipeline must know of a chain. Amounts are wei for one unit of gas."""

    chain_id: Some
    block_ms: Count
    """Between blocks; 0: a block for each transaction."""
    depth: Count
    """Blocks on top of a transaction's own that make it final."""
    window_s: Annotated[int, Meta(ge=WINDOW_S_LEAST, le=2**32 - 1)]
    """Challenge window of a ledger that is deployed here; at least 30."""
    in_flight_max: Some
    """Transactions of one account that the chain's pool holds for sure."""
    batch_max: Some
    """Calls in one request to its RPC; 1: it takes no batches."""
    transaction_gas_max: Annotated[int, Meta(ge=1_000_000)]
    tip_wei: Count
    """Least tip that gets into a block."""
    max_fee_cap_wei: Some
    """What is stuck beneath it waits and is reported."""
    resend_ms: Count
    """The same bytes again after so long in no block."""
    bump_blocks: Some
    """A higher fee after so many blocks that did not take it."""
    rpc_url: str = ""
    """A public RPC; empty: the operator names one."""
    requests_per_s: Count = 0
    """That its public RPC bears; 0: no limit."""
    log_blocks_max: Some = 100
    """Blocks whose events its RPC gives at once; a range that it refuses is halved."""
    gas_percent: Annotated[int, Meta(ge=100)] = 100
    """Of the gas formula, which was measured on Ethereum's prices."""
    is_local: bool = False
    """Play money: an account may be filled from nothing, and a ledger deployed without asking."""
    sweeps_dust: bool = False
    """Whether what rounding leaves of a pool is worth a transaction to return."""
    sources: tuple[str, ...] = ()
    """Where these figures come from."""

    @property
    def pace(self) -> "Pace":
        """How much its RPC bears."""
        from hypergpu.chain.rpc.client import Pace

        return Pace(self.batch_max, self.requests_per_s, self.log_blocks_max)


def profile_names() -> tuple[str, ...]:
    """Every chain by name, `NONE` aside."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


@cache
def chain_profile(name: str) -> ChainProfile:
    """A chain's profile.

    Raises:
        HyperGPUError: REQUEST_INVALID, there is none of this name.
    """
    if name not in profile_names():
        raise HyperGPUError(
            Reason.REQUEST_INVALID,
            f"there is no chain {name!r}; known by name are {', '.join(profile_names())}",
        )
    return msgspec.toml.decode((_FOLDER / f"{name}.toml").read_bytes(), type=ChainProfile)
