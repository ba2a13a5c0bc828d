"""Result of a command that acts on a ledger, and amounts and times for people."""

from datetime import UTC, datetime

import msgspec

from hypergpu.terminal.output import say, say_json


class LedgerAct(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="hypergpu/ledger-act/2"
):
    """Done by one account on one ledger."""

    account: str
    chain_id: int
    ledger: str
    blocks: list[int]
    """Blocks of the transactions that were sent, in order."""
    done: list[str]
    """Sentences for people."""
    amounts: dict[str, str]
    """By name, in the token's smallest unit."""
    again_at_unix_s: int = 0
    """Time from which running the command again does more; 0: never."""


class Claimed(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="hypergpu/claimed/2"
):
    """Claims of one node, one for each of its jobs."""

    acts: list[LedgerAct]


def say_act(act: LedgerAct, *, as_json: bool) -> None:
    """Print a result."""
    if as_json:
        say_json(act)
        return
    for sentence in act.done:
        say(sentence)
    if act.again_at_unix_s:
        say(f"run this again from {time_text(act.again_at_unix_s)} on")


def amount_text(amount: int, decimals: int) -> str:
    """An amount in whole tokens, exactly: ``12.5``; in smallest units where decimals are 0."""
    whole, rest = divmod(abs(amount), 10**decimals)
    digits = str(rest).rjust(decimals, "0").rstrip("0") if rest else ""
    return f"{'-' if amount < 0 else ''}{whole:,}{'.' + digits if digits else ''}"


def time_text(unix_s: int) -> str:
    """A time for people."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
