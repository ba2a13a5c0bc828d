"""Receipts of served models, and jobs beside them that are paid."""

from contextlib import closing
from pathlib import Path

from benchmarks.ours.metering.host import COORDINATOR, ENDED, JobPlan, JournalHost
from coordinator.core.work.work_events import JobEnded
from hypergpu.ids import JobId
from hypergpu.ledger_terms import Domain, terms_of
from hypergpu.statements import receipt_fault
from hypergpu.units import Milliseconds
from payments.core.ledger import fold, folded_anew
from payments.shell.projection import Projection
from payments.shell.store import PaymentStore
from tests.kinds.serving.walk import walk_by_seed
from tests.serve_plan import CountedTokens, ServePlan

PAID = JobPlan(nodes=2, rounds_per_epoch=1)
SERVED = ServePlan(nodes=2, rounds_per_epoch=2)


async def test_a_served_model_that_was_stopped_keeps_nobody_from_their_pay(tmp_path: Path) -> None:
    host = JournalHost(tmp_path)
    end_event = JobEnded(at_ms=Milliseconds(9), phase="stopped", reason="its user")
    served_id = JobId("job-s")
    journal = [*walk_by_seed(4).journal, end_event]
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


async def test_counts_become_receipts_in_tokens_and_a_journal_cut_back_gives_none_twice(
    tmp_path: Path,
) -> None:
    host = JournalHost(tmp_path)
    terms = terms_of(COORDINATOR.address, SERVED.job_id, Domain(), SERVED.unit)
    one, two = SERVED.keys
    rows = [
        SERVED.window_row(terms, CountedTokens(one, 2, 500)),
        SERVED.window_row(terms, CountedTokens(two, 3, 70)),
        SERVED.window_row(terms, CountedTokens(one, 1, 30)),
    ]
    host.append(SERVED.job_id, [*SERVED.first_rows(terms), *rows])
    with closing(PaymentStore("", tmp_path)) as store:
        projection = Projection(host, store)
        await projection.advance()
        await projection.advance()
        receipts = store.receipts(SERVED.job_id, one.node_id)
        assert [each.receipt.round for each in receipts] == [2, 1]
        assert [each.receipt.total_score for each in receipts] == [5_000_000, 5_300_000]
        assert not any(receipt_fault(each, terms.domain, terms.coordinator) for each in receipts)
        state = projection.states[SERVED.job_id]
        assert (state.terms.unit.value, state.measured_samples) == ("tokens", 600)
        # An older copy of the journal takes its place, and other work takes the numbers.
        again = folded_anew(state)
        for _, event in rows:
            again, new_receipts = fold(again, event)
            assert not new_receipts
        newer_row = SERVED.window_row(terms, CountedTokens(one, 4, 9))
        again, new_receipts = fold(again, newer_row[1])
        assert [each.receipt.round for each in new_receipts] == [4]
        assert again.nodes[one.node_id].total_score == 5_390_000
