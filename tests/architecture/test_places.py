"""Places that one addition touches: each meaning has one home."""

import ast
from typing import get_args

from coordinator.core.farm.events import FarmEvent
from coordinator.core.serving.events import ServeEvent
from coordinator.core.training.job.events import Event
from hypergpu.journal.events import event_types
from hypergpu.journal.sentences import SENTENCES
from tests.architecture.tree import modules, one_per_line

EVENT_PLACES = {
    "coordinator/core/farm/events.py",
    "coordinator/core/serving/events.py",
    "coordinator/core/training/job/events.py",
    "hypergpu/journal/events.py",
    "hypergpu/journal/farm_events.py",
    "hypergpu/journal/sentences.py",
    "hypergpu/journal/serving_events.py",
}
PROCESSES = {"coordinator", "dashboard_api", "gpu_node", "hypergpu", "netsim", "payments"}


def test_each_event_has_its_public_form_and_its_sentence() -> None:
    events = (*get_args(Event), *get_args(FarmEvent), *get_args(ServeEvent))
    kinds = {kind.__name__ for kind in events}
    assert kinds == set(event_types()) == set(SENTENCES)


def test_an_event_is_described_in_three_places() -> None:
    elsewhere = [
        f"{path}:{node.lineno} {node.value!r}"
        for path, nodes in modules()
        if path.parts[0] in PROCESSES and str(path) not in EVENT_PLACES
        for node in nodes
        if isinstance(node, ast.Constant) and node.value in SENTENCES
    ]
    assert not elsewhere, one_per_line(elsewhere)
