"""Journals of served models that pay by token, without a coordinator."""

from typing import NamedTuple

import msgspec

from benchmarks.ours.metering.host import JobPlan
from hypergpu.assignment import Lease
from hypergpu.crypto import IdentityKey, sign
from hypergpu.digests import digest_of
from hypergpu.journal.measured_work import MeasuredWork
from hypergpu.journal.serving_events import ServeCreatedEvent, ServePay, WindowAcceptedEvent
from hypergpu.ledger_terms import Terms, separator_of
from hypergpu.result_statements import CountStatement, count_contribution
from hypergpu.statements import WHOLE_BPS
from hypergpu.units import Wei
from hypergpu.work_units import WorkUnit


class CountedTokens(NamedTuple):
    """A count that was signed."""

    key: IdentityKey
    number: int
    units: int
    lease: int = 1


class ServePlan(JobPlan, frozen=True, kw_only=True):
    """A served model whose tokens are written by nobody."""

    @property
    def unit(self) -> WorkUnit:
        """What its work is counted in."""
        return WorkUnit.TOKENS

    def first_rows(self, terms: Terms) -> list[tuple[str, msgspec.Struct]]:
        """The row that the job begins with."""
        pay = ServePay(
            unit_price=Wei(self.unit_price),
            budget=Wei(self.escrow),
            windows_per_epoch=self.rounds_per_epoch,
            request=digest_of(b"a request"),
        )
        creation = ServeCreatedEvent(self.job_id, "tiny", terms=terms, pay=pay)
        return [("ServeCreated", creation)]

    def window_row(self, terms: Terms, count: CountedTokens) -> tuple[str, WindowAcceptedEvent]:
        """The row of an accepted count."""
        statement = CountStatement(
            Lease(self.job_id, count.number, count.lease),
            count.units,
            digest_of(b"answers of count %d" % count.number),
        )
        contribution = count_contribution(terms, count.key.node_id, statement)
        work = MeasuredWork(
            contribution=contribution,
            signature=sign(count.key, separator_of(terms.domain), contribution),
            quality_bps=WHOLE_BPS,
            evaluator="serve/1 counted",
        )
        event = WindowAcceptedEvent(contribution.node, count.number, count.units, works=(work,))
        return "WindowAccepted", event
