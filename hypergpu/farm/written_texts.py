"""Texts that nodes write, what is claimed of them, and what a judge says of a claim.

A written text travels with its tokens, and with their log-likelihood by the model that wrote it.
Another node gets tokens and text as a claim, without that number, reads them in one pass and says
their log-likelihood by its own model, and how far they are from the tokens that the item's seed
gives there (`margin`). So nobody can judge without the model, and nodes that round otherwise agree.
"""

from collections.abc import Sequence

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.bundle_results import ItemResult, json_results

GENERATE_VERSION = 2
"""Version of the kind `generate`: since the second one its texts are judged."""
TOKENS_MOST = 65_536
"""Tokens of a written text at most."""


class WrittenText(msgspec.Struct, frozen=True, kw_only=True):
    """Value of an item that was written."""

    text: str
    prompt_tokens: int
    new_tokens: int
    token_ids: tuple[int, ...]
    """The new tokens, without the one that ended the text."""
    log_likelihood: float
    """Sum over these tokens, in nats, by the logits that they were drawn from."""


class TextClaim(msgspec.Struct, frozen=True, kw_only=True):
    """What a judge is told of a written text."""

    text: str
    prompt_tokens: int
    token_ids: tuple[int, ...]


class TextJudgement(msgspec.Struct, frozen=True, kw_only=True):
    """Value of an item whose claim was judged."""

    tokens: int
    """Tokens of the prompt and of the claim: the work of the judgement."""
    log_likelihood: float
    """Sum over the claimed tokens, in nats, by the judge's model."""
    margin: int
    """Sum of the margins of the claimed tokens, and of the end where the text has one: see
    `hypergpu.serving.calls.MARGIN_MOST`.
    """


def claim_lines(results: Sequence[ItemResult]) -> bytes:
    """Claims of some items as JSON lines, in their order: what was given up has its reason.

    Raises:
        HyperGPUError: REQUEST_INVALID, a value is no written text.
    """
    return json_results([_claim(each) for each in results])


def _claim(result: ItemResult) -> ItemResult:
    if result.error:
        return result
    written_text = written_value(result)
    claim = TextClaim(
        text=written_text.text,
        prompt_tokens=written_text.prompt_tokens,
        token_ids=written_text.token_ids,
    )
    return ItemResult(msgspec.to_builtins(claim))


def written_value(result: ItemResult) -> WrittenText:
    """The written text of an item that has a value.

    Raises:
        HyperGPUError: REQUEST_INVALID, it is none.
    """
    try:
        written_text = msgspec.convert(result.value, WrittenText)
    except msgspec.ValidationError as error:
        raise _form_error(f"a written text: {error}") from error
    count = len(written_text.token_ids)
    if count > TOKENS_MOST or written_text.new_tokens != count:
        raise _form_error(f"a text of {written_text.new_tokens} new tokens with {count}")
    return written_text


def check_written(results: Sequence[ItemResult]) -> None:
    """Check that all values are written texts.

    Raises:
        HyperGPUError: REQUEST_INVALID, one is not.
    """
    for result in results:
        if not result.error:
            written_value(result)


def check_judgements(results: Sequence[ItemResult]) -> None:
    """Check that all values are judgements.

    Raises:
        HyperGPUError: REQUEST_INVALID, one is not.
    """
    for result in results:
        if not result.error:
            judged_value(result)


def judged_value(result: ItemResult) -> TextJudgement:
    """The judgement of an item that has a value.

    Raises:
        HyperGPUError: REQUEST_INVALID, it is none.
    """
    try:
        return msgspec.convert(result.value, TextJudgement)
    except msgspec.ValidationError as error:
        raise _form_error(f"a judgement: {error}") from error


def _form_error(why: str) -> HyperGPUError:
    return HyperGPUError(Reason.REQUEST_INVALID, f"the result of a bundle is malformed: {why}")
