"""GGUF files byte by byte, right ones and others."""

import struct
from collections.abc import Sequence
from typing import NamedTuple


class Key(NamedTuple):
    """A key with its value, as they lie in a file."""

    name: bytes
    kind: int
    value: bytes


class Tensor(NamedTuple):
    """A tensor's entry."""

    name: bytes
    shape: tuple[int, ...]
    kind: int
    offset: int


def text(content: bytes) -> bytes:
    """A text with its length."""
    return struct.pack("<Q", len(content)) + content


def text_key(name: str, value: str) -> Key:
    """A key whose value is a text."""
    return Key(name.encode(), 8, text(value.encode()))


def number_key(name: str, value: int) -> Key:
    """A key whose value is a number of 32 bits."""
    return Key(name.encode(), 4, struct.pack("<I", value))


def list_key(name: str, kind: int, count: int, items: bytes) -> Key:
    """A key whose value is a list."""
    return Key(name.encode(), 9, struct.pack("<IQ", kind, count) + items)


KEYS = (
    text_key("general.architecture", "llama"),
    number_key("llama.block_count", 2),
    list_key("tokenizer.ggml.tokens", 8, 3, text(b"a") + text(b"\xff\xfe") + text(b"")),
    list_key("tokenizer.ggml.scores", 6, 2, struct.pack("<2f", 0.5, -1.0)),
    Key(b"tokenizer.ggml.add_bos_token", 7, b"\x01"),
)
TENSORS = (
    Tensor(b"token_embd.weight", (32, 3), 0, 0),
    Tensor(b"blk.0.attn_q.weight", (32, 2), 8, 384),
    Tensor(b"output_norm.weight", (5,), 0, 480),
)


def gguf_content(
    keys: Sequence[Key] = KEYS,
    tensors: Sequence[Tensor] = TENSORS,
    *,
    begin: bytes = b"GGUF\x03\x00\x00\x00",
    counts: tuple[int, int] | None = None,
    data_bytes: int = 500,
    alignment: int = 32,
) -> bytes:
    """A file. By default it is right: its tensors take 500 bytes."""
    content = begin + struct.pack("<QQ", *(counts or (len(tensors), len(keys))))
    for key in keys:
        content += text(key.name) + struct.pack("<I", key.kind) + key.value
    for tensor in tensors:
        content += text(tensor.name) + struct.pack("<I", len(tensor.shape))
        content += struct.pack(f"<{len(tensor.shape)}Q", *tensor.shape)
        content += struct.pack("<IQ", tensor.kind, tensor.offset)
    return content + bytes(-len(content) % alignment) + bytes(data_bytes)
