"""Rows as tokens with masks, and tokens as samples of equal cost.

Rows have TRL's forms: ``text``; ``prompt`` and ``completion``; ``messages``. What counts in the
loss is told by spans of a row's text, so that a token that reaches into an answer counts, however
the tokenizer cuts text where question and answer meet.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.finetuning.rows import DataRow

IGNORED = -100
"""Label of a token that does not count, as transformers has it."""
_TokenArray = NDArray[np.int32]


class Tokenizer(Protocol):
    """The part of transformers' fast tokenizers that is used here."""

    @property
    def eos_token_id(self) -> int | None: ...

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        """A token's text."""

    def __call__(self, text: str, **settings: Any) -> Mapping[str, Any]: ...

    def apply_chat_template(self, conversation: list[Mapping[str, Any]], **settings: Any) -> Any:
        """The conversation as text."""


class Passage(NamedTuple):
    """A row's text and the spans of characters that count in the loss."""

    text: str
    spans: tuple[tuple[int, int], ...]
    has_template: bool
    """The text has its special tokens already, and its end."""


class TokenRow(NamedTuple):
    """A row as tokens."""

    tokens: _TokenArray
    labels: _TokenArray
    """The tokens that count, `IGNORED` elsewhere; the first is never predicted."""


class RowRules(NamedTuple):
    """How rows become samples."""

    sequence_length: int
    """Most tokens of a sample."""
    packing: bool
    loss_on: str
    """``completion`` or ``all``."""
    vocabulary: int = 0
    """Tokens that the base has; 0: not known."""


def passage_of(row: DataRow, tokenizer: Tokenizer, loss_on: str) -> Passage:
    """A row's text.

    Raises:
        DatasetError: The row has none of the forms.
    """
    values = {name: each for name, each in row.values.items() if each is not None}
    prompt, completion = values.get("prompt"), values.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        values["messages"], first = [*prompt, *completion], len(prompt)
    else:
        first = 0
    if "messages" in values:
        return _passage_of_chat(row, tokenizer, values["messages"], first, loss_on)
    if isinstance(prompt, str) and isinstance(completion, str):
        text = prompt + completion
        start = 0 if loss_on == "all" else len(prompt)
        return Passage(text, ((start, len(text)),), has_template=False)
    if isinstance(values.get("text"), str):
        return Passage(values["text"], ((0, len(values["text"])),), has_template=False)
    raise DatasetError(
        f"{row.place} has the fields {', '.join(sorted(map(str, row.values))) or 'none'}. Fix: give"
        " text, or prompt and completion, or messages with role and content"
    )


def _passage_of_chat(
    row: DataRow, tokenizer: Tokenizer, messages: Any, first: int, loss_on: str
) -> Passage:
    """A conversation by the tokenizer's template; answers from message ``first`` on count."""
    _check_messages(row, messages)
    text = _render(row, tokenizer, messages)
    if loss_on == "all":
        return Passage(text, ((0, len(text)),), has_template=True)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or number < first:
            continue
        before = _render(row, tokenizer, messages[:number], asks=True) if number else ""
        after = _render(row, tokenizer, messages[: number + 1])
        if not (after.startswith(before) and text.startswith(after)):
            raise DatasetError(
                f"{row.place}: the tokenizer's chat template changes what it wrote before, so that"
                ' answers cannot be told from questions. Fix: set options.loss_on = "all"'
            )
        spans.append((len(before), len(after)))
    return Passage(text, tuple(spans), has_template=True)


def _check_messages(row: DataRow, messages: Any) -> None:
    is_chat = isinstance(messages, list) and messages
    if not is_chat or not all(
        isinstance(each, dict)
        and isinstance(each.get("role"), str)
        and isinstance(each.get("content"), str)
        for each in messages
    ):
        raise DatasetError(f"{row.place}: messages are a list of objects with role and content")


def _render(
    row: DataRow, tokenizer: Tokenizer, messages: list[Mapping[str, Any]], *, asks: bool = False
) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=asks
        )
    except Exception as wrong:  # a template may raise anything
        raise DatasetError(
            f"{row.place}: the chat template refuses it: {wrong}."
            " Fix: give the tokenizer a chat_template that takes these roles"
        ) from wrong
    return text


def token_rows(row: DataRow, tokenizer: Tokenizer, rules: RowRules) -> list[TokenRow]:
    """A row as one row of tokens; a long text as several, anything else cut at the end.

    Raises:
        DatasetError: The row has none of the forms.
    """
    passage = passage_of(row, tokenizer, rules.loss_on)
    encoding = tokenizer(
        passage.text,
        add_special_tokens=not passage.has_template,
        return_offsets_mapping=True,
        truncation=False,
        verbose=False,
    )
    tokens = np.array(encoding["input_ids"], np.int32)
    is_text = bool(passage.text.strip())
    check_tokens(row.place, tokens, tokenizer, rules.vocabulary, is_text=is_text)
    offsets = np.array(encoding["offset_mapping"], np.int64).reshape(-1, 2)
    counts = np.zeros(len(tokens), bool)
    for start, end in passage.spans:
        counts |= (offsets[:, 1] > start) & (offsets[:, 0] < end)
    counts &= offsets[:, 1] > offsets[:, 0]
    if not passage.has_template and tokenizer.eos_token_id is not None:
        tokens = np.append(tokens, np.int32(tokenizer.eos_token_id))
        counts = np.append(counts, True)
    pieces = _pieces(len(tokens), rules, is_whole=passage.spans[:1] != ((0, len(passage.text)),))
    rows = (_token_row(tokens[start:end], counts[start:end]) for start, end in pieces)
    return [each for each in rows if (each.labels != IGNORED).any()]


def check_tokens(
    place: str, tokens: _TokenArray, tokenizer: Tokenizer, vocabulary: int, *, is_text: bool
) -> None:
    """Refuse a row with a token that the base has no embedding of, or with none for its text.

    Args:
        place: File and row.
        tokens: The row's.
        tokenizer: Where they come from.
        vocabulary: Tokens that the base has; 0: not known.
        is_text: Whether the row has letters to make tokens of.

    Raises:
        DatasetError: There is such a token.
    """
    if is_text and not len(tokens):
        raise DatasetError(
            f"{place}: the tokenizer makes no token of its text. Fix: save the tokenizer anew"
            " with save_pretrained of the class that it was made with"
        )
    if vocabulary and len(tokens) and (highest := int(tokens.max())) >= vocabulary:
        raise DatasetError(
            f"{place} has the token {tokenizer.convert_ids_to_tokens(highest)!r}, number"
            f" {highest} of the tokenizer, and the base has {vocabulary} tokens. Fix: resize it"
            " with model.resize_token_embeddings(len(tokenizer)) and save it again"
        )


def _pieces(count: int, rules: RowRules, *, is_whole: bool) -> list[tuple[int, int]]:
    """Where a row is cut: a whole one at its end, a text again and again."""
    length = rules.sequence_length
    if is_whole:
        return [(0, min(count, length))]
    return [(start, min(start + length, count)) for start in range(0, count, length)]


def _token_row(tokens: _TokenArray, counts: NDArray[np.bool_]) -> TokenRow:
    labels = np.where(counts, tokens, np.int32(IGNORED))
    labels[:1] = IGNORED
    return TokenRow(tokens, labels)


def pack_rows(lengths: Sequence[int], length_most: int) -> list[list[int]]:
    """Rows that share a sample, each row whole: best fit of the longest first. O(n log n).

    Args:
        lengths: Tokens of each row, ``length_most`` at most.
        length_most: Tokens of a sample.
    """
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    """Tokens that still fit and the pack's number, sorted."""
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        at = bisect_left(rooms, (lengths[row], -1))
        if at == len(rooms):
            packs.append([])
            room, number = length_most, len(packs) - 1
        else:
            room, number = rooms.pop(at)
        packs[number].append(row)
        insort(rooms, (room - lengths[row], number))
    return sorted(packs)


class TokenSamples:
    """Samples of one or several rows of tokens. Implements `SampleSource`."""

    def __init__(
        self,
        rows: Sequence[TokenRow],
        sources: Sequence[int],
        packs: list[list[int]],
        rows_left_out: int = 0,
    ) -> None:
        self._rows = rows
        self.rows_left_out = rows_left_out
        """Rows without a token that counts."""
        self._packs = packs
        self._labels = np.array([sources[pack[0]] for pack in packs], np.int64)

    @property
    def labels(self) -> NDArray[np.int64]:
        """The file that a sample's first row came from: label skew then divides by files."""
        return self._labels

    def batch(self, indices: NDArray[np.int64]) -> tuple[_TokenArray, _TokenArray, _TokenArray]:
        """Tokens, labels and positions, ``int32[b, t]`` with the longest sample's ``t``.

        Positions begin at 0 with each row: models of transformers then keep rows apart. What is
        left at the end is a row of its own that does not count.
        """
        packs = [[self._rows[row] for row in self._packs[index]] for index in indices]
        length = max(sum(len(row.tokens) for row in pack) for pack in packs)
        shape = (len(packs), length)
        tokens, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        labels = np.full(shape, IGNORED, np.int32)
        for number, pack in enumerate(packs):
            at = 0
            for row in pack:
                end = at + len(row.tokens)
                tokens[number, at:end], labels[number, at:end] = row
                positions[number, at:end] = np.arange(end - at)
                at = end
            positions[number, at:] = np.arange(length - at)
        return tokens, labels, positions


def token_samples(
    part: str, rows: Iterable[DataRow], tokenizer: Tokenizer, rules: RowRules
) -> TokenSamples:
    """Samples of a part's rows.

    Raises:
        DatasetError: No row has a token to predict, or one has none of the forms.
    """
    pieces: list[TokenRow] = []
    sources: list[int] = []
    rows_left_out = 0
    for row in rows:
        row_pieces = token_rows(row, tokenizer, rules)
        pieces += row_pieces
        sources += [row.source] * len(row_pieces)
        rows_left_out += not row_pieces
    if not pieces:
        raise DatasetError(
            f"the rows of {part} have no token to predict within options.sequence_length ="
            f" {rules.sequence_length}. Fix: raise it above the longest prompt"
        )
    packs = [[number] for number in range(len(pieces))]
    if rules.packing:
        packs = pack_rows([len(each.tokens) for each in pieces], rules.sequence_length)
    return TokenSamples(pieces, sources, packs, rows_left_out)
