"""The tokenizer of transformers that a GGUF file states, held against the file once it is saved.

Texts of a vocabulary of bytes fall apart by a rule that the file names; transformers makes a
tokenizer of a file by another rule, whatever is named (5.23.0), so that it is made here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hypergpu.gguf.header import GgufHeader
from hypergpu.workloads.finetuning.base_model import load_tokenizer
from hypergpu.workloads.gguf.refusal import file_refusal
from hypergpu.workloads.gguf.vocabulary import (
    CONTROL,
    PATTERNS,
    UNUSED,
    USER_DEFINED,
    vocabulary_of,
)

_BYTES, _CHARACTERS = "gpt2", "llama"
_PLAIN_RULES = frozenset({"gpt-2", "default"})


class _FileTokens(NamedTuple):
    """What a file has of its vocabulary."""

    tokens: list[str]
    types: list[int]
    merges: list[str]

    def of_type(self, kind: int) -> list[str]:
        return [token for token, own in zip(self.tokens, self.types, strict=True) if own == kind]


def save_tokenizer(path: Path, header: GgufHeader, fields: Mapping[str, Any], folder: Path) -> None:
    """Save a file's tokenizer into the folder that has the configuration already.

    Args:
        path: The file.
        header: Its header, which was checked.
        fields: Its metadata as gguf's reader has them, whose lists the header leaves out.
        folder: Has ``config.json``, by which transformers chooses a class.

    Raises:
        GgufRefusalError: It cannot be made, or would make other tokens than the file's.
    """
    kind, file_tokens = header.text("tokenizer.ggml.model"), _read_tokens(fields)
    if kind == _BYTES:
        tokenizer = _byte_tokenizer(header, file_tokens)
    elif kind == _CHARACTERS:
        tokenizer = _character_tokenizer(path)
    else:
        raise file_refusal(f"a tokenizer of the kind {kind!r} is not read here")
    tokenizer.save_pretrained(folder)
    _check_saved(header, file_tokens, tokenizer, folder)


def _read_tokens(fields: Mapping[str, Any]) -> _FileTokens:
    try:
        tokens = _texts(fields["tokenizer.ggml.tokens"])
        types = [int(each) for each in fields["tokenizer.ggml.token_type"].contents()]
    except (KeyError, UnicodeDecodeError, ValueError, TypeError) as error:
        raise file_refusal(f"its vocabulary cannot be read: {error}") from error
    merges = fields.get("tokenizer.ggml.merges")
    if len(types) != len(tokens):
        raise file_refusal(f"it has {len(tokens)} tokens and {len(types)} types of them")
    return _FileTokens(tokens, types, _texts(merges) if merges is not None else [])


def _texts(field: Any) -> list[str]:
    return [bytes(field.parts[place]).decode() for place in field.data]


def _mark(header: GgufHeader, name: str, tokens: int) -> int | None:
    place = header.number(f"tokenizer.ggml.{name}_token_id")
    if place is not None and not 0 <= place < tokens:
        raise file_refusal(f"its {name} token is number {place} of {tokens}")
    return place


def _byte_tokenizer(header: GgufHeader, file_tokens: _FileTokens) -> Any:
    rule = header.text("tokenizer.ggml.pre") or "default"
    vocabulary = {
        token: place
        for place, token in enumerate(file_tokens.tokens)
        if file_tokens.types[place] != UNUSED
    }
    pairs = [
        (first, second) for first, _, second in (each.partition(" ") for each in file_tokens.merges)
    ]
    try:
        backend = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=rule == "llama-bpe"))
    except Exception as error:  # tokenizers raises nothing narrower
        raise file_refusal(f"its merges cannot be read: {error}") from error
    backend.pre_tokenizer = _splitter(rule)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(_added_tokens(file_tokens.of_type(CONTROL), is_special=True))
    backend.add_tokens(_added_tokens(file_tokens.of_type(USER_DEFINED), is_special=False))
    begin = _mark(header, "bos", len(file_tokens.tokens))
    # llama.cpp puts it before texts of Llama 3 where a file says nothing.
    adds_begin = header.is_true("tokenizer.ggml.add_bos_token", default=rule == "llama-bpe")
    if begin is not None and adds_begin:
        token = file_tokens.tokens[begin]
        backend.post_processor = TemplateProcessing(
            single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, begin)]
        )
    names = (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"))
    marks = {
        name: file_tokens.tokens[place]
        for name, key in (*names, ("unk_token", "unknown"))
        if (place := _mark(header, key, len(file_tokens.tokens))) is not None
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=header.text("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **marks,
    )


def _added_tokens(texts: list[str], *, is_special: bool) -> list[AddedToken]:
    return [AddedToken(text, special=is_special, normalized=False) for text in texts]


def _splitter(rule: str) -> pre_tokenizers.PreTokenizer:
    if rule in _PLAIN_RULES:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if rule == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if rule not in PATTERNS:
        raise file_refusal(
            f"its texts fall apart by the rule {rule!r}, which is none that is known here"
        )
    split = pre_tokenizers.Split(Regex(PATTERNS[rule]), "isolated")
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, bytes_alone])


def _character_tokenizer(path: Path) -> Any:
    """The tokenizer that transformers makes of scores."""
    try:
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # a library's conversion may raise anything
        text = str(error).partition("\n")[0][:200]
        raise file_refusal(f"its tokenizer cannot be made: {text}") from error


def _check_saved(
    header: GgufHeader, file_tokens: _FileTokens, tokenizer: Any, folder: Path
) -> None:
    """Load the tokenizer as nodes will, and hold it against the file."""
    saved_tokenizer = load_tokenizer(folder)
    vocabulary = vocabulary_of(saved_tokenizer, len(file_tokens.tokens))
    places = [place for place, kind in enumerate(file_tokens.types) if kind != UNUSED]
    own = [vocabulary.tokens[place].decode() for place in places]
    is_same = own == [file_tokens.tokens[place] for place in places]
    if header.text("tokenizer.ggml.model") == _BYTES:
        rule = header.text("tokenizer.ggml.pre") or "default"
        is_same = is_same and vocabulary.merges == file_tokens.merges
        is_same = is_same and vocabulary.rule == ("gpt-2" if rule in _PLAIN_RULES else rule)
    sample = "number 12345 isn't «naïve»,\n\n  数学 WE'LL see"
    if not is_same or saved_tokenizer(sample)["input_ids"] != tokenizer(sample)["input_ids"]:
        raise file_refusal("transformers makes another tokenizer of it")
