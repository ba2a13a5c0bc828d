import sys
from pathlib import Path
from typing import get_args

from coordinator.core.job.events import Event
from coordinator.core.job.state import Job, Phase
from coordinator.core.round.transition import rejection, transition
from tests.unit.job_states import all_events, states

TABLE = Path(__file__).with_name("pair_table.txt")


def outcome(job: Job, event: Event) -> str:
    """One cell: the refusal, or the phase after the event and the commands it leads to."""
    if reason := rejection(job, event):
        return f"refused: {reason}"
    step = transition(job, event)
    names = [type(command).__name__ for command in step.commands]
    return f"-> {step.job.phase.value} [{', '.join(names)}]"


def pair_table() -> str:
    """Every phase against every event, one line a pair."""
    lines = [
        f"{phase.value:11} {type(event).__name__:17} {outcome(job, event)}"
        for phase, job in states().items()
        for event in all_events()
    ]
    return "\n".join(lines) + "\n"


def test_the_table_covers_every_phase_and_every_event() -> None:
    assert set(states()) == set(Phase)
    assert {type(event) for event in all_events()} == set(get_args(Event))


def test_every_pair_has_its_committed_outcome() -> None:
    assert pair_table() == TABLE.read_text()


def test_a_refused_event_changes_nothing() -> None:
    for job in states().values():
        for event in all_events():
            if rejection(job, event):
                assert transition(job, event) == (job, ())


if __name__ == "__main__":
    sys.exit(TABLE.write_text(pair_table()) == 0)
