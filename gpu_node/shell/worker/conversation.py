"""The worker's side of the pipe: a thread listens, so that aborts are heard between inner steps."""

import math
import queue
import threading
import traceback
from typing import BinaryIO

from gpu_node.shell.worker.messages import (
    Abort,
    Aborted,
    Draw,
    Drawn,
    Failed,
    NotDrawn,
    Progress,
    Ready,
    Reply,
    Request,
    Stop,
    Train,
    decode_request,
    encode,
)
from gpu_node.shell.worker.shard.watch import ShardAbortedError, ShardError, Watch
from gpu_node.shell.worker.workshop import Workshop
from hypergpu.wire.frames import FrameError, frame, read_frame
from hypergpu.wire.protocol import OUT_OF_MEMORY


class Conversation:
    """Requests in, replies out; replies are written by the training thread alone."""

    def __init__(self, requests: BinaryIO, replies: BinaryIO, log: BinaryIO) -> None:
        self._requests = requests
        self._replies = replies
        self._log = log
        self._waiting: queue.SimpleQueue[Train | Draw | Stop] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open_leases: set[int] = set()
        self._aborted_leases: set[int] = set()
        self._is_stopped = threading.Event()

    def hold(self, workshop: Workshop) -> int:
        """Talk until told to stop; gives the process's exit status."""
        threading.Thread(target=self._listen, name="listen", daemon=True).start()
        self._say(workshop.ready())
        while not isinstance(request := self._next(workshop), Stop):
            reply = self._answer(workshop, request)
            if self._is_stopped.is_set():
                break
            self._say(reply)
            if isinstance(reply, Failed | NotDrawn) and reply.is_fatal:
                return 1
        return 0

    def _next(self, workshop: Workshop) -> Train | Draw | Stop:
        """The next request. Until it comes steps of the next round are taken, if there are some."""
        while self._waiting.empty() and workshop.steps_ahead(self.log):
            pass
        return self._waiting.get()

    def _listen(self) -> None:
        try:
            while (payload := read_frame(self._requests)) is not None:
                if not self._hear(decode_request(payload)):
                    break
        except (FrameError, ValueError) as error:
            self.log(f"the daemon is not understood: {error}")
        self._is_stopped.set()
        self._waiting.put(Stop())

    def _hear(self, request: Request) -> bool:
        with self._lock:
            if isinstance(request, Train):
                self._open_leases.add(request.lease)
                self._waiting.put(request)
            elif isinstance(request, Draw):
                self._waiting.put(request)
            elif isinstance(request, Abort) and request.lease in self._open_leases:
                self._aborted_leases.add(request.lease)
        return not isinstance(request, Stop)

    def _answer(self, workshop: Workshop, request: Train | Draw) -> Reply:
        if isinstance(request, Draw):
            return self._draw(workshop, request)
        reply = self._train(workshop, request)
        with self._lock:
            self._open_leases.discard(request.lease)
            self._aborted_leases.discard(request.lease)
        return reply

    def _draw(self, workshop: Workshop, request: Draw) -> Reply:
        try:
            workshop.draw(request)
        except ShardError as error:
            return NotDrawn(number=request.number, reason=str(error))
        except Exception as error:  # noqa: BLE001 - as with training
            self.log(traceback.format_exc())
            why = failure(0, error)
            return NotDrawn(number=request.number, reason=why.reason, is_fatal=why.is_fatal)
        return Drawn(request.number)

    def _train(self, workshop: Workshop, request: Train) -> Reply:
        watch = Watch(lambda: self._refuse_aborted(request.lease), self._say, self.log)
        try:
            watch.refuse_aborted()
            return workshop.train(request, watch)
        except ShardAbortedError:
            return Aborted(request.lease)
        except ShardError as error:
            return Failed(lease=request.lease, reason=str(error))
        except Exception as error:  # noqa: BLE001 - a workload of another package may raise anything
            self.log(traceback.format_exc())
            return failure(request.lease, error)

    def _refuse_aborted(self, lease: int) -> None:
        with self._lock:
            is_aborted = lease in self._aborted_leases
        if is_aborted or self._is_stopped.is_set():
            raise ShardAbortedError

    def _say(self, reply: Ready | Reply) -> None:
        if isinstance(reply, Progress) and not math.isfinite(reply.loss):
            return
        self._replies.write(frame(encode(reply)))
        self._replies.flush()

    def log(self, line: str) -> None:
        """Tell people something, on the daemon's log."""
        self._log.write(f"{line}\n".encode())
        self._log.flush()


_MEMORY_SIGNS = (OUT_OF_MEMORY, "can't allocate memory")
_DRIVER = ("cuda error", "cuda driver", "cudnn", "cublas", "cusolver", "nccl", "hip error")
"""How torch's errors from below begin or what they name; they are plain `RuntimeError`s."""


def failure(lease: int, error: Exception) -> Failed:
    """After running out of memory or a driver's fault the process is not whole.

    Anything else, such as shapes that do not fit, is the work's fault and the worker is well.
    """
    text = str(error).splitlines()[0] if str(error) else ""
    lowered = text.lower()
    if isinstance(error, MemoryError) or any(sign in lowered for sign in _MEMORY_SIGNS):
        fix = "Fix: lower training.batch_size, use strategy aware or a larger device"
        reason = f"{OUT_OF_MEMORY}: {text or type(error).__name__}. {fix}"
        return Failed(lease=lease, reason=reason, is_fatal=True)
    is_of_the_driver = isinstance(error, RuntimeError) and (
        type(error).__name__ == "AcceleratorError" or any(sign in lowered for sign in _DRIVER)
    )
    reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return Failed(lease=lease, reason=reason, is_fatal=is_of_the_driver)
