"""The chains that a coordinator can settle on: limits, costs, finality, settings and errors.

A chain is given by name (a file in ``payments/profiles``), by a TOML file of its own, or
by the address of its RPC: an unknown chain gets slow and expensive figures rather than wrong ones.
Loads without web3. Settings are ``HYPERGPU_COORDINATOR_*`` in the coordinator's environment.
"""

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta
from pydantic import AfterValidator, AliasChoices, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from hypergpu.errors import HyperGPUError, Reason

NONE = "none"
"""No chain: receipts are signed and kept."""
ANVIL = "anvil"
"""A chain of play money, started beside the coordinator unless its RPC is given."""
_FOLDER = Path(__file__).parents[1] / "profiles"
_FILE_BYTES_MAX = 100_000
Count = Annotated[int, Meta(ge=0)]
Some = Annotated[int, Meta(ge=1)]


class ChainProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Figures of a chain. Amounts are wei for one unit of gas. Defaults suit an unknown chain."""

    chain_id: Some
    block_ms: Count = 12_000
    """Time between blocks."""
    depth: Count = 64
    """Blocks on top of a transaction's own that make it final: two epochs of Ethereum."""
    window_s: Annotated[int, Meta(ge=30, le=2**32 - 1)] = 86_400
    """Challenge window of a ledger that is deployed here."""
    in_flight_max: Some = 16
    """Transactions of one account that the chain's pool is sure to hold."""
    batch_max: Some = 1
    """Calls in one request to the RPC; 1: it takes no batches."""
    transaction_gas_max: Annotated[int, Meta(ge=1_000_000)] = 16_777_216
    """Limit of EIP-7825."""
    tip_wei: Count = 100_000_000
    """Least tip that gets into a block."""
    max_fee_cap_wei: Some = 500_000_000_000
    """A transaction that needs more waits."""
    bump_blocks: Some = 10
    """The fee is raised after so many blocks without the transaction."""
    gas_percent: Annotated[int, Meta(ge=100)] = 300
    """Share of the gas formulas, which hold for Ethereum's prices."""
    rpc_url: str = ""
    """A public RPC; empty: the operator names one."""
    is_local: bool = False
    """Play money: the account is filled from nothing, token and ledger are deployed unasked."""


class NamedChain(msgspec.Struct, frozen=True):
    """A chain and the address of its RPC."""

    profile: ChainProfile
    url: str
    """Empty: an Anvil is to be started."""
    note: str = ""
    """Warning for the operator; empty: none."""


@cache
def _profiles() -> dict[str, ChainProfile]:
    """The chains that are known by name: files of the package."""
    return {path.stem: read_profile(path) for path in sorted(_FOLDER.glob("*.toml"))}


def chain_names() -> tuple[str, ...]:
    """Names of the table, in order."""
    return tuple(_profiles())


def named_chain(chain: str, chain_url: str = "") -> NamedChain | None:
    """Profile and RPC of a chain by name or file; None for an RPC's address alone.

    An address has to be asked for its chain first: `profile_of_id`.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, there is no such chain or it has no RPC; FILE_UNUSABLE, the
            profile's file is wrong.
    """
    if "://" in chain:
        check_url(chain)
        return None
    profile = _profiles().get(chain)
    if profile is None and chain.endswith(".toml"):
        profile = read_profile(Path(chain).expanduser())
    if profile is None:
        names = ", ".join(chain_names())
        raise HyperGPUError(
            Reason.ARGUMENT_INVALID,
            f"there is no chain {chain!r}; known by name are {names}",
            fix="name one, the address of its RPC, or a profile's file: HYPERGPU_CHAIN=./FILE.toml",
        )
    url = chain_url or profile.rpc_url
    if not url and chain != ANVIL:
        raise HyperGPUError(
            Reason.ARGUMENT_INVALID,
            f"the chain {chain} has no RPC of its own",
            fix="name one: HYPERGPU_COORDINATOR_CHAIN_URL=URL",
        )
    if url:
        check_url(url)
    return NamedChain(profile, url)


def profile_of_id(chain_id: int) -> tuple[ChainProfile, str]:
    """Profile of a chain that an RPC says it is of, and a note where its figures are assumed."""
    for profile in _profiles().values():
        if profile.chain_id == chain_id:
            return profile, ""
    return ChainProfile(chain_id=chain_id), (
        f"chain {chain_id} has no profile: slow and expensive figures are assumed; describe it in a"
        " file (docs/chains.md): HYPERGPU_CHAIN=./FILE.toml"
    )


def read_profile(path: Path) -> ChainProfile:
    """Read a profile from a TOML file.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it cannot be read, or a field is wrong.
    """
    try:
        with path.open("rb") as file:
            tree = tomllib.loads(file.read(_FILE_BYTES_MAX).decode("utf-8"))
        profile = msgspec.convert(tree, ChainProfile)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise HyperGPUError(
            Reason.FILE_UNUSABLE,
            f"the chain profile {path}: {error}",
            fix="see docs/chains.md for a whole one",
        ) from None
    if profile.tip_wei > profile.max_fee_cap_wei:
        raise HyperGPUError(
            Reason.FILE_UNUSABLE, f"the chain profile {path}: tip_wei is more than max_fee_cap_wei"
        )
    return profile


def check_url(url: str) -> None:
    """Refuse an RPC's address that cannot be dialled; the message does not show it.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, it is not http(s) with a host.
    """
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise HyperGPUError(
            Reason.ARGUMENT_INVALID,
            "the address of the chain's RPC is not http:// or https:// with a host",
            fix="name it like this: http://127.0.0.1:8545",
        )


def display_url(url: str) -> str:
    """Host and port of an RPC, without user, path and query: those may hold a key."""
    parts = urlsplit(url)
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{parts.hostname}{port}"


_ADDRESS = re.compile(r"0x[0-9a-f]{40}", re.ASCII)


def _address(given: str) -> str:
    lower_text = given.strip().lower()
    if lower_text and not _ADDRESS.fullmatch(lower_text):
        raise ValueError("an address is 0x and 40 hex digits")
    return lower_text


class PaymentSettings(BaseSettings):
    """Choice of the chain and the way that receipts reach it."""

    model_config = SettingsConfigDict(
        env_prefix="HYPERGPU_COORDINATOR_",
        env_ignore_empty=True,
        extra="ignore",
        frozen=True,
        populate_by_name=True,
    )

    chain: str = Field(
        default=NONE, validation_alias=AliasChoices("HYPERGPU_COORDINATOR_CHAIN", "HYPERGPU_CHAIN")
    )
    """Chain that settles paid jobs: a name, the address of its RPC or a profile's file; ``anvil``
    for one on this machine that is started with the coordinator; ``none``: receipts are signed and
    kept, and a job may not pay."""
    chain_url: str = ""
    """The chain's RPC; empty: its profile's own, and for ``anvil`` the one that is started."""
    chain_port: int = Field(default=0, ge=0, le=65535)
    """Port of the Anvil that is started; 0 takes a free one."""
    ledger_contract: Annotated[str, AfterValidator(_address)] = ""
    """Address of the ledger; empty: one is deployed on a local chain."""
    metering: Literal["batched", "each"] = "batched"
    """``batched``: receipts reach the chain as their totals with the root of their tree;
    ``each``: every receipt in a transaction of its own."""
    retry_payments: bool = False
    """Clear every halt at this start: once its cause is mended, what failed is tried again."""


class ChainError(Exception):
    """The chain could not be asked, or gave no usable answer: it is asked again later."""


class ChainUnreachableError(ChainError):
    """The RPC did not answer, or not as a chain's RPC does."""


class CallRefusedError(ChainError):
    """The RPC or a contract refused a call."""

    def __init__(self, message: str, code: int = 0, revert: bytes = b"") -> None:
        super().__init__(message)
        self.code = code
        self.revert = revert
        """The contract's error; empty: none, or the RPC does not say."""

    @property
    def is_revert(self) -> bool:
        """Whether a contract refused, as opposed to the RPC."""
        return bool(self.revert) or self.code == _REVERTED or "revert" in str(self).lower()


_REVERTED = 3
"""JSON-RPC's code of a call that a contract refused."""
