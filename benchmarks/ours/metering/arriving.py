"""Thousands of updates wait to be acknowledged: verified in one thread, written in another.

So the coordinator does it: its loop verifies what is ready before it turns to anything else, its
journal's writer countersigns what was verified meanwhile and keeps it in one transaction.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

from coordinator.shell.chain.pipeline import Pipeline
from coordinator.shell.metering.desk import LedgerDesk
from hypergpu.ledger.terms import separator_of
from hypergpu.ledger.typed import is_contribution_of, sign

from benchmarks.ours.metering.plan import COORDINATOR, JOB, QUALITY_BPS, UNIT_PRICE, Plan
from benchmarks.ours.metering.settling import contribution_of
from coordinator.core.events import MeasuredUpdate, RoundMetered
from coordinator.core.job import DueReceipt
from coordinator.shell.journal.sql.store import SqlJournal
from hypergpu.jobfile.spec import Pay
from hypergpu.units import BasisPoints, Milliseconds

_AT_ONCE = 100
"""Rounds that are ready at once, and are written in one transaction."""
_NONE = Milliseconds(0)
Waiting = Queue[Sequence[RoundMetered] | None]


def arriving(plan: Plan) -> list[RoundMetered]:
    """Every round of a plan, its contributions signed by the nodes, its quality known."""
    keys, desk = plan.node_keys(), LedgerDesk(COORDINATOR)
    separator = separator_of(desk.terms(JOB, Pay(unit_price=UNIT_PRICE)).domain)
    rounds = []
    for number in range(plan.receipts_each):
        made = [(key, contribution_of(key, plan, number)) for key in keys]
        updates = tuple(
            MeasuredUpdate(
                sequence=number,
                quality_bps=BasisPoints(QUALITY_BPS),
                evaluator="benchmark",
                reason="",
                due=DueReceipt(each, sign(key, separator, each), _NONE, _NONE),
            )
            for key, each in made
        )
        epoch = number // plan.rounds_per_epoch
        rounds.append(RoundMetered(at_ms=_NONE, round=number, epoch=epoch, updates=updates))
    return rounds


def take_in(rounds: Sequence[RoundMetered], journal: SqlJournal, pipeline: Pipeline) -> None:
    """Verify, countersign and keep all of them; the pipeline settles meanwhile."""
    desk, verified = LedgerDesk(COORDINATOR), Waiting(1)
    terms = desk.terms(JOB, Pay(unit_price=UNIT_PRICE))
    with ThreadPoolExecutor(1, thread_name_prefix="servicer") as servicer:
        verifying = servicer.submit(_verify, rounds, separator_of(terms.domain), verified)
        while (waiting := verified.get()) is not None:
            earned = desk.countersigned([(terms, JOB, each) for each in waiting])
            journal.append([], (), earned)
            pipeline.wake()
    verifying.result()


def _verify(rounds: Sequence[RoundMetered], separator: bytes, verified: Waiting) -> None:
    try:
        for first in range(0, len(rounds), _AT_ONCE):
            ready = rounds[first : first + _AT_ONCE]
            for due in (update.due for each in ready for update in each.updates):
                said = due.contribution
                if not is_contribution_of(said.node, separator, said, due.signature):
                    raise RuntimeError("a contribution's signature is wrong")
            verified.put(ready)
    finally:
        verified.put(None)
