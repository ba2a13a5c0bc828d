"""Public events of served models. Calls and answers are in none: they are nobody's to keep."""

from hypergpu.ids import JobId
from hypergpu.journal.public_event import PublicEvent


class ServeCreatedEvent(PublicEvent, frozen=True):
    """A user asked for a model to be served."""

    job_id: JobId
    model: str
    """Name that calls ask for."""


class ReplicaHandedBackEvent(PublicEvent, frozen=True):
    """A node does not hold the model, or no longer."""

    node: str
    reason: str = ""


SERVING_EVENTS: tuple[type[PublicEvent], ...] = (ServeCreatedEvent, ReplicaHandedBackEvent)
"""All of them."""
