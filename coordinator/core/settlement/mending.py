"""What remains of an epoch when transactions of it are given up, with none of them on its way."""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from coordinator.core.settlement.epoch import Epoch, Part, Tally
from coordinator.core.settlement.sending import TransactionState
from hypergpu.ids import NodeId


class Kept(NamedTuple):
    """A transaction of the epoch that took effect."""

    part: Part
    state: TransactionState
    receipts: int = 0
    """That it records."""
    nodes: tuple[NodeId, ...] = ()
    """Whose."""


def remade(epoch: Epoch, kept: Sequence[Kept], *, is_closed: bool, is_swept: bool = False) -> Epoch:
    """Count an epoch afresh, from what took effect of it and from what the ledger says.

    One that is closed there takes no more receipts, whoever closed it. One that is not has not
    ended, so that what was given up is sealed into it again, and then its close.

    Args:
        epoch: As it was counted before.
        kept: All of its transactions but those that are given up.
        is_closed: On the ledger.
        is_swept: Whether its dust is returned there.
    """
    tallies = {part: _tally([one for one in kept if one.part is part]) for part in Part}
    payment = tallies[Part.PAYMENT]
    receipts = sum(one.receipts for one in kept)
    # Counted again, it is swept again.
    is_sweep_lost = bool(epoch.sweep.sealed) and not tallies[Part.SWEEP].sealed and not is_swept
    # Where nothing is recorded there is nobody to pass over.
    is_counted = not receipts or (epoch.counted == payment.sealed and not is_sweep_lost)
    return replace(
        epoch,
        receipts=receipts,
        nodes=tuple(sorted({node for one in kept for node in one.nodes})),
        is_ended=is_closed,
        batch=tallies[Part.BATCH],
        close=tallies[Part.CLOSE],
        payment=payment,
        sweep=tallies[Part.SWEEP],
        counted=payment.sealed if is_counted else 0,
        checked=min(epoch.checked, payment.final) if is_counted else 0,
        deferred=epoch.deferred if is_counted and receipts else 0,
        is_closed_by_others=is_closed and not tallies[Part.CLOSE].mined,
        is_swept_by_others=is_swept and not tallies[Part.SWEEP].mined,
    )


def _tally(kept: Sequence[Kept]) -> Tally:
    count = len(kept)
    final = sum(one.state is TransactionState.FINAL for one in kept)
    return Tally(sealed=count, sent=count, mined=count, final=final)
