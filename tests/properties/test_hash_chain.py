"""A journal's hash chain: whatever is changed is found where it was changed."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from coordinator.shell.store.journal.journal import StoredRow, check_rows, genesis, next_head
from coordinator.shell.store.journal.records import Entry, Head
from hypergpu.ids import JobId

JOB = JobId("job-00000000000a")

bodies = st.lists(
    st.tuples(
        st.integers(0, 2**40), st.sampled_from(["JobCreated", "NodeJoined", ""]), st.binary()
    ),
    min_size=1,
    max_size=8,
)


def chain_rows(contents: list[tuple[int, str, bytes]]) -> tuple[list[Sequence[object]], Head]:
    head = genesis(JOB)
    rows: list[Sequence[object]] = []
    for sequence, (at_ms, kind, body) in enumerate(contents):
        head = next_head(head, Entry(JOB, sequence, at_ms, kind, body))
        rows.append(StoredRow(sequence, at_ms, kind.encode(), body, head.chain))
    return rows, head


def flip_bit(row: Sequence[object], column: int, bit: int) -> Sequence[object]:
    """The row with one bit changed, or with a type that never was stored when there is no bit."""
    stored_value = row[column]
    if isinstance(stored_value, int):
        wrong: object = stored_value ^ (1 << bit % 40)
    else:
        assert isinstance(stored_value, bytes)
        content = bytearray(stored_value)
        if content:
            content[bit // 8 % len(content)] ^= 1 << bit % 8
        wrong = bytes(content) if content else None
    return (*row[:column], wrong, *row[column + 1 :])


@given(bodies)
def test_an_untouched_chain_holds(contents: list[tuple[int, str, bytes]]) -> None:
    rows, end = chain_rows(contents)
    reading = check_rows(JOB, genesis(JOB), rows, end)
    assert not reading.damage
    assert [(one.at_ms, one.kind, one.body_json) for one in reading.entries] == contents


@given(bodies, st.data(), st.integers(0, 4), st.integers(0, 10_000))
def test_any_flipped_bit_is_found_where_it_is(
    contents: list[tuple[int, str, bytes]], drawn: st.DataObject, column: int, bit: int
) -> None:
    rows, end = chain_rows(contents)
    victim = drawn.draw(st.integers(0, len(rows) - 1))
    rows[victim] = flip_bit(rows[victim], column, bit)
    reading = check_rows(JOB, genesis(JOB), rows, end)
    assert reading.damage
    assert reading.head.sequence == victim - 1


@given(bodies, st.data())
def test_any_lost_row_truncation_or_foreign_row_is_found(
    contents: list[tuple[int, str, bytes]], drawn: st.DataObject
) -> None:
    rows, end = chain_rows(contents)
    lost_row = drawn.draw(st.integers(0, len(rows) - 1))
    for job_id, left_rows, good in (
        (JOB, rows[:lost_row] + rows[lost_row + 1 :], lost_row),
        (JOB, rows[:lost_row], lost_row),
        (JobId("job-00000000000b"), rows, 0),
    ):
        reading = check_rows(job_id, genesis(job_id), left_rows, end)
        assert reading.damage
        assert reading.head.sequence == good - 1
