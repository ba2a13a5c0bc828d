import sys
from pathlib import Path

from gpu_node.core.commands import NodeCommand, SetTimer
from gpu_node.core.events import NodeEvent
from gpu_node.core.session import transition
from gpu_node.core.state import LinkPhase, NodeSession
from tests.unit.node.node_states import all_events, states

TABLE = Path(__file__).parents[1] / "session_pairs.txt"


def place(session: NodeSession) -> str:
    """Where a session is, in a few words."""
    worker = "busy" if session.worker.busy else "resting" if session.worker.retry_at_ms else "free"
    return f"{session.link.phase.value} | {type(session.work).__name__.lower()} | {worker}"


def command_name(command: NodeCommand) -> str:
    name = type(command).__name__
    return f"{name} {command.timer.value}" if isinstance(command, SetTimer) else name


def outcome(session: NodeSession, event: NodeEvent) -> str:
    """One cell: nothing, or the place after the event and the commands it leads to."""
    step = transition(session, event)
    if step == (session, ()):
        return "ignored"
    names = ", ".join(command_name(command) for command in step.commands)
    return f"-> {place(step.session)} [{names}]"


def pair_table() -> str:
    """Every state against every event, one line a pair."""
    lines = [
        f"{state:25} {name:26} {outcome(session, event)}"
        for state, session in states().items()
        for name, event in all_events().items()
    ]
    return "\n".join(lines) + "\n"


def test_the_table_covers_every_connection_and_every_event() -> None:
    covered = {session.link.phase for session in states().values()}
    assert covered == set(LinkPhase) - {LinkPhase.JOIN_WAITING}
    assert {type(event) for event in all_events().values()} == set(NodeEvent.__subclasses__())


def test_every_pair_has_its_committed_outcome() -> None:
    assert pair_table() == TABLE.read_text()


def test_a_node_that_left_ignores_everything() -> None:
    left = states()["left"]
    assert all(transition(left, event) == (left, ()) for event in all_events().values())


def test_an_event_of_another_lease_leaves_the_work_alone() -> None:
    training = states()["training"]
    for event in all_events().values():
        held = getattr(event, "lease", None)
        if held is not None:
            other = held.__class__(held.job_id, held.round, 99)
            stray = event.__class__(**{**_fields(event), "lease": other})
            assert transition(training, stray).session.work == training.work


def _fields(event: NodeEvent) -> dict[str, object]:
    return {name: getattr(event, name) for name in event.__struct_fields__}


if __name__ == "__main__":
    sys.exit(TABLE.write_text(pair_table()) == 0)
