"""Answers under way: one or several choices, read as they come until their caller goes away."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import NamedTuple

from starlette.requests import ClientDisconnect, Request

from hypergpu.serving.calls import AnswerPart, AnswerRefused
from hypergpu.user.client.models import AnswerRoute
from hypergpu.user.serving.key_budget import KeyBudget
from hypergpu.user.serving.openai_answers import ChoiceText, usage_of
from hypergpu.user.serving.openai_requests import ApiError


class AnswerPiece(NamedTuple):
    """A part of an answer."""

    choice: ChoiceText
    """The choice, as it is with the part."""
    text: str
    """Text that the part adds."""
    part: AnswerRoute | AnswerPart


class OpenAnswer:
    """One choice that is being answered."""

    def __init__(self, choice: ChoiceText, parts: AsyncIterator[AnswerRoute | AnswerPart]) -> None:
        self.choice = choice
        self._parts = parts
        self._first: list[AnswerRoute | AnswerPart] = []

    async def begin(self) -> None:
        """Wait for the first part beside the route.

        Raises:
            ApiError: The call is refused.
        """
        async for part in self._parts:
            self._first.append(part)
            _refuse_if_told(part)
            if isinstance(part, AnswerRoute):
                self.choice.note(part)
            else:
                return

    async def parts(self) -> AsyncIterator[AnswerPiece]:
        """Each part.

        Raises:
            ApiError: The answer broke off.
        """
        for part in self._first:
            if not isinstance(part, AnswerRoute):
                yield AnswerPiece(self.choice, self.choice.note(part), part)
        async for part in self._parts:
            _refuse_if_told(part)
            yield AnswerPiece(self.choice, self.choice.note(part), part)

    async def close(self) -> None:
        """Take no further part: the replica stops within a token."""
        close = getattr(self._parts, "aclose", None)
        if close is not None:
            with contextlib.suppress(RuntimeError):
                await close()


async def merged_parts(answers: Sequence[OpenAnswer]) -> AsyncIterator[AnswerPiece]:
    """Parts of all choices as they come.

    Raises:
        ApiError: One broke off; the others are read no further.
    """
    inbox: asyncio.Queue[AnswerPiece | OpenAnswer] = asyncio.Queue()

    async def read(answer: OpenAnswer) -> None:
        try:
            async for each in answer.parts():
                inbox.put_nowait(each)
        finally:
            inbox.put_nowait(answer)

    tasks = {answer: asyncio.create_task(read(answer)) for answer in answers}
    open_answers = len(tasks)
    try:
        while open_answers:
            entry = await inbox.get()
            if isinstance(entry, OpenAnswer):
                open_answers -= 1
                await tasks[entry]
            else:
                yield entry
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def begin_answers(answers: Sequence[OpenAnswer], request: Request) -> None:
    """Wait until each choice has begun, unless the caller goes away."""
    await _unless_gone(request, asyncio.gather(*(each.begin() for each in answers)), answers)


async def finish_answers(
    answers: Sequence[OpenAnswer], request: Request, budget: KeyBudget
) -> None:
    async def read() -> None:
        async for _ in merged_parts(answers):
            await budget.check()

    await _unless_gone(request, read(), answers)


async def _unless_gone(
    request: Request, work: Awaitable[object], answers: Sequence[OpenAnswer]
) -> None:
    """Do something while the caller is there.

    Raises:
        ClientDisconnect: The caller has gone away, and the answers are ended.
    """
    work_task = asyncio.ensure_future(work)
    gone_task = asyncio.create_task(_wait_until_gone(request))
    try:
        await asyncio.wait((work_task, gone_task), return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            raise ClientDisconnect
        await work_task
    except BaseException:
        work_task.cancel()
        await asyncio.gather(work_task, return_exceptions=True)
        for answer in answers:
            await answer.close()
        raise
    finally:
        gone_task.cancel()


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def tokens_used(choices: Sequence[ChoiceText]) -> int:
    total_tokens: int = usage_of(choices)["total_tokens"]
    return total_tokens


def refused_call(refusal: AnswerRefused, param: str | None = None) -> ApiError:
    """What a caller is told whose call a replica refuses."""
    code = "context_length_exceeded" if refusal.is_too_long else None
    fix = "change the request, or ask another model"
    if refusal.is_too_long:
        fix = "shorten the prompt, or ask for fewer max_tokens"
    reason = refusal.reason.rstrip(".")
    return ApiError(reason, fix="" if "Fix:" in reason else fix, param=param, code=code)


def _refuse_if_told(part: AnswerRoute | AnswerPart) -> None:
    if isinstance(part, AnswerRefused):
        raise refused_call(part)
