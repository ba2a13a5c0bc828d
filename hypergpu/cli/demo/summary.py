"""The end of the demo: ten lines for people, and `summary.json` with everything."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from hypergpu.cli.demo.fault import NodeReturn
from hypergpu.cli.demo.race import StrategyTime
from hypergpu.cli.demo.settlement import ACCOUNTS_NAME
from hypergpu.client import Reached
from hypergpu.terminal.figures import size, span
from hypergpu.terminal.output import say

FILE_NAME = "summary.json"


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The demo's figures."""

    accuracy: float
    target: float
    to_target: Reached | None
    rounds: int
    wall_s: float
    bytes_up: int
    bytes_down: int
    nodes: int
    updates_accepted: int
    updates_refused: int
    model_bytes: int
    model_digest: str
    strategy: str
    sync_ratio: float | None
    """How many times as long every-step training would take to the target; None: not known."""
    runners: tuple[StrategyTime, ...]
    back: NodeReturn
    """The killed node's return."""
    receipts: int
    """All of them sound, both signatures of each."""
    earned: int
    """Pay of all nodes, in the token's smallest unit."""
    paid: int | None
    """Pay that the chain moved into their wallets; None where there is no chain."""
    transactions: int
    """Transactions that record contributions on the chain."""
    epochs: int
    """Epochs with a payment; 0 without a chain."""


def say_end(summary: Summary, folder: Path) -> None:
    """Write the file and print the end of the demo."""
    text = msgspec.json.format(msgspec.json.encode(summary), indent=2)
    (folder / FILE_NAME).write_bytes(text + b"\n")
    files = f"{folder / FILE_NAME}, {folder / ACCOUNTS_NAME}, {folder / 'model'}"
    say()
    for name, words in (*_end_rows(summary), ("files", files)):
        say(f"{name:<10} {words}")


def _end_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    yield "accuracy", f"{summary.accuracy:.2%} on held-out digits, wanted {summary.target:.0%}"
    to_target = ""
    if summary.to_target:
        to_target = f"{span(summary.to_target.at_ms / 1000)} to {summary.target:.0%}, "
    yield "time", f"{to_target}{span(summary.wall_s)} in all with the comparison below"
    yield "money", _money(summary)
    for runner in summary.runners[1:]:
        yield f"  {runner.strategy}", _rival_time(runner, summary.runners[0])
    moved = summary.bytes_up + summary.bytes_down
    # One whole float32 model each way, each round, each node, is the plain way of doing this.
    plain = 2 * summary.model_bytes * summary.rounds * summary.nodes
    saved = f", {plain / moved:.1f}x less than whole float32 models" if moved and plain else ""
    yield "traffic", f"{size(summary.bytes_up)} up, {size(summary.bytes_down)} down{saved}"
    yield (
        "work",
        (
            f"{summary.rounds} rounds of {summary.strategy} on {summary.nodes} nodes,"
            f" {summary.updates_accepted} updates accepted, {summary.updates_refused} refused"
        ),
    )
    back = summary.back
    yield (
        "fault",
        (
            f"{back.victim} was killed half-way; {span(back.after_s)} later its work was accepted"
            f" again, in round {back.round}"
        ),
    )


def _money(summary: Summary) -> str:
    receipts = f"{summary.receipts} receipts, all sound; {summary.earned} earned"
    if summary.paid is None:
        return f"{receipts}, no chain to pay it"
    return f"{receipts} and {summary.paid} paid, recorded by {summary.transactions} transactions"


def _rival_time(runner: StrategyTime, first: StrategyTime) -> str:
    if runner.at_ms is None:
        return runner.how
    times = f", {runner.at_ms / first.at_ms:.3g}x as long" if first.at_ms else ""
    return f"{span(runner.at_ms / 1000)} to the target{times} ({runner.how})"
