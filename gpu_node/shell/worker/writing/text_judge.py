"""Judges texts that another node wrote: reads prompt and claimed tokens once, and writes none."""

import math
from collections.abc import Sequence

import msgspec
import torch

from gpu_node.shell.worker.farm.chunk_items import TextItem
from gpu_node.shell.worker.farm.language_model import LanguageModel
from gpu_node.shell.worker.protocol import DoWork
from gpu_node.shell.worker.serving.answer_check import AnswerCheck
from gpu_node.shell.worker.serving.transformers_model import TransformersModel
from gpu_node.shell.worker.trainer import ShardError
from gpu_node.shell.worker.writing.writing_rules import WritingRules, item_seed, prompt_tokens
from hypergpu.blobs import BlobRef
from hypergpu.errors import HyperGPUError
from hypergpu.farm.bundle_results import ItemResult, read_json_results
from hypergpu.farm.written_texts import TextClaim, TextJudgement
from hypergpu.serving.calls import MARGIN_MOST, AnswerClaim, CheckResult, ModelCall

_NO_CLAIM = TextClaim(text="", prompt_tokens=0, token_ids=())


class TextJudge:
    """Judges claims with a model."""

    def __init__(self, model: LanguageModel, rules: WritingRules, seed: int) -> None:
        self._model = model
        self._reading_model = TransformersModel(model)
        self._rules = rules
        self._seed = seed

    @torch.inference_mode()
    def judge(self, item: TextItem, claim: ItemResult) -> tuple[ItemResult, int]:
        """The judgement of an item's claim, with its tokens of work.

        An item that cannot be done has its reason, as where it is written. A claim that is none, or
        that gives up an item which can be done, has the largest margin.
        """
        prompt, error = prompt_tokens(self._model, self._rules, item)
        if error:
            return ItemResult(error=error), 0
        text_claim = _claim_of(claim)
        tokens = len(prompt) + len(text_claim.token_ids)
        is_possible = (
            not claim.error
            and text_claim.prompt_tokens == len(prompt)
            and len(text_claim.token_ids) <= self._rules.new_tokens_most
            and self._is_text_of(text_claim)
        )
        judgement = TextJudgement(
            tokens=tokens,
            log_likelihood=0.0,
            margin=MARGIN_MOST * (1 + len(text_claim.token_ids)),
        )
        if is_possible:
            judgement = self._read(item, prompt, text_claim)
        return ItemResult(msgspec.to_builtins(judgement)), tokens

    def _is_text_of(self, claim: TextClaim) -> bool:
        """Whether the tokens are the model's, and give the text."""
        tokens = list(claim.token_ids)
        if any(not 0 <= token < self._reading_model.vocabulary for token in tokens):
            return False
        text: str = self._model.tokenizer.decode(tokens, skip_special_tokens=True)
        return text == claim.text

    def _read(self, item: TextItem, prompt: Sequence[int], claim: TextClaim) -> TextJudgement:
        count = len(claim.token_ids)
        call = ModelCall(
            tokens=tuple(prompt),
            sampling=self._rules.sampling(item_seed(self._seed, item.position)),
            tokens_out=claim.token_ids,
            claim=AnswerClaim(0, has_ended=count < self._rules.new_tokens_most),
        )
        check = AnswerCheck(self._reading_model, call, len(prompt) + count)
        try:
            parts = check.step()
            while not parts:
                parts = check.step()
        finally:
            check.close()
        result = parts[0]
        if not isinstance(result, CheckResult):
            raise TypeError("a check ends with its figures")
        likelihood = check.log_likelihood
        return TextJudgement(
            tokens=len(prompt) + count,
            log_likelihood=likelihood if math.isfinite(likelihood) else 0.0,
            margin=result.figures.margin,
        )


def _claim_of(claim: ItemResult) -> TextClaim:
    try:
        return msgspec.convert(claim.value, TextClaim)
    except msgspec.ValidationError:
        return _NO_CLAIM


def read_claims(request: DoWork, claims: BlobRef, items: int) -> list[ItemResult]:
    """The claims of a bundle's items.

    Raises:
        ShardError: They are not there, or malformed.
    """
    try:
        return read_json_results(request.input_path(claims).read_bytes(), items)
    except OSError as error:
        raise ShardError(f"the claims cannot be read: {error.strerror}") from error
    except HyperGPUError as error:
        raise ShardError(error.message) from error
