"""How the demo ended: `summary.json` and the same for people."""

from pathlib import Path

import msgspec

from hypergpu.cli.demo.race import Race
from hypergpu.cli.demo.settlement import Settled
from hypergpu.client.values import JobView
from hypergpu.terminal.figures import size, span

FILE_NAME = "summary.json"


class Summary(msgspec.Struct, frozen=True):
    """The demo's figures."""

    accuracy: float
    rounds: int
    wall_s: float
    bytes_up: int
    bytes_down: int
    nodes: int
    updates_accepted: int
    updates_refused: int
    model_digest: str
    strategy: str
    sync_ratio: float | None
    """How many times as long every-step training would take to the target; None: not known."""
    receipts: int
    """All of them sound, both signatures of each."""
    earned: int
    """By all nodes, in the token's smallest unit."""
    paid: int | None
    """Into their wallets, by the chain; None where there is none."""
    transactions: int
    """That record contributions on the chain."""
    epochs: int
    """Epochs with a payment; 0 without a chain."""


def summary_of(job: JobView, *, nodes: int, wall_s: float, race: Race, pay: Settled) -> Summary:
    """The figures of an ended job."""
    return Summary(
        accuracy=job.metric if job.metric is not None else 0.0,
        rounds=job.round,
        wall_s=round(wall_s, 1),
        bytes_up=job.bytes_up,
        bytes_down=job.bytes_down,
        nodes=nodes,
        updates_accepted=job.updates_accepted,
        updates_refused=job.updates_refused,
        model_digest=job.model or "",
        strategy=race.first.strategy,
        sync_ratio=race.sync_ratio,
        receipts=pay.receipts,
        earned=pay.earned,
        paid=pay.paid,
        transactions=pay.transactions,
        epochs=pay.epochs,
    )


def write_summary(summary: Summary, folder: Path) -> Path:
    """Leave it in ``folder``."""
    path = folder / FILE_NAME
    text = msgspec.json.format(msgspec.json.encode(summary), indent=2)
    path.write_bytes(text + b"\n")
    return path


def summary_lines(summary: Summary, model_bytes: int) -> list[str]:
    """The end of the demo, in words."""
    moved = summary.bytes_up + summary.bytes_down
    # What synchronising every inner step in float32 would have moved is not known here; one whole
    # model each way, each round, each node is.
    plain = 2 * model_bytes * summary.rounds * summary.nodes
    saved = f", {plain / moved:.1f}x less than whole float32 models" if moved and plain else ""
    return [
        f"accuracy   {summary.accuracy:.2%} on held-out digits",
        f"time       {span(summary.wall_s)}, {summary.rounds} rounds on {summary.nodes} nodes",
        f"traffic    {size(summary.bytes_up)} up, {size(summary.bytes_down)} down{saved}",
        f"updates    {summary.updates_accepted} accepted, {summary.updates_refused} refused",
        f"model      {summary.model_digest}",
    ]
