"""Evaluators of all jobs: one process a job, so many at once, and a turn for each owner.

`coordinator.core.hub.evaluator_turns` decides whose turn it is. A process that served a job ends
with that job, or makes place for another one; what it saw no other job sees.
"""

import asyncio
from collections import deque
from itertools import count

import psutil
import structlog

from coordinator.core.hub.evaluator_turns import (
    EvaluatorJob,
    EvaluatorTurn,
    OpenEvaluator,
    next_turn,
    turn_reason,
)
from coordinator.shell.evaluator.process import (
    Evaluate,
    Evaluated,
    EvaluatorReply,
    EvaluatorRequest,
    GradientMeasured,
    Initialise,
    Initialised,
    MeasureGradient,
    MeasureShards,
    ShardsMeasured,
    TryUpdate,
    UpdateTried,
    expected_answer,
)
from coordinator.shell.evaluator.seat import EvaluatorSeat, SeatMaker
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId

log = structlog.get_logger()


class _WaitingRequest:
    """A request that waits for its turn."""

    def __init__(self, job: EvaluatorJob) -> None:
        self.job = job
        self.turn: asyncio.Future[EvaluatorTurn] = asyncio.get_running_loop().create_future()


class _EvaluatorSlot:
    """A place that a job holds: its process, or the one that is being started."""

    def __init__(self, job: EvaluatorJob) -> None:
        self.job = job
        self.is_busy = False
        self.used = 0
        self.is_light = True
        self.seat: EvaluatorSeat | None = None


class EvaluatorPool:
    """Asks evaluators for all jobs.

    A request raises `HyperGPUError` as of `EvaluatorProcess`, and JOB_PHASE where its job ended
    meanwhile.
    """

    def __init__(self, maker: SeatMaker) -> None:
        self._maker = maker
        self._waiting: deque[_WaitingRequest] = deque()
        self._places: dict[JobId, _EvaluatorSlot] = {}
        self._turns: dict[str, int] = {}
        self._numbers = count(1)
        self._requests: dict[JobId, set[asyncio.Task[EvaluatorReply]]] = {}
        self._spares: list[EvaluatorSeat] = []
        self._warming: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def initialise(self, job: EvaluatorJob, request: Initialise) -> Initialised:
        """Make an initial model."""
        return expected_answer(await self.reply(job, request), Initialised)

    async def evaluate(self, job: EvaluatorJob, request: Evaluate) -> Evaluated:
        """Measure a model."""
        return expected_answer(await self.reply(job, request), Evaluated)

    async def measure_gradient(
        self, job: EvaluatorJob, request: MeasureGradient
    ) -> GradientMeasured:
        """Differentiate the held-out loss."""
        return expected_answer(await self.reply(job, request), GradientMeasured)

    async def measure_shards(self, job: EvaluatorJob, request: MeasureShards) -> ShardsMeasured:
        """Differentiate the loss of samples of some shards."""
        return expected_answer(await self.reply(job, request), ShardsMeasured)

    async def try_update(self, job: EvaluatorJob, request: TryUpdate) -> UpdateTried:
        """Measure the loss of samples of a shard after an update."""
        return expected_answer(await self.reply(job, request), UpdateTried)

    def waiting_reason(self, job: EvaluatorJob) -> str:
        """Why a request of the job waits; empty: none does."""
        waiting_jobs = [each.job for each in self._waiting]
        return turn_reason(
            job, waiting_jobs, self._processes(), self._maker.limits.evaluator_places
        )

    def serving_processes(self) -> dict[JobId, int]:
        """Ids of the processes that serve jobs."""
        seats = {job_id: place.seat for job_id, place in self._places.items()}
        return {
            job_id: seat.process_id
            for job_id, seat in seats.items()
            if seat is not None and seat.process_id is not None
        }

    def is_asked(self, job_id: JobId) -> bool:
        """Whether a request of the job waits or is answered."""
        return job_id in self._requests

    async def spare_process_id(self) -> int | None:
        """Id of a spare process, once one that is being started is ready; None: there is none."""
        if self._warming is not None:
            await asyncio.wait([self._warming])
        return self._spares[0].process_id if self._spares else None

    def end_job(self, job_id: JobId) -> None:
        """Forget a job's requests, those that wait and the one that is answered, and end its
        process at once.
        """
        for task in self._requests.get(job_id, ()):
            task.cancel()
        place = self._places.get(job_id)
        if place is not None and not place.is_busy:
            self._close(job_id)
            self._give_turns()

    async def stop(self) -> None:
        """End all processes."""
        if self._warming is not None:
            self._warming.cancel()
            await asyncio.wait([self._warming])
        tasks = [task for job in self._requests.values() for task in job]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for job_id in list(self._places):
            self._close(job_id)
        for seat in self._spares:
            self._closing.add(asyncio.create_task(seat.close()))
        self._spares = []
        if self._closing:
            await asyncio.wait(list(self._closing))

    async def reply(self, job: EvaluatorJob, request: EvaluatorRequest) -> EvaluatorReply:
        """The reply to a request, which may be an `EvaluatorFailure`."""
        task = asyncio.create_task(self._answer(job, request), name=f"evaluator of {job.job_id}")
        self._requests.setdefault(job.job_id, set()).add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if task.cancelled() and not _is_cancelled_now():
                raise HyperGPUError(Reason.JOB_PHASE, f"{job.job_id} has ended") from None
            task.cancel()
            raise
        finally:
            self._forget(job.job_id, task)

    def _forget(self, job_id: JobId, task: "asyncio.Task[EvaluatorReply]") -> None:
        tasks = self._requests.get(job_id, set())
        tasks.discard(task)
        if not tasks:
            self._requests.pop(job_id, None)

    async def _answer(self, job: EvaluatorJob, request: EvaluatorRequest) -> EvaluatorReply:
        place = await self._take_turn(job)
        is_whole = False
        try:
            seat = place.seat = place.seat or await self._take_seat()
            reply = await seat.reply(request)
            place.is_light = await seat.is_light()
            is_whole = True
            return reply
        finally:
            place.is_busy = False
            if not is_whole:
                # It was ended for what it did, or nobody waits for its answer.
                self._close(job.job_id)
            self._give_turns()
            self._prepare_spare(request.workload)

    async def _take_turn(self, job: EvaluatorJob) -> _EvaluatorSlot:
        waiting_request = _WaitingRequest(job)
        self._waiting.append(waiting_request)
        self._give_turns()
        try:
            await waiting_request.turn
        except asyncio.CancelledError:
            if waiting_request in self._waiting:
                self._waiting.remove(waiting_request)
            elif waiting_request.turn.done() and not waiting_request.turn.cancelled():
                self._places[job.job_id].is_busy = False
                self._give_turns()
            raise
        return self._places[job.job_id]

    def _give_turns(self) -> None:
        """Give all turns that can be given now."""
        # Of a job that ends, another request's end may come before this one has left the line.
        self._waiting = deque(each for each in self._waiting if not each.turn.cancelled())
        while (turn := self._next_turn()) is not None:
            waiting_request = next(
                each for each in self._waiting if each.job.job_id == turn.job.job_id
            )
            self._waiting.remove(waiting_request)
            if turn.ended is not None:
                self._close(turn.ended)
            place = self._places.setdefault(turn.job.job_id, _EvaluatorSlot(turn.job))
            place.is_busy = True
            place.used = next(self._numbers)
            self._turns[turn.job.owner] = self._turns[turn.job.job_id] = place.used
            waiting_request.turn.set_result(turn)

    def _next_turn(self) -> EvaluatorTurn | None:
        waiting_jobs = list({each.job.job_id: each.job for each in self._waiting}.values())
        places = self._maker.limits.evaluator_places
        return next_turn(waiting_jobs, self._processes(), self._turns, places)

    def _processes(self) -> list[OpenEvaluator]:
        return [
            OpenEvaluator(place.job, place.is_busy, place.used, place.is_light)
            for place in self._places.values()
        ]

    def _close(self, job_id: JobId) -> None:
        """End a job's process; it is gone before its place is needed."""
        place = self._places.pop(job_id, None)
        if place is not None and place.seat is not None:
            close_task = asyncio.create_task(place.seat.close())
            self._closing.add(close_task)
            close_task.add_done_callback(self._closing.discard)

    async def _take_seat(self) -> EvaluatorSeat:
        """A process that no job has used: a spare, or one that is still to be started."""
        if self._closing:
            # Its memory is counted on.
            await asyncio.wait(list(self._closing))
        return self._spares.pop() if self._spares else await self._maker.seat()

    def _prepare_spare(self, workload: str) -> None:
        """Start a spare beside what is under way, if there is room for it and none is there."""
        is_under_way = self._warming is not None and not self._warming.done()
        if len(self._spares) >= self._maker.limits.spares or is_under_way:
            return
        self._warming = asyncio.create_task(self._warm_spare(workload), name="spare evaluator")

    async def _warm_spare(self, workload: str) -> None:
        if psutil.virtual_memory().available < self._maker.limits.memory_bytes:
            return
        seat = None
        try:
            seat = await self._maker.seat()
            if await seat.warm(workload):
                log.info("a spare evaluator is ready", pid=seat.process_id)
                self._spares.append(seat)
                seat = None
        except (HyperGPUError, OSError) as error:
            log.warning("no spare evaluator", reason=str(error))
        finally:
            if seat is not None:
                await seat.close()


def _is_cancelled_now() -> bool:
    """Whether the running task itself is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
