"""What only the kind `echo` does: its leases end by time, and it ends with its last item."""

import pytest
from msgspec.structs import replace

from coordinator.core.work.work_commands import AssignWork, CancelWork, ReleaseNode, ReportAt
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds
from tests.kinds.at_work import NOW_MS, echo_at_work
from tests.kinds.echo.core.events import LeasesDue
from tests.kinds.echo.core.state import EchoPhase
from tests.kinds.echo.walk import walk
from tests.unit.job_states import ALICE, BOB


def test_a_lease_whose_time_is_over_ends_and_its_item_goes_out_again() -> None:
    at_work = echo_at_work()
    lease = at_work.lease_of(ALICE)
    due_ms = at_work.job.leases[ALICE].due_at_ms
    step = at_work.kind.transition(at_work.job, LeasesDue(at_ms=due_ms))
    cancels = [command for command in step.commands if isinstance(command, CancelWork)]
    assignments = [command for command in step.commands if isinstance(command, AssignWork)]
    assert [command.lease for command in cancels] == [lease]
    assert [command.assignment.lease.round for command in assignments] == [lease.round]
    assert assignments[0].assignment.lease.number > lease.number


def test_a_lease_is_not_due_before_its_time() -> None:
    at_work = echo_at_work()
    early = LeasesDue(at_ms=Milliseconds(at_work.job.leases[ALICE].due_at_ms - 1))
    assert at_work.kind.rejection(at_work.job, early) == "no lease is due"


def test_the_earliest_lease_is_timed() -> None:
    at_work = echo_at_work()
    timers = [each for each in at_work.kind.outstanding(at_work.job) if isinstance(each, ReportAt)]
    assert [each.at_ms for each in timers] == [at_work.job.leases[ALICE].due_at_ms]


def test_an_item_that_came_back_as_another_is_refused() -> None:
    at_work = echo_at_work()
    result = at_work.result(at_work.job, ALICE, at_work.lease_of(ALICE))
    changed_result = replace(result, text="another")
    assert at_work.kind.rejection(at_work.job, changed_result) == "item 0 came back as another"


def test_the_job_ends_with_its_last_item_and_lets_its_nodes_go() -> None:
    at_work = echo_at_work()
    commands: tuple[object, ...] = ()
    while not at_work.kind.has_ended(at_work.job):
        node = ALICE if at_work.kind.pending(at_work.job, ALICE) else BOB
        result = at_work.result(at_work.job, node, at_work.lease_of(node))
        commands = at_work.kind.transition(at_work.job, result).commands
        at_work = at_work.after(result)
    assert at_work.job.phase is EchoPhase.FINISHED
    assert set(at_work.job.returned) == set(range(5))
    free_nodes: list[NodeId] = [each.node for each in commands if isinstance(each, ReleaseNode)]
    assert free_nodes == [ALICE, BOB]
    assert at_work.job.at_ms == NOW_MS


@pytest.mark.parametrize("seed", range(30))
def test_no_item_is_lost_or_doubled_whatever_becomes_of_nodes(seed: int) -> None:
    job = walk(seed).job
    assert job.phase is EchoPhase.FINISHED
    assert sorted(job.returned) == list(range(len(job.items)))
    assert not job.waiting
    assert not job.leases
