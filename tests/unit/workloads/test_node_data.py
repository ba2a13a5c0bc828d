"""What workloads read of a node's own folder, and what their errors tell of it."""

import io
import json
import os
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from gpu_node.core.memory import TrainingStart
from gpu_node.shell.worker import protocol
from gpu_node.shell.worker.loop import WorkerLoop
from gpu_node.shell.worker.trainers import Trainers
from hypergpu.assignment import Assignment, FailureCause, Lease, SampleRange, Task
from hypergpu.blobs import BlobRef
from hypergpu.frames import frame, read_frame
from hypergpu.ids import Digest, JobId, Slot
from hypergpu.jobfile.spec import JobSpec, TrainingSettings
from hypergpu.programs.samples import SamplesError
from hypergpu.units import Bytes, Samples
from hypergpu.user.training.train import JobSamples, write_job
from hypergpu.workloads.datasets import DatasetError, NodeDataError
from hypergpu.workloads.node_data import held_out_dataset, training_samples
from hypergpu.workloads.registry import build, build_for_job, find
from tests.tiny_bases import save_base, write_chats
from tests.unit.training.test_datasets import write_archive

X = np.arange(24, dtype=np.float32).reshape(12, 2)
Y = np.arange(12) % 2


def save_image(path: Path, level: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (16, 16), (level, level, level)).save(path)


def test_a_node_may_lack_classes_and_has_the_jobs_numbers_for_the_others(tmp_path: Path) -> None:
    for number, name in enumerate(("bone", "lung", "skin")):
        save_image(tmp_path / "job" / name / "a.png", 10 * number)
    for number in range(4):
        save_image(tmp_path / "own" / "skin" / f"smith-{number}.png", 200 + number)
    workload = build(find("imagefolder-resnet18"), {"classes": 3, "image_size": 16})
    held_out = held_out_dataset(workload, str(tmp_path / "job"))
    assert held_out.class_names == ("bone", "lung", "skin")
    assert (len(held_out.train.labels), held_out.test.labels.tolist()) == (0, [0, 1, 2])
    own = training_samples(workload, str(tmp_path / "job"), str(tmp_path / "own"))
    assert own.labels.tolist() == [2, 2, 2, 2]
    assert own.batch(np.array([3]))[0].max() == 203
    save_image(tmp_path / "own" / "smith" / "x.png", 0)
    with pytest.raises(NodeDataError) as failure:
        training_samples(workload, str(tmp_path / "job"), str(tmp_path / "own"))
    message = (
        "1 sub-folder is none of the job's classes, which are bone, lung, skin. Fix: rename or"
    )
    assert str(failure.value).startswith(message)


def test_all_text_of_a_node_is_trained_on_and_all_of_the_jobs_is_held_out(tmp_path: Path) -> None:
    workload = build(find("text-gpt"), {"block_length": 8, "width": 8, "layers": 1, "heads": 1})
    (tmp_path / "job").mkdir()
    (tmp_path / "own").mkdir()
    (tmp_path / "job" / "a.txt").write_text("held out " * 5)
    (tmp_path / "own" / "b.txt").write_text("0123456789" * 4)
    own = training_samples(workload, str(tmp_path / "job"), str(tmp_path / "own"))
    assert len(own.labels) == 4
    assert own.batch(np.array([1]))[0].tobytes() == b"89012345"
    assert len(held_out_dataset(workload, str(tmp_path / "job")).test.labels) == 5
    (tmp_path / "own" / "b.txt").write_text("short")
    with pytest.raises(NodeDataError, match="there is not one sample"):
        training_samples(workload, str(tmp_path / "job"), str(tmp_path / "own"))


def test_rows_of_a_node_are_trained_on_with_the_jobs_base(tmp_path: Path) -> None:
    save_base(tmp_path / "job")
    write_chats(tmp_path / "job")
    (tmp_path / "own").mkdir()
    rows = [json.dumps({"text": f"number {n} counts"}) for n in range(20)]
    (tmp_path / "own" / "rows.jsonl").write_text("\n".join(rows))
    options = {"sequence_length": 64, "packing": False}
    workload = build_for_job(find("hf-causal-lm"), options, str(tmp_path / "job"))
    own = training_samples(workload, str(tmp_path / "job"), str(tmp_path / "own"))
    held_out = held_out_dataset(workload, str(tmp_path / "job"))
    usual = workload.load(str(tmp_path / "job"))
    assert len(own.labels) == 20
    assert len(held_out.test.labels) == len(usual.train.labels) + len(usual.test.labels)


def test_a_workload_that_knows_nothing_of_it_says_so() -> None:
    with pytest.raises(NodeDataError, match="as installed cannot train on data that stay on nodes"):
        training_samples(build(find("digits-mlp"), {"width": 8}), "", "/srv")


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job whose training samples stay on nodes."""
    folder = tmp_path_factory.mktemp("program")
    torch.manual_seed(0)
    spec = JobSpec("program", training=TrainingSettings(batch_size=4))
    write_job(folder, nn.Linear(2, 2), loss, JobSamples(None, {"x": X, "y": Y}), spec)
    return folder


def own_samples(program: Path, folder: Path, **arrays: np.ndarray[Any, Any]) -> Any:
    write_archive(folder / "smith.npz", arrays)
    workload = build_for_job(find("program"), {}, str(program))
    return training_samples(workload, str(program), str(folder))


def test_a_program_reads_its_fields_from_every_file_of_a_node(
    program: Path, tmp_path: Path
) -> None:
    write_archive(tmp_path / "jones.npz", {"y": Y[:3], "x": X[:3]})
    own = own_samples(program, tmp_path, x=X.astype(np.float64), y=Y, name=np.array(["a"] * 12))
    assert len(own.labels) == 15
    x, y = own.batch(np.array([2, 3]))
    assert (x.dtype, x.tolist(), y.tolist()) == (np.float32, [X[2].tolist(), X[0].tolist()], [0, 0])
    workload = build_for_job(find("program"), {}, str(program))
    assert len(held_out_dataset(workload, str(program)).test.labels) == 12
    with pytest.raises(DatasetError, match="no training samples: these stay on nodes"):
        workload.load(str(program))


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": X}, "field y is missing. Fix: add it to every file"),
        ({"smith": X}, "field x is missing"),
        (
            {"x": X[:, :1], "y": Y},
            "field x is float32[1], the program takes float32[2]. Fix: conve",
        ),
        ({"x": X, "y": Y.astype(np.int32)}, "field y is int32[], the program takes int64[]"),
    ],
)
def test_fields_that_are_not_the_programs_are_named(
    program: Path, tmp_path: Path, arrays: dict[str, np.ndarray[Any, Any]], said: str
) -> None:
    with pytest.raises(NodeDataError) as failure:
        own_samples(program, tmp_path, **arrays)
    assert str(failure.value).startswith(said)


def answer(
    program: Path, own: Path, *, data_name: str = "wards", workload: str = "program"
) -> tuple[str, str]:
    """A worker's reason for not training on a node's own folder, and what it logs."""
    task = Task(
        workload=workload,
        workload_version=find(workload).version,
        inner_steps=1,
        batch_size=4,
        learning_rate=0.1,
        codec="fp32",
        seed=1,
        ranges=(SampleRange(0, Samples(4)),),
        model=BlobRef(Digest("00"), Bytes(0)),
        layout=Digest("00"),
        data_name=data_name,
    )
    request = protocol.TrainShard(
        assignment=Assignment(lease=Lease(JobId("job-1"), 0, 1), slot=Slot(0), task=task),
        start=TrainingStart(),
        model_path=str(own / "none"),
        data_dir=str(program),
        node_dir=str(own) if data_name else "",
        state_dir=str(own),
        update_path=str(own / "update"),
    )
    log = io.BytesIO()
    with ExitStack() as stack:
        ends = [*os.pipe(), *os.pipe()]
        files = [os.fdopen(end, mode) for end, mode in zip(ends, ("rb", "wb") * 2, strict=True)]
        requests, ask_end, replies, answer_end = map(
            stack.enter_context, cast(list[BinaryIO], files)
        )
        loop = WorkerLoop(requests, answer_end, log)
        worker = threading.Thread(target=loop.run, args=[Trainers("torch", protocol.Limits(1, 0))])
        worker.start()
        ask_end.write(frame(protocol.encode(request)))
        ask_end.flush()
        read_frame(replies)
        reply = protocol.decode_reply(read_frame(replies) or b"")
        ask_end.close()
        worker.join()
    assert isinstance(reply, protocol.ShardFailed)
    is_of_the_owner = reply.reason.startswith("OWNER_DATA")
    assert reply.cause is (FailureCause.OWNER if is_of_the_owner else FailureCause.OTHER)
    return reply.reason, log.getvalue().decode()


def test_errors_of_a_nodes_own_data_leave_it_without_their_names(
    program: Path, tmp_path: Path
) -> None:
    (tmp_path / "smith.npz").write_bytes(b"no archive")
    reason, log = answer(program, tmp_path)
    assert reason.startswith(
        "OWNER_DATA (7108): data set wards: it cannot be used, and only the node's log says why"
    )
    assert "smith.npz cannot be read" in log
    write_archive(tmp_path / "smith.npz", {"x": X})
    reason, _ = answer(program, tmp_path)
    assert reason.startswith("OWNER_DATA (7108): data set wards: field y is missing")


def test_errors_of_a_jobs_data_leave_a_node_without_its_folders(tmp_path: Path) -> None:
    home = tmp_path / "home"
    inputs = home / "inputs" / "spoilt"
    inputs.mkdir(parents=True)
    (inputs / "train-images-idx3-ubyte").write_bytes(b"no images")
    reason, _ = answer(inputs, home, data_name="", workload="mnist-cnn")
    assert reason.startswith("train-images-idx3-ubyte is no IDX file of bytes")
    assert str(tmp_path) not in reason


def test_there_are_held_out_samples_or_none_to_write(tmp_path: Path) -> None:
    with pytest.raises(SamplesError, match="held_out: there are no samples"):
        JobSamples(None, None).write(tmp_path)
