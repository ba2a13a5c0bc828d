import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from coordinator.shell.servicers.wire import chunks
from hypergpu.errors import HyperGPUError
from hypergpu.v1 import job_pb2, node_pb2, tensor_pb2

OFFSETS = st.integers(0, 2**63)
PAYLOADS = st.binary(max_size=300)


@given(OFFSETS, PAYLOADS)
def test_a_chunk_built_by_hand_is_protobufs_own_encoding(offset: int, payload: bytes) -> None:
    chunk = tensor_pb2.Chunk(offset=offset, payload=payload)
    view = memoryview(payload)

    fetched = node_pb2.FetchBlobResponse.FromString(chunks.encode_fetched(offset, view))
    exported = job_pb2.ExportModelResponse.FromString(chunks.encode_exported(offset, view))
    assert fetched.chunk == exported.chunk == chunk


@given(OFFSETS, PAYLOADS)
def test_a_chunk_taken_apart_by_hand_is_what_protobuf_reads(offset: int, payload: bytes) -> None:
    chunk = tensor_pb2.Chunk(offset=offset, payload=payload)
    raw = node_pb2.SubmitUpdateRequest(chunk=chunk).SerializeToString()

    piece = chunks.upload_parser(node_pb2.SubmitUpdateRequest)(raw)
    assert (piece.offset, bytes(piece.payload)) == (offset, payload)


@given(st.binary(max_size=64))
def test_no_bytes_at_all_break_the_parser(raw: bytes) -> None:
    parse = chunks.upload_parser(node_pb2.SubmitUpdateRequest)
    try:
        parsed = parse(raw)
    except HyperGPUError:
        with pytest.raises(DecodeError):
            node_pb2.SubmitUpdateRequest.FromString(raw)
        return
    if isinstance(parsed, chunks.UploadChunk):
        message = node_pb2.SubmitUpdateRequest.FromString(raw)
        assert (message.chunk.offset, message.chunk.payload) == (
            parsed.offset,
            bytes(parsed.payload),
        )


def test_a_header_is_given_as_its_own_message() -> None:
    header = node_pb2.UpdateHeader(nonce=7)
    raw = node_pb2.SubmitUpdateRequest(header=header).SerializeToString()
    assert chunks.upload_parser(node_pb2.SubmitUpdateRequest)(raw) == header
