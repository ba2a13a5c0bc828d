"""Headers of GGUF files: right ones are read, and no malformed one does more than be refused."""

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.gguf.header import (
    GgufArray,
    GgufHeader,
    parse_gguf_header,
    read_gguf_header,
)
from hypergpu.gguf.tensor_types import TENSOR_TYPES
from tests.gguf_files import (
    KEYS,
    TENSORS,
    Key,
    Tensor,
    gguf_content,
    list_key,
    number_key,
    text,
    text_key,
)

CONTENT = gguf_content()
HEADER_BYTES = len(CONTENT) - 500
MEMORY_BYTES_MOST = 4 << 20
"""What a refusal may take: a malformed count must not decide it."""


def parse(content: bytes) -> GgufHeader:
    return parse_gguf_header(content, len(content))


def test_a_header_is_read_as_it_was_written() -> None:
    header = parse(CONTENT)
    assert header.architecture == "llama"
    assert header.number("llama.block_count") == 2
    assert header.metadata["tokenizer.ggml.tokens"] == GgufArray(8, 3)
    assert header.metadata["tokenizer.ggml.scores"] == GgufArray(6, 2, (0.5, -1.0))
    assert header.is_true("tokenizer.ggml.add_bos_token", default=False)
    assert [tensor.size_bytes for tensor in header.tensors] == [384, 68, 20]
    assert header.weights_bytes == 472
    assert header.data_offset_bytes == HEADER_BYTES


def test_a_file_of_the_gguf_package_is_read_alike(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 7)
    writer.add_string("tokenizer.chat_template", "{{ messages }}")
    writer.add_array("numbers", [*range(5000)])
    rng = np.random.default_rng(1)
    kinds = (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16)
    for kind in kinds:
        numbers = rng.normal(size=(3, 64)).astype(np.float32)
        writer.add_tensor(kind.name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header, theirs = read_gguf_header(path), gguf.GGUFReader(path)
    assert header.metadata["numbers"] == GgufArray(5, 5000)
    assert header.metadata.keys() == {key for key in theirs.fields if not key.startswith("GGUF.")}
    assert header.data_offset_bytes == theirs.data_offset
    for ours, tensor in zip(header.tensors, theirs.tensors, strict=True):
        assert ours.shape == tuple(tensor.shape)
        assert (ours.name, ours.type.name) == (tensor.name, tensor.tensor_type.name)
        assert header.data_offset_bytes + ours.offset_bytes == tensor.data_offset
        assert ours.size_bytes == tensor.n_bytes


def test_types_of_tensors_have_the_sizes_of_the_gguf_package() -> None:
    ours = {kind: (each.block_numbers, each.block_bytes) for kind, each in TENSOR_TYPES.items()}
    theirs = {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    # The other two only exist while a product is computed.
    assert theirs.keys() - ours.keys() == {9, 15}
    assert ours == {kind: theirs[kind] for kind in ours}


HUGE = 2**63 - 1
FAULTS = {
    "does not begin with": gguf_content(begin=b"GGML\x03\x00\x00\x00"),
    "version 1 is none": gguf_content(begin=b"GGUF\x01\x00\x00\x00"),
    r"version 50331648 \(it may be big-endian\)": gguf_content(begin=b"GGUF\x00\x00\x00\x03"),
    "tensors do not fit": gguf_content(counts=(HUGE, 5)),
    "keys do not fit": gguf_content(counts=(3, HUGE)),
    "a key of 281474976710656 bytes": CONTENT[:24] + struct.pack("<Q", 1 << 48) + CONTENT[32:],
    "a text of 9223372036854775807 bytes": gguf_content([Key(b"a", 8, struct.pack("<Q", HUGE))]),
    "unknown type 77": gguf_content([Key(b"a", 77, b"")]),
    "values of the type 9": gguf_content([list_key("a", 9, 1, struct.pack("<IQ", 4, 0))]),
    "texts do not fit": gguf_content([list_key("a", 8, HUGE, b"")]),
    "numbers do not fit": gguf_content([list_key("a", 12, HUGE // 8, b"")]),
    "more bytes are announced": gguf_content([list_key("a", 8, 1, struct.pack("<Q", HUGE))]),
    "a key is no UTF-8": gguf_content([Key(b"\xff", 4, b"0000")]),
    "is empty or comes twice": gguf_content([*KEYS, KEYS[1]]),
    "alignment 3 is no power": gguf_content([number_key("general.alignment", 3)]),
    "alignment 'x' is no power": gguf_content([text_key("general.alignment", "x")]),
    "name of 64 bytes is too long": gguf_content(tensors=[Tensor(b"n" * 64, (1,), 0, 0)]),
    "has 5 dimensions": gguf_content(tensors=[Tensor(b"a", (1,) * 5, 0, 0)]),
    "unknown type 4": gguf_content(tensors=[Tensor(b"a", (32,), 4, 0)]),
    r"of F32 has the shape \(0, 4\)": gguf_content(tensors=[Tensor(b"a", (0, 4), 0, 0)]),
    r"has the shape \(4294967296, 4294967296\)": gguf_content(
        tensors=[Tensor(b"a", (1 << 32, 1 << 32), 0, 0)]
    ),
    r"of Q8_0 has the shape \(31,\)": gguf_content(tensors=[Tensor(b"a", (31,), 8, 0)]),
    "'token_embd.weight' comes twice": gguf_content(tensors=[TENSORS[0], TENSORS[0]]),
    "lies at 64 and not at 0": gguf_content(tensors=[Tensor(b"a", (4,), 0, 64)]),
    "lies at 352 and not at 384": gguf_content(tensors=[TENSORS[0], Tensor(b"b", (32, 2), 8, 352)]),
    "ends behind the file": gguf_content(data_bytes=499),
    "'a' of 4611686018427387904 bytes": gguf_content(tensors=[Tensor(b"a", (1 << 60,), 0, 0)]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_malformed_file_is_refused_with_its_fault(fault: str, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(FAULTS[fault])
    with pytest.raises(HyperGPUError, match=fault) as refusal:
        read_gguf_header(path)
    assert refusal.value.reason is Reason.FILE_UNUSABLE


@pytest.mark.parametrize("size_bytes", [0, 3, 4, 23])
def test_a_file_that_ends_at_once_is_refused(size_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(CONTENT[:size_bytes])
    with pytest.raises(HyperGPUError, match="is no GGUF"):
        read_gguf_header(path)
    with pytest.raises(HyperGPUError, match="No such file"):
        read_gguf_header(tmp_path / "b.gguf")


@given(
    st.lists(st.tuples(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255)), max_size=6),
    st.integers(0, len(CONTENT)),
)
@example([(8, 255), (15, 127)], len(CONTENT))
@example([(24, 255), (31, 127)], len(CONTENT))
def test_a_header_with_any_bytes_changed_is_right_or_refused(
    changes: list[tuple[int, int]], end: int
) -> None:
    content = bytearray(CONTENT)
    for place, value in changes:
        content[place] = value
    check_right_or_refused(bytes(content[:end]))


@given(st.binary(max_size=400))
def test_any_bytes_after_the_magic_are_right_or_refused(rest: bytes) -> None:
    check_right_or_refused(b"GGUF\x03\x00\x00\x00" + rest)


@given(st.integers(0, HEADER_BYTES - 8), st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**62, HUGE]))
def test_a_number_of_the_header_that_is_extreme_is_right_or_refused(place: int, value: int) -> None:
    number = struct.pack("<Q", value)
    check_right_or_refused(CONTENT[:place] + number + CONTENT[place + 8 :])


def check_right_or_refused(content: bytes) -> None:
    """Either all tensors lie in the file, side by side, or the file is refused, cheaply."""
    tracemalloc.start()
    header, reason = None, None
    try:
        header = parse(content)
    except HyperGPUError as error:
        reason = error.reason
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < MEMORY_BYTES_MOST
    if header is None:
        assert reason is Reason.FILE_UNUSABLE
        return
    end = int(header.data_offset_bytes)
    for tensor in header.tensors:
        begin = header.data_offset_bytes + tensor.offset_bytes
        assert end <= begin
        end = begin + tensor.size_bytes
    assert end <= len(content) or not header.tensors


def test_a_text_of_a_list_is_never_kept() -> None:
    tokens = b"".join(text(b"secret %d" % place) for place in range(100))
    header = parse(gguf_content([list_key("tokenizer.ggml.tokens", 8, 100, tokens)]))
    assert header.metadata == {"tokenizer.ggml.tokens": GgufArray(8, 100)}
