"""Questions of bulk processes about updates, each answered by a task of its own."""

import asyncio
from collections.abc import Callable

import structlog

from coordinator.shell.store.blobs.upload_store import OpenUpload
from coordinator.shell.store.bulk.messages import (
    ToProcess,
    UpdateAnswered,
    UpdateBrought,
    UpdateLetIn,
    UpdateOffered,
)
from coordinator.shell.store.bulk.store import UpdateTaker
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.wire.update_requests import UpdateAnswer, refusal_answer

log = structlog.get_logger()


class UpdateJudgements:
    """Judgements under way. One goes on when the process that asked is gone."""

    def __init__(self) -> None:
        self.taker: UpdateTaker | None = None
        """None: updates are told to come later."""
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(
        self, question: UpdateOffered | UpdateBrought, say: Callable[[ToProcess], None]
    ) -> None:
        """Judge an update, and answer the process that asked."""
        task = asyncio.create_task(self._judge(question, say), name="update")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """End what is under way; nobody is answered any more."""
        for task in self._tasks:
            task.cancel()

    async def _judge(
        self, question: UpdateOffered | UpdateBrought, say: Callable[[ToProcess], None]
    ) -> None:
        number = question.number
        try:
            judgement = await self._judgement(question)
        except HyperGPUError as error:
            say(UpdateAnswered(number, refusal_answer(error)))
        except Exception:
            log.exception("an update broke")
            detail = "the update broke: see the coordinator's log"
            say(UpdateAnswered(number, refusal_answer(HyperGPUError(Reason.CALL_BROKEN, detail))))
        else:
            if isinstance(judgement, UpdateAnswer):
                say(UpdateAnswered(number, judgement))
            else:
                say(UpdateLetIn(number, judgement.name, judgement.size_bytes, judgement.missing))

    async def _judgement(
        self, question: UpdateOffered | UpdateBrought
    ) -> OpenUpload | UpdateAnswer:
        if self.taker is None:
            raise HyperGPUError(Reason.NOT_READY, "the coordinator is starting")
        if isinstance(question, UpdateOffered):
            return await self.taker.let_in(question.sender, question.offer)
        return await self.taker.accept(question.sender, question.offer)
