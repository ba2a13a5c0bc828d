"""Calls to the work at hand: from the control stream to the worker, and what comes of them back."""

import asyncio
from collections.abc import Callable

import structlog

from gpu_node.shell.link.control import CoordinatorStream
from gpu_node.shell.link.paced_sending import PacedSending
from gpu_node.shell.transfer.transfers import TransferTasks
from gpu_node.shell.worker.protocol import CallOutput
from gpu_node.shell.worker_host.staging import Stage
from gpu_node.shell.worker_host.supervision import WorkerSupervisor
from hypergpu.assignment import INPUTS_MOST
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.v1 import node_pb2, work_pb2
from hypergpu.wire.messages import blob_value

log = structlog.get_logger()

_GATHER_S = 0.01
"""What comes within so much time goes out as one message."""


class WorkCalls:
    """Passes calls on. Nothing of a call or its answer is read, logged or kept.

    Args:
        worker: Answers, as long as the call's lease is of its work.
        stream: Brings calls, and takes what comes of them while there is a link, within the upload
            limit of the node's owner.
        stage: Shows the worker blobs that calls name.
        transfers: Gives what fetches them, once there is a call.
    """

    def __init__(
        self,
        worker: WorkerSupervisor,
        stream: CoordinatorStream,
        stage: Stage,
        transfers: Callable[[], TransferTasks],
    ) -> None:
        self._worker = worker
        self._sending = PacedSending(stream.send, stream.upload_rate)
        self._stage = stage
        self._transfers = transfers
        self._bringing: set[asyncio.Task[None]] = set()
        self._outputs: list[work_pb2.WorkOutput] = []
        self._standing: work_pb2.WorkOutput | None = None
        """What the work says by itself, for streams to come."""
        worker.report_output = self.note_output
        stream.take_call = self.take

    def take(self, call: work_pb2.WorkCall) -> None:
        """Pass a call of the coordinator on to the worker, or say that its work is not here."""
        if not self._is_here(call.job_id, call.lease):
            is_here = False
        elif call.is_cancelled:
            is_here = True
            self._worker.cancel_call(call.call)
        elif call.inputs:
            is_here = True
            task = asyncio.create_task(self._bring(call), name="inputs of a call")
            self._bringing.add(task)
            task.add_done_callback(self._bringing.discard)
        else:
            is_here = self._worker.call(call.call, call.body)
        if not is_here:
            self._say_absent(call)

    async def _bring(self, call: work_pb2.WorkCall) -> None:
        """Pass a call on once the blobs are here that it names."""
        try:
            if len(call.inputs) > INPUTS_MOST:
                raise HyperGPUError(Reason.REQUEST_INVALID, f"{len(call.inputs)} inputs of a call")
            blobs = [blob_value(each) for each in call.inputs]
            paths = await self._transfers().bring(blobs)
            is_here = self._is_here(call.job_id, call.lease)
            if is_here:  # No await in between: what is laid out for another job is not touched.
                self._stage.add_blobs(paths)
                self._transfers().forget(paths)
        except (HyperGPUError, OSError) as error:
            log.warning("what a call needs is not to be had", reason=str(error))
            is_here = False
        if not is_here or not self._worker.call(call.call, call.body):
            self._say_absent(call)

    def _say_absent(self, call: work_pb2.WorkCall) -> None:
        """Say that the work of a call is not here."""
        message = work_pb2.WorkOutput(
            job_id=call.job_id, lease=call.lease, call=call.call, is_last=True
        )
        self._gather(message)

    async def close(self) -> None:
        """Bring and send nothing any more."""
        await self._sending.close()
        for task in self._bringing:
            task.cancel()
        await asyncio.gather(*self._bringing, return_exceptions=True)

    def note_output(self, output: CallOutput) -> None:
        """Pass on what the worker says."""
        message = work_pb2.WorkOutput(
            job_id=output.lease.job_id,
            lease=output.lease.number,
            call=output.call,
            body=output.body,
            is_last=output.is_last,
        )
        if not output.call:
            self._standing = message
        self._gather(message)
        if output.is_urgent:
            self._flush()

    def begin_stream(self) -> None:
        """Say again what holds: a coordinator may have restarted. It has given open calls up."""
        self._outputs.clear()
        self._sending.clear()
        self._worker.cancel_calls()
        standing = self._standing
        if standing is not None and self._is_here(standing.job_id, standing.lease):
            self._gather(standing)

    def _is_here(self, job_id: str, number: int) -> bool:
        lease = self._worker.lease
        return lease is not None and (lease.job_id, lease.number) == (job_id, number)

    def _gather(self, output: work_pb2.WorkOutput) -> None:
        if not self._outputs:
            asyncio.get_running_loop().call_later(_GATHER_S, self._flush)
        self._outputs.append(output)

    def _flush(self) -> None:
        outputs, self._outputs = self._outputs, []
        if outputs:
            message = work_pb2.WorkOutputs(outputs=outputs)
            self._sending.send(node_pb2.ControlRequest(work_outputs=message))
