"""What events and summaries of a farm job make of the feed's state."""

from typing import Any

import msgspec
from msgspec.structs import replace

from dashboard_api.core.projection import FeedProjection
from dashboard_api.core.state import FeedState
from hypergpu.user.client import JobEvent
from hypergpu.user.client.bundle_progress import BundlesView, OpenRunView
from tests.dashboard_journal import JOB, START_MS, node_id, summary

ITEMS = 1_000


def fold(*events: tuple[str, dict[str, Any]], step_ms: int = 1_000) -> FeedProjection:
    projection = FeedProjection("somewhere:7700")
    first = ("MapCreated", {"job_id": JOB, "item_kind": "embed", "items": ITEMS, "unit": "items"})
    for sequence, (kind, body) in enumerate((first, *events)):
        at_ms = START_MS + step_ms * sequence
        projection.take_event(JOB, JobEvent(sequence, 0, kind, body), at_ms)
    return projection


def farm(projection: FeedProjection) -> Any:
    msgspec.convert(projection.state, FeedState)
    return projection.state["jobs"][JOB]["farm"]


def acceptance(node: int, start: int, items: int, **more: Any) -> tuple[str, dict[str, Any]]:
    body = {"node": node_id(node), "bundle": start, "start": start, "items": items, "units": items}
    return "BundleAccepted", {**body, **more}


def test_items_of_a_bundle_are_settled_in_each_tile_that_it_touches() -> None:
    state = farm(fold(acceptance(1, 3, 12), ("ItemDropped", {"item": 999, "reason": "failed"})))
    assert state["tile_items"] == 5
    assert state["settled_by_tile"] == {"0": 2, "1": 5, "2": 5, "199": 1}


def test_a_node_has_its_work_and_its_speed_between_results() -> None:
    state = farm(
        fold(
            acceptance(1, 0, 10),
            acceptance(2, 10, 50, failures=3),
            acceptance(1, 60, 40),
            ("BundleHandedBack", {"node": node_id(1), "bundle": 9, "reason": "out of memory"}),
        )
    )
    one, two = (state["nodes"][node_id(number)] for number in (1, 2))
    assert (one["items"], one["bundles"], one["items_per_s"], one["handed_back"]) == (50, 2, 20, 1)
    assert (two["items"], two["failures"], two["items_per_s"]) == (50, 3, None)


def test_a_doubted_result_marks_the_tile_of_its_bundle() -> None:
    doubt = {"node": node_id(3), "bundle": 20, "reason": "two other nodes agree"}
    other = {**doubt, "bundle": 77}
    state = farm(fold(acceptance(1, 20, 5), ("ResultDoubted", doubt), ("ResultDoubted", other)))
    assert state["doubted_by_tile"] == {"4": 1}
    assert state["nodes"][node_id(3)]["doubts"] == 2


def test_a_summary_tells_what_is_out_also_before_the_journal_is_read() -> None:
    bundles = BundlesView(
        ITEMS, 40, 1, 40, "tokens", 2, "score", 43, open_runs=(OpenRunView(40, 8),)
    )
    projection = FeedProjection("somewhere:7700")
    projection.take_jobs([replace(summary(), bundles=bundles)])
    state = farm(projection)
    assert (state["item_kind"], state["units"], state["unit"]) == ("score", 40, "tokens")
    assert state["credited_units"] == 43
    assert state["open_runs"] == [{"start": 40, "items": 8}]
    assert FeedProjection("x").state["jobs"] == {}


def test_a_training_has_no_farm() -> None:
    projection = FeedProjection("somewhere:7700")
    projection.take_jobs([summary()])
    assert projection.state["jobs"][JOB]["farm"] is None
