"""Journalled events of served models into changes of the feed's state."""

from dashboard_api.core.changes import Draft
from hypergpu.journal.public_event import PublicEvent
from hypergpu.journal.serving_events import ServeCreatedEvent, VersionPublishedEvent
from hypergpu.serving.serve_request import SERVE_KIND


def take_serving_event(draft: Draft, path: tuple[str, ...], event: PublicEvent, at_ms: int) -> None:
    """Fold an event of the job at the path; those of other kinds of jobs change nothing."""
    if isinstance(event, ServeCreatedEvent):
        values = {
            "created_at_ms": at_ms,
            "workload": SERVE_KIND,
            "name": event.model,
            "training": event.training,
            "round": event.rounds,
        }
        draft.set_each(path, values)
    elif isinstance(event, VersionPublishedEvent):
        draft.set_each(path, {"round": event.rounds})
