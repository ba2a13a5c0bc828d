"""What it means that a contract refuses a call: in words, with what mends it. Pure."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


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


def refused_with(name: str, values: Mapping[str, Any], said: bytes) -> Refused:
    """What a contract's error means.

    Args:
        name: Of the error; empty: it is none that is known.
        values: Its own, by name.
        said: The bytes.
    """
    if known := _KNOWN.get(name):
        return known(values)
    if not said:
        return Refused("a contract refused it without a word")
    shown = ", ".join(f"{key} {_shown(value)}" for key, value in values.items())
    told = f"{name}({shown})" if name else _shown(said[:36])
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


def _bond_missing(values: Mapping[str, Any]) -> Refused:
    required, posted = values["required"], values["posted"]
    return Refused(
        f"the coordinator's bond on the ledger is {posted}, and the ledger asks for {required}",
        f"post {required - posted} more: hypergpu ledger bond",
    )


def _balance_short(values: Mapping[str, Any]) -> Refused:
    sender, balance, needed = values["sender"], values["balance"], values["needed"]
    return Refused(
        f"{sender} has {balance} of the ledger's token left, and {needed} are needed",
        f"send it {needed - balance} more",
    )


def _fee_taken(values: Mapping[str, Any]) -> Refused:
    return Refused(
        f"of {values['expected']} that the ledger's token was to move only {values['received']}"
        " arrived, since it takes a fee",
        "use a ledger whose token takes none: HYPERGPU_COORDINATOR_LEDGER_CONTRACT=ADDRESS",
    )


def _too_large(values: Mapping[str, Any]) -> Refused:
    what = f"{values['value']} is more than {values['bits']} bits of the ledger hold"
    return Refused(what, "take a smaller amount")


_KNOWN: dict[str, Callable[[Mapping[str, Any]], Refused]] = {
    "BondMissing": _bond_missing,
    "ERC20InsufficientBalance": _balance_short,
    "TransferShort": _fee_taken,
    "SafeCastOverflowedUintDowncast": _too_large,
    "EnforcedPause": lambda _: Refused(
        "the ledger's guardian has paused it", "ask its guardian", is_passing=True
    ),
    "TooEarly": lambda values: Refused(
        f"it is not due before {values['until']} (Unix seconds)", "wait", is_passing=True
    ),
    "SafeERC20FailedOperation": lambda values: Refused(
        f"the ledger's token {values['token']} refuses to move it"
    ),
    "JobExists": lambda _: Refused(
        "the ledger has such a job of this coordinator already", "submit it again as another job"
    ),
    "JobEnded": lambda values: Refused(
        f"the job has ended on the ledger, at {values['endedAt']} (Unix seconds)",
        "submit it again as another job",
    ),
    "Error": lambda values: Refused(f'a contract refused it: "{values["reason"]}"'),
    "Panic": lambda values: Refused(f"a number went out of its range (panic {values['code']:#x})"),
}


def _shown(value: object) -> str:
    return "0x" + value.hex() if isinstance(value, bytes) else str(value)
