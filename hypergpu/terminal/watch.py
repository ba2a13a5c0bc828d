"""Follow a job until it ends: its events once each, across breaks of the connection."""

import contextlib
import queue
import threading
import time
from collections.abc import Iterator

import grpc
import msgspec

from hypergpu.client.calls import RESTARTING, Coordinator
from hypergpu.client.failures import explanation, is_away
from hypergpu.client.values import event_line, job_view, participant_view
from hypergpu.errors import HyperGPUError
from hypergpu.terminal.progress import (
    ENDED,
    Progress,
    with_event,
    with_job,
    with_participants,
)
from hypergpu.terminal.views import View
from hypergpu.v1 import job_pb2

TICK_S = 0.5
QUIET_TICKS = 20
"""An ended job whose stream stays open and silent for so long has told everything."""
SUMMARY_EVERY_S = 1.0
RETRY_MOST_S = 5.0
AWAY_MOST_S = 600.0
"""A coordinator away for longer ends the watch; restarting one takes seconds."""


Message = job_pb2.WatchJobResponse | Exception


class Follower:
    """Reads a job's stream in a thread of its own, opening it again from where it broke."""

    def __init__(self, coordinator: Coordinator, job_id: str, from_sequence: int = 0) -> None:
        self._coordinator = coordinator
        self._job_id = job_id
        self._next_sequence = from_sequence
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._is_complete = False

    @property
    def has_told_all(self) -> bool:
        """The coordinator has closed the stream, so that nothing more comes, and all was taken."""
        return self._is_complete and self._inbox.empty()

    def start(self) -> None:
        """Begin to read. The thread dies with the process."""
        threading.Thread(target=self._read, name="watch", daemon=True).start()

    def stop(self) -> None:
        """Read no further."""
        self._is_over.set()

    def messages(self, timeout_s: float) -> Iterator[job_pb2.WatchJobResponse]:
        """What has arrived, waiting at most ``timeout_s`` for the first.

        Raises:
            HyperGPUError: The stream is refused for good.
        """
        with contextlib.suppress(queue.Empty):
            message = self._inbox.get(timeout=timeout_s)
            while True:
                if isinstance(message, Exception):
                    raise message
                yield message
                message = self._inbox.get_nowait()

    def _read(self) -> None:
        away_since_s: float | None = None
        pause_s = 0.2
        while not self._is_over.is_set():
            try:
                for message in self._coordinator.watch(self._job_id, self._next_sequence):
                    away_since_s, pause_s, self._is_complete = None, 0.2, False
                    if message.HasField("event"):
                        self._next_sequence = message.event.sequence + 1
                    self._inbox.put(message)
                self._is_complete = True
            except grpc.RpcError as broken:
                now_s = time.monotonic()
                away_since_s = now_s if away_since_s is None else away_since_s
                if not is_away(broken) or now_s - away_since_s > AWAY_MOST_S:
                    self._inbox.put(explanation(broken, self._coordinator.address))
                    return
            self._is_over.wait(pause_s)
            pause_s = min(RETRY_MOST_S, pause_s * 2)


def follow(coordinator: Coordinator, job_id: str, view: View) -> Progress:
    """Show a job from its first event until it has ended.

    Raises:
        HyperGPUError: The job is unknown, or its coordinator stays away.
    """
    watched = Watched(coordinator, job_id, view)
    try:
        while not watched.has_ended:
            watched.tick()
        return watched.progress
    finally:
        watched.close()


class Watched:
    """A job being followed, a tick at a time, for callers that do other things between ticks."""

    def __init__(self, coordinator: Coordinator, job_id: str, view: View) -> None:
        self._coordinator = coordinator
        self._job_id = job_id
        self._view = view
        self._quiet_ticks = 0
        self._is_away = False
        self.progress = self._asked(Progress())
        self._asked_at_s = time.monotonic()
        self._follower = Follower(coordinator, job_id)
        self._follower.start()

    @property
    def has_ended(self) -> bool:
        """The job is over and everything journalled has been shown."""
        job = self.progress.job
        is_told = self._follower.has_told_all and self._quiet_ticks > 0
        is_over = job is not None and job.phase in ENDED
        return is_over and (is_told or self._quiet_ticks >= QUIET_TICKS)

    def tick(self) -> None:
        """Take in what arrived within half a second and show it."""
        before = self.progress.next_sequence
        for message in self._follower.messages(TICK_S):
            self._take(message)
        is_quiet = self.progress.next_sequence == before
        self._quiet_ticks = self._quiet_ticks + 1 if is_quiet else 0
        now_s = time.monotonic()
        if now_s - self._asked_at_s >= SUMMARY_EVERY_S:
            self._asked_at_s = now_s
            self.progress = self._asked(self.progress)
        self._view.refresh(self.progress)

    def close(self) -> None:
        """Stop following."""
        self._follower.stop()

    def _take(self, message: job_pb2.WatchJobResponse) -> None:
        if message.HasField("event"):
            event = event_line(message.event)
            self.progress = with_event(self.progress, event)
            self._view.event(event, self.progress)
        else:
            found = tuple(participant_view(each) for each in message.progress.participants)
            self.progress = with_participants(self.progress, found)

    def _asked(self, progress: Progress) -> Progress:
        try:
            found = self._coordinator.job(self._job_id)
        except HyperGPUError as refused:
            # A coordinator that is being restarted is no reason to stop watching.
            if progress.job is None or refused.reason not in RESTARTING:
                raise
            reason = "the coordinator is away, trying again"
            self._say_away(is_away=True)
            away = msgspec.structs.replace(progress.job, reason=reason)
            return msgspec.structs.replace(progress, job=away)
        self._say_away(is_away=False)
        participants = tuple(participant_view(each) for each in found.participants)
        return with_job(progress, job_view(found.job), participants)

    def _say_away(self, *, is_away: bool) -> None:
        """Say it once when the coordinator goes, and once when it is there again."""
        if is_away != self._is_away:
            self._is_away = is_away
            self._view.say(
                "lost the coordinator, trying again" if is_away else "the coordinator is back"
            )
