"""The figures of a chain that nobody has described: dear and slow rather than wrong."""

from msgspec.structs import asdict, replace

from hypergpu.chain.profiles import ChainProfile

_FIGURES = ChainProfile(
    chain_id=1,
    # Ethereum's, the slowest of those in wide use: what waits by it waits too long elsewhere.
    block_ms=12_000,
    # Two epochs of Ethereum. Rollups and BFT chains need less, nothing living needs more.
    depth=64,
    window_s=86_400,
    # What geth promises each account of its pool.
    in_flight_max=16,
    # Some RPCs take no batches at all.
    batch_max=1,
    requests_per_s=10,
    # As Monad's, the fewest of those that are known.
    log_blocks_max=100,
    transaction_gas_max=16_777_216,
    # At least; the chain is asked what it suggests.
    tip_wei=100_000_000,
    max_fee_cap_wei=500_000_000_000,
    # As Arbitrum's, the most of those that are known: it costs only where the limit is charged.
    gas_percent=300,
    resend_ms=30_000,
    bump_blocks=10,
    sources=("assumed", "https://eips.ethereum.org/EIPS/eip-7825"),
)
_OWN = frozenset({"chain_id", "rpc_url", "sources", "is_local", "sweeps_dust"})


def cautious_profile(chain_id: int) -> ChainProfile:
    """What is assumed of a chain without a profile: never play money, so nothing is made there."""
    return replace(_FIGURES, chain_id=chain_id)


def assumptions(profile: ChainProfile) -> str:
    """The figures of a profile by the names that a file gives them."""
    figures = asdict(profile).items()
    return ", ".join(f"{name} = {value}" for name, value in figures if name not in _OWN)
