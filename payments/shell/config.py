"""Settings of the payments: ``HYPERGPU_COORDINATOR_*`` in the coordinator's environment."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, AliasChoices, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from payments.shell.chains import NONE

_ADDRESS = re.compile(r"0x[0-9a-f]{40}", re.ASCII)


def _address(given: str) -> str:
    lowered = given.strip().lower()
    if lowered and not _ADDRESS.fullmatch(lowered):
        raise ValueError("an address is 0x and 40 hex digits")
    return lowered


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
