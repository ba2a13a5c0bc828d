"""A view that remembers what a job's events tell and shows them on another view."""

from hypergpu.client.history import History, extended
from hypergpu.client.values import EventLine
from hypergpu.terminal.progress import Progress
from hypergpu.terminal.views import View


class RecordingView:
    """Everything goes on to ``shown``."""

    def __init__(self, shown: View) -> None:
        self._shown = shown
        self.history = History()

    def event(self, event: EventLine, progress: Progress) -> None:
        """Remember it."""
        self.history = extended(self.history, event)
        self._shown.event(event, progress)

    def refresh(self, progress: Progress) -> None:
        """See `View`."""
        self._shown.refresh(progress)

    def say(self, text: str) -> None:
        """See `View`."""
        self._shown.say(text)
