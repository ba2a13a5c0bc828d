"""What follows for a coordinator when a contract refuses a call, or a transaction failed. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

from hypergpu.ledger.refused import meaning


class Refused(NamedTuple):
    """Why a contract refuses a call."""

    words: str
    fix: str = "mend that"
    is_passing: bool = False
    """It ends by itself, or by somebody else's doing: nobody here has to mend anything."""


class Failure(NamedTuple):
    """Why a transaction failed that is in a block."""

    words: str
    fix: str
    is_starved: bool = False
    """It ran out of gas."""
    is_passing: bool = False


def refused_with(name: str, texts: Mapping[str, str], said: bytes) -> Refused:
    """What a contract's error means.

    Args:
        name: Of the error; empty: it is none that is known.
        texts: Its values for people, by name.
        said: The bytes.
    """
    found = meaning(name, texts)
    if found is not None and found.words:
        fix = found.coordinator_fix or found.fix
        return Refused(found.words, fix, is_passing=found.is_passing)
    if not said:
        return Refused("a contract refused it without a word")
    if name == "Error":
        return Refused(f'a contract refused it: "{texts["reason"]}"')
    if name == "Panic":
        return Refused(f"a number went out of its range (panic {int(texts['code']):#x})")
    shown = ", ".join(f"{key} {text}" for key, text in texts.items())
    told = f"{name}({shown})" if name else f"0x{said[:36].hex()}"
    return Refused(f"a contract refused it with {told}")


def failed(found: Refused | None, gas_used: int, gas: int) -> Failure | None:
    """Why a transaction failed in its block; None: nobody knows.

    Args:
        found: What is said to the same call, made again as it was in that block and with gas
            enough; None: nothing, or it cannot be made again.
        gas_used: By the transaction.
        gas: That it might use.
    """
    if found is not None:
        fix = f"{found.fix}; then start once with: hypergpu up --retry-failed"
        return Failure(found.words, fix, is_passing=found.is_passing)
    # A contract keeps a 64th back from what it calls.
    if gas_used * 64 < gas * 63:
        return None
    fix = "start once with: hypergpu up --retry-failed; it is signed again with more gas"
    return Failure(f"it ran out of gas: it used {gas_used} of {gas}", fix, is_starved=True)
