"""Receipts of farm jobs: one for each result that counts, in one unit, in any order of leases."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.ours.metering.host import COORDINATOR, ENDED, JOB, JournalHost, node_key
from hypergpu.errors import HyperGPUError
from hypergpu.journal.farm_events import PartConfirmedEvent
from hypergpu.journal.worth import worth
from hypergpu.ledger_terms import Domain, Terms, job_salt, terms_of
from hypergpu.statements import SignedReceipt, receipt_fault
from hypergpu.units import Wei
from hypergpu.wire.messages import terms_message, terms_value
from hypergpu.work_units import WorkUnit
from payments.core.ledger import LedgerState, adopt, decode, fold, folded_anew
from payments.core.verify import ReceiptFile, decode_file, encode_file, verify
from payments.shell.projection import Projection
from payments.shell.store import PaymentStore
from tests.farm_plan import FARM_UNITS, FarmPlan, LeasedResult, measured_result

KEYS = [node_key(number) for number in range(3)]
PRICE = 1_700_003
PLAN = FarmPlan(nodes=3, unit_price=PRICE, rounds_per_epoch=2)
NOWHERE = Domain()


def terms_in(unit: WorkUnit) -> Terms:
    """Terms of the job in a unit."""
    return terms_of(COORDINATOR.address, JOB, NOWHERE, unit)


ITEMS = terms_in(WorkUnit.ITEMS)
bundles = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True), max_size=12)


def rows_of(
    counted: list[list[int]], terms: Terms = ITEMS, leases: list[int] | None = None
) -> list[tuple[str, msgspec.Struct]]:
    """A journal in which these nodes' results counted, bundle by bundle.

    Args:
        counted: Nodes of each bundle.
        terms: The job's.
        leases: Numbers of the leases in the order of acceptance; None: ascending.
    """
    numbers = iter(leases or range(1, 1 + sum(map(len, counted))))
    rows = PLAN.first_rows(terms)
    for bundle, nodes in enumerate(counted):
        results = [LeasedResult(KEYS[node], next(numbers), 16 + node) for node in nodes]
        rows.append(PLAN.bundle_row(bundle, terms, results))
    return rows


def receipts_of(
    folder: Path, rows: list[tuple[str, msgspec.Struct]]
) -> tuple[Projection, list[SignedReceipt]]:
    """Receipts that a coordinator signs for a journal."""
    host = JournalHost(folder)
    host.append(JOB, rows)
    store = PaymentStore("", folder)
    projection = Projection(host, store)
    projection.fold_rows(JOB)
    receipts = [each for key in KEYS for each in store.receipts(JOB, key.node_id)]
    store.close()
    return projection, receipts


def fold_rows(
    rows: list[tuple[str, msgspec.Struct]], state: LedgerState | None = None
) -> LedgerState:
    """The fold of rows."""
    for kind, body in rows:
        fact = decode(kind, msgspec.json.encode(body))
        assert fact is not None
        state = fold(state, fact).state
    assert state is not None
    return state


@settings(max_examples=30)
@given(counted=bundles, draws=st.data())
def test_every_result_that_counts_is_paid_once_in_whatever_order_leases_come_in(
    counted: list[list[int]], draws: st.DataObject
) -> None:
    leases = draws.draw(st.permutations(range(1, 1 + sum(map(len, counted)))))
    state = fold_rows([*rows_of(counted, leases=list(leases)), ENDED])
    for number, key in enumerate(KEYS):
        count = sum(number in nodes for nodes in counted)
        tally = state.nodes.get(key.node_id)
        assert (tally.count if tally else 0) == count
        assert (tally.total_score if tally else 0) == count * (16 + number) * 10_000
    assert state.measured_samples == sum(16 + number for nodes in counted for number in nodes)
    assert state.ended_epochs == -(-len(counted) // PLAN.rounds_per_epoch)


@pytest.mark.parametrize("unit", FARM_UNITS)
def test_receipts_of_every_unit_are_sound_and_of_that_unit_alone(
    unit: WorkUnit, tmp_path: Path
) -> None:
    terms = terms_in(unit)
    _, receipts = receipts_of(tmp_path, rows_of([[0, 1], [2], [1]], terms, [2, 4, 3, 1]))
    assert [receipt_fault(each, NOWHERE, COORDINATOR.address) for each in receipts] == [""] * 4
    file = ReceiptFile(JOB, terms, Wei(PRICE), tuple(receipts))
    findings = verify(decode_file(encode_file(file), source="file"))
    assert (findings.faults, findings.open) == ((), ())
    assert [each.worth for each in sorted(findings.nodes, key=lambda each: each.total_score)] == [
        worth(PRICE, units * 10_000) for units in (16, 18, 34)
    ]
    for other in WorkUnit:
        if other is not unit:
            assert terms_in(other).job != terms.job
            mixed_file = replace(file, terms=replace(terms, stated_unit=other))
            with pytest.raises(HyperGPUError, match="the terms are not those of"):
                decode_file(encode_file(mixed_file), source="file")
            faults = verify(replace(file, terms=terms_in(other))).faults
            assert sum("it is of another job" in fault for fault in faults) == len(receipts)


def test_samples_keep_the_key_and_the_bytes_of_before() -> None:
    terms = terms_in(WorkUnit.SAMPLES)
    assert terms == Terms(terms.job, COORDINATOR.address, NOWHERE)
    assert job_salt(JOB, WorkUnit.SAMPLES) == job_salt(JOB)
    assert b"unit" not in msgspec.json.encode(terms)
    assert terms_message(terms, epoch=0).unit == ""
    assert terms.match(JOB)


@pytest.mark.parametrize("unit", WorkUnit)
def test_the_unit_of_terms_goes_over_the_wire(unit: WorkUnit) -> None:
    terms = terms_in(unit)
    assert terms_value(terms_message(terms, epoch=0)) == terms
    message = terms_message(terms, epoch=0)
    message.unit = "credits"
    with pytest.raises(HyperGPUError, match="not in 'credits'"):
        terms_value(message)


def test_two_receipts_for_one_lease_and_work_of_no_units_are_faults(tmp_path: Path) -> None:
    _, receipts = receipts_of(tmp_path, rows_of([[0], [0], [0]], leases=[5, 6, 5]))
    faults = verify(ReceiptFile(JOB, ITEMS, Wei(PRICE), tuple(receipts))).faults
    assert faults == (f"{KEYS[0].node_id}: receipt 2: lease 5 has receipt 0 already",)
    empty = replace(receipts[0], receipt=replace(receipts[0].receipt, samples=0))
    faults = verify(ReceiptFile(JOB, ITEMS, Wei(PRICE), (empty,))).faults
    assert any("it is for no work" in fault for fault in faults)


def test_a_journal_that_is_folded_anew_pays_nothing_a_second_time(tmp_path: Path) -> None:
    nodes_by_bundle = [[0, 1], [2], [1]]
    before, receipts = receipts_of(tmp_path, rows_of(nodes_by_bundle))
    (tmp_path / "journal.jsonl").unlink()
    host = JournalHost(tmp_path)
    # An older copy: the last bundle is not in it, and is done again under other leases.
    host.append(JOB, rows_of([*nodes_by_bundle[:2], [0]], leases=[1, 2, 3, 9]))
    store = PaymentStore("", tmp_path)
    projection = Projection(host, store)
    projection.fold_rows(JOB)
    later = {key.node_id: store.receipts(JOB, key.node_id) for key in KEYS}
    store.close()
    assert [len(later[key.node_id]) for key in KEYS] == [2, 2, 1]
    assert all(each in later[each.receipt.node] for each in receipts)
    assert before.states[JOB].nodes[KEYS[1].node_id].count == 2


def test_leases_that_an_adopted_receipt_may_cover_give_none_a_second_time(tmp_path: Path) -> None:
    _, receipts = receipts_of(tmp_path, rows_of([[0], [0]]))
    newest = next(each for each in receipts if each.receipt.sequence == 1)
    state = adopt(fold_rows(PLAN.first_rows(ITEMS)), newest.receipt)
    state = fold_rows(rows_of([[0], [0], [0]])[1:], state)
    tally = state.nodes[KEYS[0].node_id]
    assert (tally.count, tally.total_score) == (3, 3 * 16 * 10_000)
    assert adopt(state, newest.receipt) is state


def test_votes_that_outvoted_a_result_are_paid_and_count_as_no_bundle() -> None:
    rows = rows_of([[0], [1]])
    results = [LeasedResult(KEYS[2], 8, 2), LeasedResult(KEYS[0], 9, 2)]
    works = tuple(measured_result(PLAN, ITEMS, result) for result in results)
    rows.append(("PartConfirmed", PartConfirmedEvent(5, 4, works)))
    state = fold_rows(rows)
    assert state.accepted_bundles == 2
    assert [state.nodes[key.node_id].total_score // 10_000 for key in KEYS] == [18, 17, 2]


def test_results_that_were_signed_for_another_job_give_no_receipt() -> None:
    foreign_result = measured_result(PLAN, terms_in(WorkUnit.TOKENS), LeasedResult(KEYS[0], 1, 9))
    kind, body = PLAN.bundle_row(0, ITEMS, [LeasedResult(KEYS[1], 2, 16)])
    row = msgspec.structs.replace(body, works=(foreign_result, *body.works))
    state = fold_rows([*PLAN.first_rows(ITEMS), (kind, row)])
    assert list(state.nodes) == [KEYS[1].node_id]


def test_a_farm_job_of_an_earlier_version_has_no_receipts() -> None:
    first = msgspec.json.encode({"job_id": JOB, "item_kind": "embed", "items": 9, "unit": "items"})
    row = {"node": "n", "bundle": 0, "start": 0, "items": 9, "units": 9}
    facts = [decode("MapCreated", first), decode("BundleAccepted", msgspec.json.encode(row))]
    state = None
    for fact in facts:
        assert fact is not None
        folded_fact = fold(state, fact)
        state = folded_fact.state
        assert folded_fact.receipts == ()
    assert state is not None
    assert state.unit_price == 0
    assert folded_anew(state) == state
