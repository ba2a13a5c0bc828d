"""Journals of farm jobs that pay, in any unit, without a coordinator."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from benchmarks.ours.metering.host import JobPlan
from hypergpu.assignment import Lease
from hypergpu.blobs import BlobRef
from hypergpu.crypto import IdentityKey, sign
from hypergpu.digests import digest_of
from hypergpu.journal.farm_events import BundleAcceptedEvent, FarmPay, MapCreatedEvent
from hypergpu.journal.measured_work import MeasuredWork
from hypergpu.ledger_terms import Terms, separator_of
from hypergpu.packed_work import WorkAmount
from hypergpu.result_statements import result_contribution
from hypergpu.statements import WHOLE_BPS
from hypergpu.units import Bytes, Milliseconds, Wei
from hypergpu.work_units import WorkUnit

FARM_UNITS = [unit for unit in WorkUnit if unit is not WorkUnit.SAMPLES]


class LeasedResult(NamedTuple):
    """A result that counts: who gave it, under which lease, and how many units it has."""

    key: IdentityKey
    lease: int
    units: int


class FarmPlan(JobPlan, frozen=True, kw_only=True):
    """A farm job whose results are not made by anybody."""

    counted_in: WorkUnit = WorkUnit.ITEMS

    @property
    def unit(self) -> WorkUnit:
        """What its work is counted in."""
        return self.counted_in

    def first_rows(self, terms: Terms) -> list[tuple[str, msgspec.Struct]]:
        """The row that the job begins with."""
        pay = FarmPay(
            unit_price=Wei(self.unit_price),
            budget=Wei(self.escrow),
            bundles_per_epoch=self.rounds_per_epoch,
            request=digest_of(b"a request"),
            manifest=digest_of(b"a manifest"),
        )
        creation = MapCreatedEvent(
            self.job_id, "checksum", 1_000, self.unit.value, terms=terms, pay=pay
        )
        return [("MapCreated", creation)]

    def bundle_row(
        self, number: int, terms: Terms, results: Iterable[LeasedResult]
    ) -> tuple[str, BundleAcceptedEvent]:
        """The row of an accepted bundle."""
        works = tuple(measured_result(self, terms, result) for result in results)
        node, units = works[0].node, works[0].contribution.samples
        return "BundleAccepted", BundleAcceptedEvent(node, number, 0, 16, units, works=works)


def measured_result(plan: JobPlan, terms: Terms, result: LeasedResult) -> MeasuredWork:
    """A result as the row of its bundle has it."""
    blob = BlobRef(digest_of(b"result under lease %d" % result.lease), Bytes(4_096))
    contribution = result_contribution(
        terms,
        Lease(plan.job_id, 0, result.lease),
        result.key.node_id,
        digest_of(b"work under lease %d" % result.lease),
        blob,
        WorkAmount(result.units, Milliseconds(1_000)),
    )
    return MeasuredWork(
        contribution=contribution,
        signature=sign(result.key, separator_of(terms.domain), contribution),
        quality_bps=WHOLE_BPS,
        evaluator="map/1 single",
    )
