"""A child process that is asked in frames, and may be lost at any time."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import BinaryIO, cast

import msgspec

from hypergpu.engine.tasks import EngineTask
from hypergpu.frames import FrameError, frame, read_frame
from hypergpu.privacy import public_environment


class ChildLostError(Exception):
    """The process ended before it answered."""


class FramedChild:
    """One process; it is started by the first frame, and by the next one after it was lost.

    It ends when its stdin does, so also with whoever started it.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start nothing yet. Without an environment it gets the public part of this process's."""
        self._command = command
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()
        self._is_over = False

    @property
    def process_id(self) -> int | None:
        """Id of the running process; None: none runs."""
        return None if self._process is None else self._process.pid

    def ask(self, payload: bytes) -> bytes:
        """Send a frame and wait for the one that answers it.

        Raises:
            ChildLostError: It ended, or wrote something else.
        """
        with self._turn:
            self.send(payload)
            return self.receive()

    def send(self, payload: bytes) -> None:
        """Send a frame. One thread at a time.

        Raises:
            ChildLostError: It ended, or `end` was called.
        """
        if self._is_over:
            raise ChildLostError("it was ended")
        process = self._process = self._process or self._start()
        try:
            stdin = cast(BinaryIO, process.stdin)
            stdin.write(frame(payload))
            stdin.flush()
        except (FrameError, OSError, ValueError) as error:
            self._kill()
            raise ChildLostError(str(error)) from error

    def receive(self) -> bytes:
        """Wait for its next frame. One thread at a time.

        Raises:
            ChildLostError: It ended, or wrote something else.
        """
        process = self._process
        try:
            answer = None if process is None else read_frame(cast(BinaryIO, process.stdout))
        except (FrameError, OSError, ValueError) as error:
            self._kill()
            raise ChildLostError(str(error)) from error
        if answer is None:
            self._kill()
            raise ChildLostError("it ended")
        return answer

    def end(self) -> None:
        """Kill it for good: whatever it does can be done again."""
        self._is_over = True
        self._kill()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=public_environment() if self._environment is None else self._environment,
            start_new_session=True,
        )

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        # All that it started, too, also where it ended by itself.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class TaskBatch(msgspec.Struct, frozen=True):
    """Tasks that are asked together."""

    number: int
    tasks: list[EngineTask]


class BatchResults(msgspec.Struct, frozen=True):
    """Their results in the same order. Batches are answered in any order."""

    number: int
    results: list[bytes | None]
    """None: its worker was lost."""


class Opened(msgspec.Struct, frozen=True):
    """The first frame of a driver, in answer to an empty one."""

    workers: int = 0
    failure: str = ""
