"""Scores the answer of another node: prompt and tokens are read at once, and none is written."""

import math

import torch

from gpu_node.shell.worker.serving.answer_writer import prompt_tokens
from gpu_node.shell.worker.serving.conversation import PIECE_TOKENS
from gpu_node.shell.worker.serving.engine import (
    CallTooLongError,
    ReadingModel,
    ScoringReader,
    UnanswerableCallError,
)
from gpu_node.shell.worker.serving.token_choice import token_margin
from hypergpu.serving.calls import MARGIN_MOST, AnswerPart, CheckFigures, CheckResult, ModelCall

_UNIT = 1_000_000


class AnswerCheck:
    """A check at work. It takes turns with conversations, a piece at a time.

    Args:
        model: Scores.
        call: With a claim.
        tokens_most: Tokens of prompt and answer at most.
        piece_tokens: Tokens that are read at a time.

    Raises:
        UnanswerableCallError: The prompt cannot be read, or is too long.
    """

    def __init__(
        self,
        model: ReadingModel,
        call: ModelCall,
        tokens_most: int,
        *,
        piece_tokens: int = PIECE_TOKENS,
    ) -> None:
        if call.claim is None:
            raise ValueError("a check has a claim")
        self._model, self._call, self._claim = model, call, call.claim
        self._piece_tokens = piece_tokens
        prompt = prompt_tokens(model, call)
        self._prompt_tokens = len(prompt)
        # What follows on the last token that is read is the end, or nothing that was claimed.
        self._tokens = [*prompt, *call.tokens_out]
        if len(self._tokens) > tokens_most:
            raise CallTooLongError(f"{len(self._tokens)} tokens are more than {tokens_most}")
        self.tokens_most = len(self._tokens)
        """See `EngineConversation`."""
        self._reader: ScoringReader | None = None
        self._read = 0
        self._vocabulary = model.vocabulary
        self._ends = sorted(model.end_tokens)
        self._scored, self._margin = 0, 0
        self.log_likelihood = 0.0
        """Sum over the claimed tokens that were scored so far, in nats; no end is among them."""

    @torch.inference_mode()
    def step(self) -> list[AnswerPart]:
        """Read one more piece; the last step gives the figures."""
        piece = self._readable_tokens[self._read : self._read + self._piece_tokens]
        if self._reader is None:
            self._reader = self._scoring_reader()
        logits = self._reader.read_each(piece)
        for place in range(len(piece)):
            self._score(logits[place], self._read + place + 1 - self._prompt_tokens)
        self._read += len(piece)
        if self._read < len(self._tokens):
            return []
        figures = CheckFigures(self._scored, self._margin, self._prompt_tokens)
        return [CheckResult(figures)]

    def _scoring_reader(self) -> ScoringReader:
        """A reader that gives all logits of a pass.

        Raises:
            UnanswerableCallError: The engine has none, as llama.cpp's, which keeps the last ones.
        """
        reader = self._model.open_reader(self.tokens_most)
        if isinstance(reader, ScoringReader):
            return reader
        reader.close()
        raise UnanswerableCallError("this engine keeps the last logits alone, and scores no answer")

    def close(self) -> None:
        """See `EngineConversation.close`."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    @property
    def _readable_tokens(self) -> list[int]:
        """All tokens; one that is none of the model's is scored, and read as the first one."""
        return [token if token < self._vocabulary else 0 for token in self._tokens]

    def _score(self, logits: torch.Tensor, position: int) -> None:
        """Score the token at a position of the answer, if it is claimed."""
        tokens, claim = self._call.tokens_out, self._claim
        if position < claim.first or position > len(tokens):
            return
        if position < len(tokens):
            margin = self._margin_of(logits, position, tokens[position])
            self.log_likelihood += self._log_probability(logits, tokens[position])
        elif claim.has_ended:
            margin = min(
                (self._margin_of(logits, position, end) for end in self._ends), default=MARGIN_MOST
            )
        else:
            return
        self._scored += 1
        self._margin += margin

    def _log_probability(self, logits: torch.Tensor, token: int) -> float:
        if token >= self._vocabulary:
            return -math.inf
        return float(logits[token].double() - torch.logsumexp(logits.double(), 0))

    def _margin_of(self, logits: torch.Tensor, position: int, token: int) -> int:
        if token >= self._vocabulary:
            return MARGIN_MOST
        margin = token_margin(logits, self._call.sampling, position, token)
        return min(MARGIN_MOST, math.ceil(margin * _UNIT)) if math.isfinite(margin) else MARGIN_MOST
