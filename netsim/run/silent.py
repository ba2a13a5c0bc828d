"""A view for machines: they get the report at the end and nothing before."""

from hypergpu.client.values import JobEvent
from hypergpu.terminal.progress import Progress


class SilentView:
    """Shows nothing."""

    def event(self, event: JobEvent, progress: Progress) -> None:
        """See `View`."""

    def refresh(self, progress: Progress) -> None:
        """See `View`."""

    def say(self, text: str) -> None:
        """See `View`."""
