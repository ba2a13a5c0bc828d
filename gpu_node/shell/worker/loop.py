"""The loop of the worker: a thread listens, so that aborts are heard between inner steps."""

import math
import os
import queue
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from gpu_node.shell.worker import protocol
from gpu_node.shell.worker.performers import PERFORMERS, Performers
from gpu_node.shell.worker.trainer import ShardAbortedError, ShardCallbacks, ShardError
from gpu_node.shell.worker.trainers import Trainers
from hypergpu.assignment import FailureCause, Lease
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.frames import FrameError, frame, read_frame
from hypergpu.workloads.datasets import DatasetError, NodeDataError

_WorkRequest = protocol.TrainShard | protocol.DoWork | protocol.WriteInitialModel
WaitingRequest = _WorkRequest | protocol.StopWorker
_Call = protocol.CallWork | protocol.CancelCall


class WorkerLoop:
    """Answers requests one by one; replies are written by the training thread alone."""

    def __init__(
        self,
        requests: BinaryIO,
        replies: BinaryIO,
        log: BinaryIO,
        performers: Performers = PERFORMERS,
    ) -> None:
        self._performers = performers
        self._requests = requests
        self._replies = replies
        self._log = log
        self._waiting: queue.SimpleQueue[WaitingRequest] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open_leases: set[Lease] = set()
        self._aborted_leases: set[Lease] = set()
        self._calls: dict[Lease, queue.SimpleQueue[_Call | None]] = {}
        """Calls to work that is open, not yet taken; None wakes whoever waits for one."""
        self._is_stopped = threading.Event()

    def run(self, trainers: Trainers) -> int:
        """Serve until told to stop; gives the process's exit status."""
        threading.Thread(target=self._listen, name="listen", daemon=True).start()
        self._send(self._performers.added_to(trainers.capabilities()))
        while not isinstance(request := self._next(trainers), protocol.StopWorker):
            reply = self._answer(trainers, request)
            if self._is_stopped.is_set():
                break
            self._send(reply)
            if (
                isinstance(reply, protocol.ShardFailed | protocol.InitialModelFailed)
                and reply.is_fatal
            ):
                return 1
        return 0

    def _next(self, trainers: Trainers) -> WaitingRequest:
        """The next request. Until it comes, steps of the next round are taken, if it has some."""
        while self._waiting.empty() and trainers.advance_prefetch(self.log):
            pass
        return self._waiting.get()

    def _listen(self) -> None:
        try:
            while (payload := read_frame(self._requests)) is not None:
                request = protocol.decode_request(payload)
                if isinstance(request, protocol.StopWorker):
                    break
                self._accept(request)
        except (FrameError, ValueError) as error:
            self.log(f"the daemon is not understood: {error}")
        self._is_stopped.set()
        self._waiting.put(protocol.StopWorker())
        with self._lock:
            for calls in self._calls.values():
                calls.put(None)

    def _accept(self, request: protocol.Request) -> None:
        with self._lock:
            match request:
                case protocol.AbortShard(lease=lease):
                    self._note_abort(lease)
                case protocol.CallWork(lease=lease) | protocol.CancelCall(lease=lease):
                    if (calls := self._calls.get(lease)) is not None:
                        calls.put(request)
                case protocol.UseSpare() | protocol.StopWorker():
                    pass  # The one is in use, and the other ends the listening.
                case _:
                    self._note_open(request)
                    self._waiting.put(request)

    def _note_abort(self, lease: Lease) -> None:
        if lease in self._open_leases:
            self._aborted_leases.add(lease)
        if (calls := self._calls.get(lease)) is not None:
            calls.put(None)

    def _note_open(self, request: _WorkRequest) -> None:
        if isinstance(request, protocol.TrainShard | protocol.DoWork):
            self._open_leases.add(request.lease)
        if isinstance(request, protocol.DoWork):
            self._calls[request.lease] = queue.SimpleQueue()

    def _answer(self, trainers: Trainers, request: _WorkRequest) -> protocol.Reply:
        try:
            if isinstance(request, protocol.WriteInitialModel):
                trainers.write_initial_model(request)
                return protocol.InitialModelWritten(request.number)
            return self._compute(trainers, request)
        except ShardError as cause:
            error: Exception = cause
            failure = WorkFailure(str(error))
        except Exception as cause:  # noqa: BLE001 - a workload of another package may raise anything
            self.log(traceback.format_exc())
            error, failure = cause, work_failure(cause)
        failure = failure._replace(reason=without_places(failure.reason, _places_of(request)))
        if isinstance(request, protocol.WriteInitialModel):
            return protocol.InitialModelFailed(number=request.number, **failure._asdict())
        if isinstance(request, protocol.TrainShard) and request.node_dir:
            failure = self._without_data(request, error, failure)
        return protocol.ShardFailed(lease=request.lease, **failure._asdict())

    def _without_data(
        self, request: protocol.TrainShard, error: Exception, failure: "WorkFailure"
    ) -> "WorkFailure":
        """The failure as it may leave the node: an error's text may quote files of the node's own
        data, but for those that are made to leave it.
        """
        origin = error.__cause__ if isinstance(error, ShardError) else error
        if isinstance(error, ShardError) and not isinstance(origin, DatasetError):
            return failure
        if failure.cause is FailureCause.OUT_OF_MEMORY:
            return failure._replace(reason=failure.cause.value)
        name, detail = request.task.data_name, str(origin)
        if not isinstance(origin, NodeDataError):
            self.log(f"the data set {name} cannot be used: {failure.reason}")
            detail = "it cannot be used, and only the node's log says why"
        reason = str(HyperGPUError(Reason.OWNER_DATA, f"data set {name}: {detail}"))
        return failure._replace(reason=reason, cause=FailureCause.OWNER)

    def _compute(
        self, trainers: Trainers, request: protocol.TrainShard | protocol.DoWork
    ) -> protocol.ShardTrained | protocol.WorkDone | protocol.ShardAborted:
        lease = request.lease
        callbacks = ShardCallbacks(
            lambda: self._raise_if_aborted(lease),
            self._send,
            self.log,
            self._next_call_of(lease),
            self._send,
        )
        try:
            callbacks.raise_if_aborted()
            if isinstance(request, protocol.DoWork):
                output = self._performers.perform(request, callbacks)
                return protocol.WorkDone(lease, output.result, output.blob)
            return protocol.ShardTrained(lease, trainers.train(request, callbacks))
        except ShardAbortedError:
            return protocol.ShardAborted(lease)
        finally:
            with self._lock:
                self._open_leases.discard(lease)
                self._aborted_leases.discard(lease)
                self._calls.pop(lease, None)

    def _next_call_of(self, lease: Lease) -> Callable[[float], _Call | None]:
        """What gives the next call to the work of a lease, or None after so many seconds."""
        with self._lock:
            calls = self._calls.get(lease)

        def next_call(wait_s: float) -> _Call | None:
            if calls is None:
                return None
            try:
                return calls.get(timeout=wait_s) if wait_s > 0 else calls.get_nowait()
            except queue.Empty:
                return None

        return next_call

    def _raise_if_aborted(self, lease: Lease) -> None:
        with self._lock:
            is_aborted = lease in self._aborted_leases
        if is_aborted or self._is_stopped.is_set():
            raise ShardAbortedError

    def _send(self, reply: protocol.Reply) -> None:
        if isinstance(reply, protocol.ShardProgress) and not math.isfinite(reply.loss):
            return
        self._replies.write(frame(protocol.encode(reply)))
        self._replies.flush()

    def log(self, line: str) -> None:
        """Write a line for people, which the daemon logs."""
        self._log.write(f"{line}\n".encode())
        self._log.flush()


def _places_of(request: _WorkRequest) -> list[Path]:
    """Folders of this machine that errors may name."""
    if isinstance(request, protocol.DoWork):
        return [Path(each) for each in (request.input_dir, request.output_dir) if each]
    files, folders = [request.model_path], [os.environ.get("HYPERGPU_DATASETS", "")]
    folders.append(request.data_dir)
    if isinstance(request, protocol.TrainShard):
        files.append(request.update_path)
        folders += [request.node_dir, request.state_dir]
    return [
        *(Path(each).parent for each in files if each),
        *(Path(each) for each in folders if each),
    ]


def without_places(reason: str, places: Iterable[Path]) -> str:
    """A reason as it may leave the node: files are named from the folders that they lie in."""
    place_names = {str(each) for place in places for each in (place, place.resolve())}
    for place in sorted(place_names - {".", "/"}, key=len, reverse=True):
        reason = reason.replace(f"{place}/", "").replace(place, "its folder")
    return reason


_MEMORY_SIGNS = ("out of memory", "can't allocate memory")
_DRIVER = ("cuda error", "cuda driver", "cudnn", "cublas", "cusolver", "nccl", "hip error")
"""Signs of torch's errors from below, which are plain `RuntimeError`s."""


class WorkFailure(NamedTuple):
    """Why work failed, and whether the process must be restarted."""

    reason: str
    cause: FailureCause = FailureCause.OTHER
    is_fatal: bool = False


def work_failure(error: Exception) -> WorkFailure:
    """Judge an error: after running out of memory or a driver's fault the process is not whole.

    Any other error, such as shapes that do not fit, is the work's fault and the worker is well.
    """
    text = str(error).splitlines()[0] if str(error) else ""
    lower_text = text.lower()
    if isinstance(error, MemoryError) or any(sign in lower_text for sign in _MEMORY_SIGNS):
        fix = "Fix: use a larger device or a smaller model"
        cause = FailureCause.OUT_OF_MEMORY
        reason = f"{cause.value}: {text or type(error).__name__}. {fix}"
        return WorkFailure(reason, cause, is_fatal=True)
    is_of_the_driver = isinstance(error, RuntimeError) and (
        type(error).__name__ == "AcceleratorError" or any(sign in lower_text for sign in _DRIVER)
    )
    reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return WorkFailure(reason, is_fatal=is_of_the_driver)
