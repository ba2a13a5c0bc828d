"""One suite for every kind of work: a journal that is cut at any row goes on as if it was not."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest

from coordinator.core.work.work_events import StampedEvent
from coordinator.shell.driver.kinds import ShellKind
from coordinator.shell.driver.replay import event_entry, replay_entries, state_json
from coordinator.shell.store.journal.records import Entry
from hypergpu.ids import JobId
from netsim.virtual.simulation import Simulation
from netsim.virtual.worlds import random_world
from tests.kinds.echo.walk import walk
from tests.kinds.farm.walk import walk as farm_walk
from tests.kinds.table import KINDS_OF_TESTS

SEEDS = range(3)


class KindJournal(NamedTuple):
    """A journal of one job."""

    kind: ShellKind
    rows: tuple[Entry, ...]


def _journal(events: Sequence[StampedEvent]) -> KindJournal:
    kind = KINDS_OF_TESTS.begun_by(events[0])
    assert kind is not None
    rows = (event_entry(JobId("job-1"), number, event) for number, event in enumerate(events))
    return KindJournal(kind, tuple(rows))


@cache
def journal_of(kind: str, seed: int) -> KindJournal:
    """A journal in which a lot goes wrong."""
    if kind == "echo":
        return _journal(walk(seed).journal)
    if kind == "map":
        return _journal(farm_walk(seed).journal)
    simulation = Simulation(random_world(seed))
    simulation.run()
    return _journal(next(iter(simulation.journals.values())))


@pytest.fixture(params=[(kind.core.name, seed) for kind in KINDS_OF_TESTS for seed in SEEDS])
def journal(request: pytest.FixtureRequest) -> KindJournal:
    return journal_of(*request.param)


def test_a_row_is_read_as_it_was_written(journal: KindJournal) -> None:
    kind, rows = journal
    for row in rows:
        again = event_entry(row.job_id, row.sequence, kind.stored_event(row.body_json))
        assert again == row


def test_a_job_goes_on_from_a_snapshot_after_any_row(journal: KindJournal) -> None:
    kind, rows = journal
    machine = kind.core
    job: Any = None
    for row in rows:
        event = kind.stored_event(row.body_json)
        restored_job = None if job is None else kind.stored_state(state_json(job))
        step, again = machine.transition(job, event), machine.transition(restored_job, event)
        assert state_json(again.job) == state_json(step.job)
        assert again.commands == step.commands
        assert machine.outstanding(again.job) == machine.outstanding(step.job)
        job = step.job


def test_rows_after_any_cut_lead_to_the_same_state(journal: KindJournal) -> None:
    kind, rows = journal
    whole = state_json(replay_entries(kind, None, rows))
    for cut in range(1, len(rows), max(1, len(rows) // 40)):
        before = state_json(replay_entries(kind, None, rows[:cut]))
        rest = replay_entries(kind, kind.stored_state(before), rows[cut:])
        assert state_json(rest) == whole


def test_what_a_node_has_pending_is_outstanding(journal: KindJournal) -> None:
    kind, rows = journal
    machine = kind.core
    job: Any = None
    for row in rows:
        job = machine.transition(job, kind.stored_event(row.body_json)).job
        pending_work = [work for node in job.members for work in machine.pending(job, node)]
        commands = machine.outstanding(job)
        assert all(work.command in commands for work in pending_work)
