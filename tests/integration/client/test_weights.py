"""Jobs that begin with the weights of a file or of another job, against a real coordinator."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from hypergpu.jobfile.spec import (
    CodecChoice,
    Evaluation,
    Inner,
    JobSpec,
    ModelSettings,
    TrainingSettings,
    Trust,
)
from hypergpu.user.client import Coordinator, HyperGPUError
from hypergpu.user.client.values import JobEvent
from tests.processes import Cluster

SPEC = JobSpec(
    "digits-softmax",
    training=TrainingSettings(rounds=4, inner_steps=20, nodes=1),
    inner=Inner(learning_rate=0.1, optimizer="sgd", momentum=0.5, clip_norm=5.0, micro_batch=20),
    codec=CodecChoice("fp32", "fp32"),
    evaluation=Evaluation(every=1),
    trust=Trust(duplicates="none"),
)


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    with Cluster(tmp_path_factory.mktemp("weights"), is_plaintext=False) as cluster:
        cluster.add_nodes(1)
        with cluster.coordinator.client() as client:
            yield client


def losses_of(coordinator: Coordinator, job: str) -> dict[int, float]:
    """Waits for the job's end; the held-out loss of each evaluated round."""
    events = [each for each in coordinator.watch(job) if isinstance(each, JobEvent)]
    assert events[-1].kind != "PreparationFailed", events[-1].body
    bodies: list[Any] = [each.body for each in events if each.kind == "EvaluationReady"]
    return {int(body["round"]): float(body["loss"]) for body in bodies}


@pytest.fixture(scope="module")
def first(coordinator: Coordinator) -> tuple[str, dict[int, float]]:
    """A finished job with its losses."""
    job = coordinator.submit(SPEC)
    return job, losses_of(coordinator, job)


def test_a_job_with_sgd_learns(first: tuple[str, dict[int, float]]) -> None:
    losses = first[1]
    assert losses[4] < 0.6 * losses[1] < 0.6 * np.log(10)


def test_a_continued_job_goes_on_from_the_model_it_found(
    coordinator: Coordinator, first: tuple[str, dict[int, float]]
) -> None:
    old, losses = first
    new = coordinator.continue_job(old, 2, name="longer")
    later = losses_of(coordinator, new)
    assert max(later) == 2
    assert later.pop(0) == losses[4]
    assert max(later.values()) < losses[4]
    spec = coordinator.spec(new)
    assert (spec.model.init, spec.name, spec.training.rounds) == (old, "longer", 2)
    assert spec.inner == replace(SPEC.inner, warmup_steps=0)


def test_an_exported_file_begins_a_job_where_its_model_was(
    coordinator: Coordinator, first: tuple[str, dict[int, float]], tmp_path: Path
) -> None:
    model = coordinator.export(first[0], tmp_path / "first").model
    still = replace(
        SPEC,
        model=ModelSettings(init=str(model)),
        training=replace(SPEC.training, rounds=1, inner_steps=1),
        inner=Inner(learning_rate=1e-12, weight_decay=0.0),
    )
    job = coordinator.submit(still)
    assert losses_of(coordinator, job)[1] == pytest.approx(first[1][4], rel=1e-6)
    after = load_file(coordinator.export(job, tmp_path / "after").model)
    for name, tensor in load_file(model).items():
        np.testing.assert_allclose(after[name], tensor, atol=1e-6)


def failure_of(coordinator: Coordinator, init: Path) -> str:
    job = coordinator.submit(replace(SPEC, model=ModelSettings(init=str(init))))
    list(coordinator.watch(job))
    return coordinator.job(job).job.reason


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"weight": np.zeros((64, 10), np.float32)}, "the file lacks bias of the job's model"),
        (
            {
                "bias": np.zeros(10, np.float32),
                "extra": np.zeros(1, np.float32),
                "weight": np.zeros((64, 10), np.float32),
            },
            "the file has extra, which the job's model has not",
        ),
        (
            {"bias": np.zeros(10, np.float32), "weight": np.zeros((10, 64), np.float32)},
            "weight is [10, 64] in the file and [64, 10] in the job",
        ),
        (
            {"bias": np.full(10, np.nan, np.float32), "weight": np.zeros((64, 10), np.float32)},
            "the weights hold values that are not finite numbers",
        ),
        (
            {"bias": np.zeros(10, np.int8), "weight": np.zeros((64, 10), np.float32)},
            "bias is I8, and the job's is float32. Fix: save the file with tensor.float()",
        ),
        ({}, "the file is no safetensors file"),
    ],
)
def test_weights_that_do_not_fit_end_the_job_with_the_reason(
    coordinator: Coordinator, tmp_path: Path, tensors: dict[str, np.ndarray], reason: str
) -> None:
    file = tmp_path / "weights.safetensors"
    if tensors:
        save_file(tensors, file)
    else:
        file.write_bytes(b"weights")
    assert reason in failure_of(coordinator, file)


def test_weights_that_are_not_there_are_said_before_anything_is_sent(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    missing_weights = replace(SPEC, model=ModelSettings(init=str(tmp_path / "none")))
    with pytest.raises(HyperGPUError, match="there is no file"):
        coordinator.submit(missing_weights)
    unknown_weights = replace(SPEC, model=ModelSettings(init="job-000000000000"))
    with pytest.raises(HyperGPUError, match="job-000000000000"):
        coordinator.submit(unknown_weights)
    waiting_job = coordinator.submit(replace(SPEC, training=replace(SPEC.training, nodes=9)))
    coordinator.stop(waiting_job)
