"""A tokenizer of transformers as a GGUF file has it.

llama.cpp knows how a text falls apart before tokens are formed by a name alone. So a tokenizer is
taken only where its rule is one of those that are named here; all others are refused.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from hypergpu.workloads.gguf.refusal import GgufRefusalError

_NORMAL, _UNKNOWN, CONTROL, USER_DEFINED, UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
"""Types of tokens: marks that texts do not hold, marks that they may, tokens that none has."""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS: Mapping[str, str] = MappingProxyType(
    {
        f"{_CONTRACTIONS}{_WORDS}\\p{{N}}{{1,3}}{_REST}": "llama-bpe",
        f"{_CONTRACTIONS}{_WORDS}\\p{{N}}{_REST}": "qwen2",
    }
)
PATTERNS: Mapping[str, str] = MappingProxyType({rule: each for each, rule in _PATTERNS.items()})
"""Patterns by which texts fall apart, by the names of their rules."""
_SPACE = "▁"
_RARE = -1e6
"""Score of a token that no merge gives."""


class Vocabulary(NamedTuple):
    """Metadata of a tokenizer."""

    model: str
    """``gpt2``: bytes and merges; ``llama``: characters and scores."""
    rule: str
    """Name of the rule by which a text falls apart; empty: there is none."""
    tokens: list[bytes]
    types: list[int]
    merges: list[str]
    scores: list[float]
    has_space_before: bool
    """Whether a space is put before a text."""


def vocabulary_of(tokenizer: Any, size: int) -> Vocabulary:
    """The vocabulary of a tokenizer.

    Args:
        tokenizer: Loaded by transformers.
        size: Tokens that the model has; those that the tokenizer lacks are never used.

    Raises:
        GgufRefusalError: llama.cpp has no such tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    settings = json.loads(backend.to_str()) if backend is not None else {}
    model = settings.get("model", {})
    if model.get("type") != "BPE":
        kind = model.get("type") or type(tokenizer).__name__
        raise GgufRefusalError(f"a tokenizer of the kind {kind} is not written as GGUF here")
    tokens, types = _tokens(tokenizer, model, size)
    merges = [_merge_text(each) for each in model.get("merges", [])]
    if not merges:
        raise GgufRefusalError("a tokenizer without merges is none that llama.cpp loads")
    if model.get("byte_fallback"):
        has_space_before = _has_space_before(settings)
        scores = _scores(tokens, merges)
        return Vocabulary("llama", "default", tokens, types, [], scores, has_space_before)
    return Vocabulary(
        "gpt2", _rule_name(settings), tokens, types, merges, [], has_space_before=False
    )


def _tokens(tokenizer: Any, model: Mapping[str, Any], size: int) -> tuple[list[bytes], list[int]]:
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if vocabulary and max(vocabulary.values()) >= size:
        count = max(vocabulary.values()) + 1
        raise GgufRefusalError(f"the tokenizer has {count} tokens, and the model {size}")
    tokens = [f"[PAD{place}]".encode() for place in range(size)]
    types = [UNUSED] * size
    has_bytes = bool(model.get("byte_fallback"))
    for text, token in vocabulary.items():
        tokens[token] = text.encode()
        is_byte = has_bytes and len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        types[token] = _BYTE if is_byte else _NORMAL
    for token, mark in tokenizer.added_tokens_decoder.items():
        types[token] = CONTROL if mark.special else USER_DEFINED
    unknown_token = vocabulary.get(model.get("unk_token") or "")
    if unknown_token is not None and has_bytes:
        types[unknown_token] = _UNKNOWN
    return tokens, types


def _merge_text(merge: Any) -> str:
    return merge if isinstance(merge, str) else " ".join(merge)


def _scores(tokens: list[bytes], merges: list[str]) -> list[float]:
    """Scores by which the merge that comes first here is made first there."""
    ranks: dict[bytes, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault("".join(merge.split(" ")).encode(), rank)
    return [-float(ranks[token]) if token in ranks else _RARE for token in tokens]


def _has_space_before(settings: Mapping[str, Any]) -> bool:
    """Whether a space comes before a text, of a tokenizer whose spaces are characters.

    Raises:
        GgufRefusalError: It changes texts otherwise.
    """
    normalizers = _parts(settings.get("normalizer"), "normalizers")
    splitters = _parts(settings.get("pre_tokenizer"), "pretokenizers")
    prepends = [each for each in normalizers if each == {"type": "Prepend", "prepend": _SPACE}]
    replaces = [
        each
        for each in normalizers
        if each.get("type") == "Replace"
        and each.get("pattern") == {"String": " "}
        and each.get("content") == _SPACE
    ]
    # A split at spaces finds none once they are replaced.
    odd_splitters = [
        each
        for each in splitters
        if not (each.get("type") == "Split" and each.get("pattern") == {"String": " "})
    ]
    if not replaces or len(prepends) + len(replaces) != len(normalizers) or odd_splitters:
        kinds = ", ".join(str(each.get("type")) for each in [*normalizers, *splitters])
        raise GgufRefusalError(f"a tokenizer that changes texts by {kinds} is not written here")
    return bool(prepends)


def _rule_name(settings: Mapping[str, Any]) -> str:
    """Name of the rule by which a text of bytes falls apart.

    Raises:
        GgufRefusalError: None that is known here.
    """
    normalizers = _parts(settings.get("normalizer"), "normalizers")
    parts = _parts(settings.get("pre_tokenizer"), "pretokenizers")
    kinds = [str(each.get("type")) for each in parts]
    is_plain = all(each.get("type") == "NFC" for each in normalizers)
    has_prefix = any(each.get("add_prefix_space") for each in parts)
    if not has_prefix and is_plain:
        uses_regex = bool(parts) and bool(parts[-1].get("use_regex", True))
        if kinds == ["ByteLevel"] and uses_regex and not normalizers:
            return "gpt-2"
        is_digits = kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits")
        if is_digits and uses_regex and not normalizers:
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and not uses_regex:
            pattern = str(parts[0].get("pattern", {}).get("Regex", ""))
            if pattern in _PATTERNS:
                return _PATTERNS[pattern]
    detail = " then ".join([*kinds, *(str(each.get("type")) for each in normalizers)]) or "nothing"
    raise GgufRefusalError(
        f"a tokenizer that splits texts by {detail} has no name in llama.cpp that is known here."
        " Fix: take convert_hf_to_gguf.py of llama.cpp for it"
    )


def _parts(rule: Any, name: str) -> list[Mapping[str, Any]]:
    """A rule of a tokenizer as the list of its parts."""
    if not isinstance(rule, Mapping):
        return []
    return list(rule.get(name, [])) if rule.get("type") == "Sequence" else [rule]
