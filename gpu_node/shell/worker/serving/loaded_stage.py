"""A node's part of a ring in memory: its layers, and what it keeps of each session."""

import time
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from gpu_node.shell.worker.serving.answer_writer import AnswerWriter
from gpu_node.shell.worker.serving.engine import TextModel, UnanswerableCallError
from hypergpu.rings.state_digests import (
    ROW_DIGEST_BYTES,
    digest_of_rows,
    place_rows,
    row_digests,
)
from hypergpu.serving.calls import AnswerEnded, AnswerPart, AnswerToken
from hypergpu.serving.check_messages import StateDigests, TellDigests
from hypergpu.serving.stage_messages import (
    AnswerOpened,
    BeginAnswer,
    ComputePass,
    JudgedSegment,
    ReplayRows,
    StageJudged,
    StageRefused,
    StageReply,
    StageRows,
    StageSegment,
)
from hypergpu.tensors.hidden_states import StateCodec, StatesError
from hypergpu.workloads.slices.layer_slice import LayerSlice, open_session
from hypergpu.workloads.slices.ragged_attention import SessionKeys, SessionSegment

if TYPE_CHECKING:
    from gpu_node.shell.worker.serving.stage_training import StageTraining

_MEASURED_TOKENS = 64
_MEASURED_TIMES = 3


class StageSession:
    """One session in one stage."""

    def __init__(self) -> None:
        self.keys: SessionKeys = open_session()
        self.rows = bytearray()
        """Hidden states that it gave, by position: a new holder of the next layers gets them."""
        self.received = bytearray()
        """Digests of the hidden states that it was given, by position."""
        self.writer: AnswerWriter | None = None
        """Writes the answer, in the last stage."""


class StageSpeed(NamedTuple):
    """Times that were measured when the stage was loaded."""

    pass_us: float
    token_us: float


class LoadedStage:
    """A slice that computes passes.

    Args:
        layer_slice: With its tensors.
        device: Where they are.
        codec: How hidden states travel.
        text: Of the last stage: tokens and their text.
        tokens_most: Tokens of a session at most.
    """

    def __init__(
        self,
        layer_slice: LayerSlice,
        device: torch.device,
        codec: StateCodec,
        text: TextModel | None,
        tokens_most: int,
    ) -> None:
        self.layer_slice = layer_slice
        self.device = device
        self.tokens_most = tokens_most
        self.training: StageTraining | None = None
        """Trains the slice's adapter; None: it has none."""
        self.codec = codec
        self.text = text
        self.dtype: torch.dtype = next(layer_slice.model.parameters()).dtype
        self._sessions: dict[int, StageSession] = {}

    @property
    def weights_bytes(self) -> int:
        """Memory of its tensors."""
        tensors = [*self.layer_slice.model.parameters(), *self.layer_slice.model.buffers()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @cached_property
    def speed(self) -> StageSpeed:
        """Times of passes of one token and of many, the quickest of a few each; measured once."""
        one_us, many_us = (self._pass_us(count) for count in (1, _MEASURED_TOKENS))
        token_us = max(0.0, many_us - one_us) / (_MEASURED_TOKENS - 1)
        return StageSpeed(max(0.0, one_us - token_us), token_us)

    def _pass_us(self, count: int) -> float:
        inputs = self._random_inputs(count)
        times = []
        for _ in range(_MEASURED_TIMES):
            began_s = time.perf_counter()
            segments = [SessionSegment(open_session(), 0, count)]
            self.layer_slice.compute(inputs, segments, [count - 1]).cpu()
            times.append(time.perf_counter() - began_s)
        return min(times) * 1e6

    def _random_inputs(self, count: int) -> torch.Tensor:
        if self.layer_slice.is_first:
            return torch.arange(count, device=self.device) % self.layer_slice.vocabulary
        generator = torch.Generator().manual_seed(0)
        states = torch.randn(count, self.layer_slice.hidden_size, generator=generator)
        return states.to(self.device, self.dtype)

    @cached_property
    def token_bytes(self) -> int:
        """Memory of one token's keys and values."""
        keys = open_session()
        self.layer_slice.compute(self._random_inputs(1), [SessionSegment(keys, 0, 1)])
        return -(-keys.memory_bytes // keys.room_tokens)

    def forget(self, session: int) -> None:
        """Drop what is kept of a session."""
        self._sessions.pop(session, None)

    def forget_all(self) -> None:
        """Drop what is kept of every session."""
        self._sessions.clear()

    def begin_answer(self, request: BeginAnswer) -> StageReply:
        """Read a call's prompt: the tokens of it go around the ring."""
        if self.text is None:
            return StageRefused("only the last stage knows calls")
        try:
            writer = AnswerWriter(self.text, request.call, self.tokens_most)
        except UnanswerableCallError as error:
            return StageRefused(str(error), is_too_long=error.is_too_long)
        self._sessions.setdefault(request.session, StageSession()).writer = writer
        return AnswerOpened(writer.prompt)

    def replay(self, request: ReplayRows) -> StageRows:
        """Hidden states that were sent before; none where any of them is gone."""
        session, row_bytes = self._sessions.get(request.session), self._row_bytes
        first, end = request.start * row_bytes, (request.start + request.count) * row_bytes
        if session is None or not 0 <= first < end <= len(session.rows):
            return StageRows()
        return StageRows(bytes(session.rows[first:end]))

    def tell_digests(self, request: TellDigests) -> StateDigests:
        """What it was given of a session and what it gave, as digests."""
        session = self._sessions.get(request.session)
        if session is None:
            return StateDigests()
        sent_digests = row_digests(session.rows, self._row_bytes)
        return StateDigests(
            digest_of_rows(session.received, request.count),
            digest_of_rows(sent_digests, request.count),
        )

    @property
    def _row_bytes(self) -> int:
        return self.codec.row_bytes(self.layer_slice.hidden_size)

    def compute(self, request: ComputePass) -> StageReply:
        """Compute a pass."""
        refusal = self._refusal(request)
        if refusal:
            return StageRefused(refusal)
        try:
            inputs = self._inputs(request)
        except StatesError as error:
            return StageRefused(f"what came from the stage before: {error}", blames_input=True)
        segments = [
            SessionSegment(self._session(each.session).keys, each.start, each.count)
            for each in request.segments
        ]
        try:
            return self._reply(request, segments, inputs)
        except (MemoryError, torch.OutOfMemoryError):
            return StageRefused("the stage has no memory left for these sessions", is_lasting=False)

    def _reply(
        self, request: ComputePass, segments: Sequence[SessionSegment], inputs: torch.Tensor
    ) -> StageReply:
        if self.layer_slice.is_last:
            rows = _judged_rows(request.segments)
            logits = self.layer_slice.compute(inputs, segments, rows or [request.rows - 1])
            return StageJudged(self._judge(request.segments, logits)) if rows else StageJudged(())
        states = self.layer_slice.compute(inputs, segments)
        try:
            content = self.codec.encode(states.float().cpu().numpy())
        except StatesError as error:
            return StageRefused(f"the stage gives no states that can be sent: {error}")
        self._keep_rows(request.segments, content)
        return StageRows(content if request.wants_output else b"")

    def _session(self, number: int) -> StageSession:
        return self._sessions.setdefault(number, StageSession())

    def _refusal(self, request: ComputePass) -> str:
        """Why a pass is none that this stage computes; empty: it is."""
        if bool(request.tokens) != self.layer_slice.is_first:
            return "the first stage takes tokens, and every other one hidden states"
        if request.tokens and max(request.tokens) >= self.layer_slice.vocabulary:
            return f"the model knows {self.layer_slice.vocabulary} tokens"
        if any(each.start + each.count > self.tokens_most for each in request.segments):
            return f"a session has {self.tokens_most} tokens at most"
        if self.layer_slice.is_last and any(
            each.judged and self._session(each.session).writer is None for each in request.segments
        ):
            return "a session of the pass has no call"
        return ""

    def _inputs(self, request: ComputePass) -> torch.Tensor:
        if self.layer_slice.is_first:
            return torch.tensor(request.tokens, device=self.device)
        rows = self.codec.decode(request.states, self.layer_slice.hidden_size)
        if len(rows) != request.rows:
            raise StatesError(f"{len(rows)} rows for {request.rows} tokens")
        self._note_received(request.segments, request.states)
        return torch.from_numpy(np.ascontiguousarray(rows)).to(self.device, self.dtype)

    def _keep_rows(self, segments: Sequence[StageSegment], content: bytes) -> None:
        row_bytes, first = self._row_bytes, 0
        for segment in segments:
            end = first + segment.count * row_bytes
            rows = self._session(segment.session).rows
            place_rows(rows, segment.start, content[first:end], row_bytes)
            first = end

    def _note_received(self, segments: Sequence[StageSegment], content: bytes) -> None:
        digests, first = row_digests(content, self._row_bytes), 0
        for segment in segments:
            end = first + segment.count * ROW_DIGEST_BYTES
            noted_digests = self._session(segment.session).received
            place_rows(noted_digests, segment.start, digests[first:end], ROW_DIGEST_BYTES)
            first = end

    def _judge(
        self, segments: Sequence[StageSegment], logits: torch.Tensor
    ) -> tuple[JudgedSegment, ...]:
        judgements, first = [], 0
        for segment in segments:
            if segment.judged:
                rows = logits[first : first + segment.judged]
                judgements.append(self._judge_segment(segment, rows))
                first += segment.judged
        return tuple(judgements)

    def _judge_segment(self, segment: StageSegment, logits: torch.Tensor) -> JudgedSegment:
        """Draw tokens until one is another than the draft has, or the answer is over."""
        writer = self._sessions[segment.session].writer
        parts: list[AnswerPart] = []
        tokens: list[int] = []
        for row, draft in zip(logits, (*segment.drafted, None), strict=True):
            parts.extend(writer.next_parts(row.float()) if writer is not None else ())
            tokens = [part.token for part in parts if isinstance(part, AnswerToken)]
            if isinstance(parts[-1], AnswerEnded) or tokens[-1] != draft:
                break
        return JudgedSegment(segment.session, tuple(tokens), tuple(parts))


def _judged_rows(segments: Sequence[StageSegment]) -> list[int]:
    """Rows of a pass whose logits are wanted."""
    rows, end = list[int](), 0
    for segment in segments:
        end += segment.count
        rows.extend(range(end - segment.judged, end))
    return rows
