"""Served models beside jobs that are paid."""

from contextlib import closing
from pathlib import Path

from benchmarks.ours.metering.host import COORDINATOR, ENDED, JobPlan, JournalHost
from coordinator.core.work.work_events import JobEnded
from hypergpu.ids import JobId
from hypergpu.ledger_terms import Domain, terms_of
from hypergpu.units import Milliseconds
from payments.shell.projection import Projection
from payments.shell.store import PaymentStore
from tests.kinds.serving.walk import walk_by_seed

PAID = JobPlan(nodes=2, rounds_per_epoch=1)


async def test_a_served_model_that_was_stopped_keeps_nobody_from_their_pay(tmp_path: Path) -> None:
    host = JournalHost(tmp_path)
    end_event = JobEnded(at_ms=Milliseconds(9), phase="stopped", reason="its user")
    served_id = JobId("job-s")
    journal = [*walk_by_seed(1).journal, end_event]
    host.append(served_id, [(type(event).__name__, event) for event in journal])
    terms = terms_of(COORDINATOR.address, PAID.job_id, Domain())
    host.append(PAID.job_id, [*PAID.first_rows(terms), PAID.round_row(0, terms), ENDED])
    with closing(PaymentStore("", tmp_path)) as store:
        projection = Projection(host, store)
        await projection.advance()
        assert projection.states[served_id].is_over
        assert not projection.states[served_id].nodes
        assert {node: len(receipts) for node, receipts in host.received.items()} == {
            key.node_id: 1 for key in PAID.keys
        }
