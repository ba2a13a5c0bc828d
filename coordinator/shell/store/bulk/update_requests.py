"""Updates as a bulk process takes them: the coordinator judges each request before its body is
read; it is answered once what it brought is recorded, or the update is accepted.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

from coordinator.shell.store.bulk.messages import (
    UpdateAnswered,
    UpdateBrought,
    UpdateLetIn,
    UpdateOffered,
    UpdateSender,
)
from coordinator.shell.store.bulk.receiving import RangeRefusedError, UploadReceiver, UploadTarget
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import NodeId
from hypergpu.part_file import Span
from hypergpu.wire.update_requests import (
    ANSWER_TYPE,
    OFFER_HEADER,
    PROTOCOL_HEADER,
    UpdateAnswer,
    answer_bytes,
    offer_in,
    range_in,
    refusal_answer,
)

NODE_REQUESTS_MAX = 32
"""Requests of one node in one process that wait for the coordinator's judgement, each with at most
half a megabyte of its body in memory: 16 MiB of a node that nobody has let in.
"""
REQUESTS_MAX = 256
"""The same of all nodes: 128 MiB."""
_JUDGEMENT_S = 10.0
"""The coordinator judges an offer in milliseconds; one that does not has other troubles."""


class UpdateRequests:
    """Requests of one process that bring updates."""

    def __init__(
        self, uploads: UploadReceiver, say: Callable[[UpdateOffered | UpdateBrought], None]
    ) -> None:
        """Write with ``uploads``, and ask the coordinator by ``say``, whose answer `take` hears."""
        self._uploads = uploads
        self._say = say
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[UpdateLetIn | UpdateAnswered]] = {}
        self._waiting: Counter[str] = Counter()
        """Requests of each node that wait for the coordinator."""

    def take(self, answer: UpdateLetIn | UpdateAnswered) -> None:
        """Hear an answer of the coordinator; one that nobody waits for any more is dropped."""
        future = self._answers.pop(answer.number, None)
        if future is not None and not future.done():
            future.set_result(answer)

    async def receive(self, request: web.BaseRequest, node: str) -> web.Response:
        """Answer a request of a node, which its certificate names."""
        try:
            answer = await self._receive(request, node)
        except HyperGPUError as error:
            answer = refusal_answer(error)
        except RangeRefusedError as error:
            answer = refusal_answer(HyperGPUError(error.reason, str(error)))
        response = web.Response(
            status=answer.status, body=answer_bytes(answer), content_type=ANSWER_TYPE
        )
        if answer.refusal is not None:
            # What is still sent is not read.
            response.force_close()
        return response

    async def _receive(self, request: web.BaseRequest, node: str) -> UpdateAnswer:
        offer = offer_in(request.headers.get(OFFER_HEADER, ""))
        if offer is None:
            detail = f"the header {OFFER_HEADER} holds no offer"
            raise HyperGPUError(Reason.REQUEST_INVALID, detail)
        span = _sent_span(request)
        sender = UpdateSender(node, request.headers.get(PROTOCOL_HEADER, ""))
        with self._wait_for(node):
            judgement = await self._judge(sender, offer)
        if isinstance(judgement, UpdateAnswered):
            return judgement.answer
        missing_spans = judgement.missing
        if span is not None:
            if span.end > judgement.size_bytes:
                detail = f"name a range within bytes 0 to {judgement.size_bytes}"
                raise HyperGPUError(Reason.REQUEST_INVALID, detail)
            target = UploadTarget(judgement.name, judgement.size_bytes, NodeId(node))
            missing_spans = await self._uploads.take(request, target, span)
        if missing_spans:
            return UpdateAnswer(missing=missing_spans)
        with self._wait_for(node):
            return await self._accept(sender, offer)

    async def _judge(self, sender: UpdateSender, offer: bytes) -> UpdateLetIn | UpdateAnswered:
        """Ask whether an update is let in.

        Raises:
            HyperGPUError: NOT_READY, nobody says.
        """
        number = next(self._numbers)
        try:
            async with asyncio.timeout(_JUDGEMENT_S):
                return await self._ask(UpdateOffered(number, sender, offer))
        except TimeoutError:
            detail = "the coordinator does not answer its bulk process: send the update later"
            raise HyperGPUError(Reason.NOT_READY, detail) from None

    async def _accept(self, sender: UpdateSender, offer: bytes) -> UpdateAnswer:
        """Have an update accepted of which nothing is missing. Reading it takes its time."""
        judgement = await self._ask(UpdateBrought(next(self._numbers), sender, offer))
        if isinstance(judgement, UpdateAnswered):
            return judgement.answer
        raise HyperGPUError(Reason.CALL_BROKEN, "the coordinator let an update in twice")

    async def _ask(self, question: UpdateOffered | UpdateBrought) -> UpdateLetIn | UpdateAnswered:
        future: asyncio.Future[UpdateLetIn | UpdateAnswered]
        future = self._answers[question.number] = asyncio.get_running_loop().create_future()
        try:
            self._say(question)
            return await future
        finally:
            self._answers.pop(question.number, None)

    @contextmanager
    def _wait_for(self, node: str) -> Iterator[None]:
        """Count a request that waits for the coordinator.

        Raises:
            HyperGPUError: RATE_LIMITED, too many do.
        """
        if self._waiting[node] >= NODE_REQUESTS_MAX:
            detail = f"{NODE_REQUESTS_MAX} requests of {node} wait for the coordinator already"
            raise HyperGPUError(Reason.RATE_LIMITED, detail)
        if self._waiting.total() >= REQUESTS_MAX:
            detail = f"{REQUESTS_MAX} requests of nodes wait for the coordinator already"
            raise HyperGPUError(Reason.RATE_LIMITED, detail)
        self._waiting[node] += 1
        try:
            yield
        finally:
            self._waiting[node] -= 1
            if not self._waiting[node]:
                del self._waiting[node]


def _sent_span(request: web.BaseRequest) -> Span | None:
    """The range that a request brings; None: it only asks what is missing.

    Raises:
        HyperGPUError: REQUEST_INVALID, it brings bytes and does not name them.
    """
    if not request.body_exists:
        return None
    span = range_in(request.headers.get("Content-Range", ""), request.content_length)
    if span is None or span.start >= span.end:
        detail = "name the range of the bytes that are sent: Content-Range, and Content-Length"
        raise HyperGPUError(Reason.REQUEST_INVALID, detail)
    return span
