"""The example of docs/workloads.md, installed as another package and trained by real processes."""

import os
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from coordinator.shell.evaluator.process import Evaluate, Evaluated, EvaluatorProcess, Initialise
from gpu_node.core.memory import TrainingStart
from gpu_node.shell.worker.protocol import TrainShard
from hypergpu.assignment import Assignment, Lease, SampleRange, Task
from hypergpu.blobs import BlobRef
from hypergpu.ids import JobId, Slot
from hypergpu.tensors.codec import decode_parameters
from hypergpu.tensors.layout import Float32s, layout_from_json
from hypergpu.units import Bytes, Samples
from tests.conformance.worker_process import spawn_worker

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"`([\w./]+)`[^\n`]*:\n\n```\w+\n(.*?)```", re.DOTALL)


@pytest.fixture
def package_environment(tmp_path: Path) -> dict[str, str]:
    """An environment where the documented package is on the path with its metadata."""
    text = (ROOT / "docs" / "workloads.md").read_text("utf-8")
    files = dict(FENCE.findall(text))
    project = tomllib.loads(files.pop("pyproject.toml"))["project"]
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    folder = tmp_path / f"{project['name']}-{project['version']}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    ((group, points),) = project["entry-points"].items()
    lines = [f"{name} = {target}" for name, target in points.items()]
    (folder / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    return {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}


async def test_the_documented_workload_learns(
    package_environment: dict[str, str], tmp_path: Path
) -> None:
    evaluator = EvaluatorProcess(environment=package_environment)
    model_path, layout_path = str(tmp_path / "model"), str(tmp_path / "layout")
    initial_model = await evaluator.initialise(
        Initialise(workload="spirals", model_path=model_path, layout_path=layout_path)
    )
    layout = layout_from_json(initial_model.layout_json)
    task = Task(
        workload="spirals",
        workload_version=initial_model.workload_version,
        inner_steps=400,
        batch_size=64,
        learning_rate=3e-3,
        codec="fp32",
        seed=0,
        ranges=(SampleRange(0, Samples(400 * 64)),),
        model=BlobRef(layout.digest, Bytes(0)),
        layout=layout.digest,
    )
    lease = Lease(JobId("job-000000000001"), 0, 1)
    request = TrainShard(
        assignment=Assignment(lease=lease, slot=Slot(0), task=task),
        start=TrainingStart(),
        model_path=model_path,
        state_dir=str(tmp_path / "state"),
        update_path=str(tmp_path / "update"),
    )
    with spawn_worker("torch", package_environment) as worker:
        assert worker.capabilities.workloads["spirals"] == 1
        worker.train(request)
    before = await accuracy(evaluator, request)
    apply(request, decode_parameters(layout, "fp32", (tmp_path / "update").read_bytes()))
    after = await accuracy(evaluator, request)
    await evaluator.stop()
    assert before.metric < 0.7
    assert after.metric > 0.95


async def accuracy(evaluator: EvaluatorProcess, request: TrainShard) -> Evaluated:
    return await evaluator.evaluate(
        Evaluate(
            workload=request.task.workload,
            model_path=request.model_path,
            layout_digest=request.task.layout,
        )
    )


def apply(request: TrainShard, pseudo_gradient: Float32s) -> None:
    path = Path(request.model_path)
    (np.fromfile(path, np.float32) - pseudo_gradient).tofile(path)
