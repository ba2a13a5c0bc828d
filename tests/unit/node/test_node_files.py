import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_node.core.memory import Memory, Start, with_finished
from gpu_node.shell.link.bulk import decode_fetched, encode_submitted
from gpu_node.shell.state.files import (
    kept_name,
    load_coordinator,
    load_memory,
    load_ready,
    save_memory,
)
from gpu_node.shell.state.places import Places
from gpu_node.shell.training import forget_unfinished
from hypergpu.errors import HyperGPUError
from hypergpu.ids import JobId
from hypergpu.v1 import node_pb2, tensor_pb2
from tests.unit.node.node_states import JOB, assignment, update

OFFSETS = st.integers(0, (1 << 63) - 1)


@given(OFFSETS, st.binary(max_size=300))
def test_a_chunk_written_by_hand_is_what_protobuf_writes(offset: int, payload: bytes) -> None:
    chunk = tensor_pb2.Chunk(offset=offset, payload=payload)
    message = node_pb2.SubmitUpdateRequest(chunk=chunk)
    assert (
        node_pb2.SubmitUpdateRequest.FromString(encode_submitted(offset, memoryview(payload)))
        == message
    )


@given(OFFSETS, st.binary(min_size=1, max_size=300))
def test_a_chunk_read_by_hand_is_what_protobuf_reads(offset: int, payload: bytes) -> None:
    chunk = tensor_pb2.Chunk(offset=offset, payload=payload)
    raw = node_pb2.FetchBlobResponse(chunk=chunk).SerializeToString()
    piece = decode_fetched(raw)
    assert (piece.offset, bytes(piece.payload)) == (offset, payload)


def test_a_chunk_laid_out_otherwise_is_left_to_protobuf() -> None:
    payload_first = b"\x0a\x07" + b"\x12\x03abc" + b"\x08\x05"
    piece = decode_fetched(payload_first)
    assert (piece.offset, bytes(piece.payload)) == (5, b"abc")


def test_memory_outlives_the_daemon_word_for_word(tmp_path: Path) -> None:
    memory = with_finished(Memory(), assignment(), Start(2, returns_update=True), update())
    with Places(tmp_path) as places:
        save_memory(places, memory)
        assert load_memory(places) == memory


@pytest.mark.parametrize("content", [b'{"jobs": ', b'{"jobs":{"\xff":{}}}'])
def test_a_damaged_memory_is_refused_with_the_fix(tmp_path: Path, content: bytes) -> None:
    with Places(tmp_path) as places:
        places.memory.write_bytes(content)
        with pytest.raises(HyperGPUError, match="delete it with"):
            load_memory(places)


def test_who_the_node_joined_is_asked_again_where_its_file_is_no_text(tmp_path: Path) -> None:
    with Places(tmp_path) as places:
        places.coordinator.write_bytes(b'{"address":"\xff"}')
        with pytest.raises(HyperGPUError, match="join again"):
            load_coordinator(places)


def test_a_worker_that_is_no_text_is_as_none(tmp_path: Path) -> None:
    with Places(tmp_path) as places:
        places.worker.write_bytes(b'{"type":"Ready","device":"\xff"}')
        assert load_ready(places, "numpy") is None


def test_a_node_is_called_what_it_was_told_the_last_time(tmp_path: Path) -> None:
    with Places(tmp_path) as places:
        assert kept_name(places, "") == socket.gethostname()
        assert kept_name(places, "attic") == kept_name(places, "") == "attic"
        assert kept_name(places, "cellar") == kept_name(places, "") == "cellar"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../up"])
def test_a_jobs_id_never_leads_out_of_the_state_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(HyperGPUError, match="no job's id"):
        Places(tmp_path).job(JobId(name))


def test_what_an_unfinished_training_left_goes_before_the_next(tmp_path: Path) -> None:
    names = ["end-3.safetensors", "update-3", "end-4.safetensors", "update-4", ".update-4.partial"]
    for name in names:
        (tmp_path / name).touch()
    forget_unfinished(tmp_path, keeps=(3,))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["end-3.safetensors", "update-3"]


def test_deleting_a_job_leaves_the_others(tmp_path: Path) -> None:
    with Places(tmp_path) as places:
        other = JobId("job-other")
        for job_id in (JOB, other):
            places.job(job_id).mkdir()
        places.delete_job(JOB)
        assert [path.name for path in places.jobs.iterdir()] == [other]
