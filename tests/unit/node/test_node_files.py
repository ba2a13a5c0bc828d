import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_node.core.end_states import Memory, TrainingStart, with_finished
from gpu_node.shell.link.chunks import decode_chunk, encode_chunk
from gpu_node.shell.state.files import (
    load_capabilities,
    load_coordinator,
    load_memory,
    node_name,
    save_memory,
)
from gpu_node.shell.state.paths import StatePaths
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
        node_pb2.SubmitUpdateRequest.FromString(encode_chunk(offset, memoryview(payload)))
        == message
    )


@given(OFFSETS, st.binary(min_size=1, max_size=300))
def test_a_chunk_read_by_hand_is_what_protobuf_reads(offset: int, payload: bytes) -> None:
    chunk = tensor_pb2.Chunk(offset=offset, payload=payload)
    raw = node_pb2.FetchBlobResponse(chunk=chunk).SerializeToString()
    piece = decode_chunk(raw)
    assert (piece.offset, bytes(piece.payload)) == (offset, payload)


def test_a_chunk_laid_out_otherwise_is_left_to_protobuf() -> None:
    payload_first = b"\x0a\x07" + b"\x12\x03abc" + b"\x08\x05"
    piece = decode_chunk(payload_first)
    assert (piece.offset, bytes(piece.payload)) == (5, b"abc")


def test_memory_outlives_the_daemon_word_for_word(tmp_path: Path) -> None:
    memory = with_finished(Memory(), assignment(), TrainingStart(2, returns_update=True), update())
    with StatePaths(tmp_path) as paths:
        save_memory(paths, memory)
        assert load_memory(paths) == memory


@pytest.mark.parametrize("content", [b'{"jobs": ', b'{"jobs":{"\xff":{}}}'])
def test_a_damaged_memory_is_refused_with_the_fix(tmp_path: Path, content: bytes) -> None:
    with StatePaths(tmp_path) as paths:
        paths.memory.write_bytes(content)
        with pytest.raises(HyperGPUError, match="delete it with"):
            load_memory(paths)


def test_who_the_node_joined_is_asked_again_where_its_file_is_no_text(tmp_path: Path) -> None:
    with StatePaths(tmp_path) as paths:
        paths.coordinator.write_bytes(b'{"address":"\xff"}')
        with pytest.raises(HyperGPUError, match="join again"):
            load_coordinator(paths)


def test_a_worker_that_is_no_text_is_as_none(tmp_path: Path) -> None:
    with StatePaths(tmp_path) as paths:
        paths.worker.write_bytes(b'{"type":"WorkerCapabilities","device":"\xff"}')
        assert load_capabilities(paths, "numpy") is None


def test_a_node_is_called_what_it_was_told_the_last_time(tmp_path: Path) -> None:
    with StatePaths(tmp_path) as paths:
        assert node_name(paths, "") == socket.gethostname()
        assert node_name(paths, "attic") == node_name(paths, "") == "attic"
        assert node_name(paths, "cellar") == node_name(paths, "") == "cellar"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../up"])
def test_a_jobs_id_never_leads_out_of_the_state_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(HyperGPUError, match="no job's id"):
        StatePaths(tmp_path).job(JobId(name))


def test_what_an_unfinished_training_left_goes_before_the_next(tmp_path: Path) -> None:
    names = ["end-3.safetensors", "update-3", "end-4.safetensors", "update-4", ".update-4.partial"]
    with StatePaths(tmp_path) as paths:
        folder = paths.job(JOB)
        folder.mkdir()
        for name in names:
            (folder / name).touch()
        paths.delete_unfinished(JOB, kept_rounds=(3,))
        assert sorted(path.name for path in folder.iterdir()) == ["end-3.safetensors", "update-3"]


def test_deleting_a_job_leaves_the_others(tmp_path: Path) -> None:
    with StatePaths(tmp_path) as paths:
        other = JobId("job-other")
        for job_id in (JOB, other):
            paths.job(job_id).mkdir()
        paths.delete_job(JOB)
        assert [path.name for path in paths.jobs.iterdir()] == [other]
