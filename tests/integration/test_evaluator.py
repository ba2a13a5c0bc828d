"""A real evaluator process: models measured on held-out data, and the gradients of their loss."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from coordinator.shell.aggregation.layer_groups import layer_groups
from coordinator.shell.aggregation.sketch import SketchKey, sketch_layers, sketch_vector
from coordinator.shell.evaluator.model_evaluator import ModelEvaluator, NumpyEvaluator
from coordinator.shell.evaluator.process import (
    Evaluate,
    Evaluated,
    EvaluatorProcess,
    GradientMeasured,
    Initialise,
    Initialised,
    MeasureGradient,
    MeasureShards,
    ShardSamples,
)
from coordinator.shell.evaluator.torch_evaluator import TorchEvaluator
from hypergpu.assignment import SampleRange
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest
from hypergpu.partitions import Sharding, partition_indices, stream_indices
from hypergpu.tensors.layout import Flat, layout_from_json
from hypergpu.units import Samples
from hypergpu.workloads.registry import build, find

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def evaluator() -> AsyncIterator[EvaluatorProcess]:
    """One process for the whole suite: a request must not depend on those before it."""
    process = EvaluatorProcess()
    yield process
    await process.stop()


def initialise(folder: Path, workload: str = "digits-softmax", **fields: object) -> Initialise:
    paths = {"model_path": str(folder / "model"), "layout_path": str(folder / "layout")}
    return Initialise(workload=workload, **paths, **fields)  # type: ignore[arg-type]


async def evaluate(
    evaluator: EvaluatorProcess, folder: Path, request: Initialise, made: Initialised
) -> Evaluated:
    layout = layout_from_json(made.layout_json)
    return await evaluator.evaluate(
        Evaluate(
            workload=request.workload,
            options=request.options,
            model_path=str(folder / "model"),
            layout_digest=layout.digest,
        )
    )


def peak_rss_bytes(process: EvaluatorProcess) -> int:
    lines = Path(f"/proc/{process.process_id}/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


async def test_a_model_and_its_layout_are_what_the_reply_says(
    evaluator: EvaluatorProcess, tmp_path: Path
) -> None:
    initial_model = await evaluator.initialise(initialise(tmp_path))
    content = (tmp_path / "model").read_bytes()
    assert initial_model.digest == digest_of(content)
    assert initial_model.size_bytes == len(content)
    assert (tmp_path / "layout").read_text() == initial_model.layout_json
    assert layout_from_json(initial_model.layout_json).model_bytes == len(content)
    assert initial_model.partition_sizes == (1442,)


async def test_a_seed_names_a_model_and_a_process_does_not(
    evaluator: EvaluatorProcess, tmp_path: Path
) -> None:
    other = EvaluatorProcess()
    softmax, network = (
        initialise(tmp_path, f"digits-{name}", seed=1) for name in ("softmax", "mlp")
    )
    for request in (softmax, network):
        initial_model = await evaluator.initialise(request)
        assert (await other.initialise(request)).digest == initial_model.digest
    await other.stop()
    first = await evaluator.initialise(network)
    second = await evaluator.initialise(initialise(tmp_path, "digits-mlp", seed=2))
    assert first.digest != second.digest


@pytest.mark.parametrize("workload", ["digits-softmax", "digits-mlp", "null"])
async def test_an_untrained_model_knows_nothing(
    evaluator: EvaluatorProcess, tmp_path: Path, workload: str
) -> None:
    request = initialise(tmp_path, workload)
    initial_model = await evaluator.initialise(request)
    reply = await evaluate(evaluator, tmp_path, request, initial_model)
    assert reply.metric < 0.3
    assert reply.metric_name == ("score" if workload == "null" else "accuracy")


async def test_a_model_that_nothing_reads_takes_no_memory(tmp_path: Path) -> None:
    process = EvaluatorProcess()
    request = initialise(tmp_path, "null", options={"parameters": 50_000_000})
    initial_model = await process.initialise(request)
    await evaluate(process, tmp_path, request, initial_model)
    peak_bytes = peak_rss_bytes(process)
    await process.stop()
    assert peak_bytes < initial_model.size_bytes / 2


async def test_perplexity_of_an_untrained_network_is_about_the_number_of_bytes(
    evaluator: EvaluatorProcess, tmp_path: Path
) -> None:
    options = {"width": 16, "layers": 1, "heads": 2, "block_length": 32, "corpus_bytes": 400_000}
    request = initialise(tmp_path, "text-gpt", options=options)
    initial_model = await evaluator.initialise(request)
    reply = await evaluate(evaluator, tmp_path, request, initial_model)
    assert 200 < reply.metric < 300
    assert reply.metric_name == "perplexity"


async def test_a_skewed_split_has_as_many_partitions_as_asked(
    evaluator: EvaluatorProcess, tmp_path: Path
) -> None:
    request = initialise(tmp_path, sharding="dirichlet", alpha=0.3, partitions=5)
    initial_model = await evaluator.initialise(request)
    assert len(initial_model.partition_sizes) == 5
    assert sum(initial_model.partition_sizes) == 1442


@pytest.mark.parametrize(
    ("fields", "reason", "detail"),
    [
        ({"workload": "sorcery"}, Reason.WORKLOAD_UNKNOWN, "no workload 'sorcery'"),
        ({"options": {"sorcery": 1}}, Reason.SPEC_INVALID, "has no such option"),
        (
            {"sharding": "dirichlet", "alpha": 0.3, "partitions": 10**6},
            Reason.SPEC_INVALID,
            "1442 samples cannot make 1000000 partitions",
        ),
        ({"workload": "imagefolder-resnet18"}, Reason.SPEC_INVALID, "set data.path"),
        ({"model_path": "/proc/nowhere/model"}, Reason.NOT_READY, "/proc/nowhere"),
    ],
    ids=["workload", "option", "partitions", "data", "path"],
)
async def test_what_cannot_be_made_is_refused_with_its_reason(
    evaluator: EvaluatorProcess,
    tmp_path: Path,
    fields: dict[str, object],
    reason: Reason,
    detail: str,
) -> None:
    request_fields = {
        "workload": "digits-softmax",
        "model_path": str(tmp_path / "model"),
        "layout_path": str(tmp_path / "layout"),
        **fields,
    }
    with pytest.raises(HyperGPUError, match=detail) as failure:
        await evaluator.initialise(Initialise(**request_fields))  # type: ignore[arg-type]
    assert failure.value.reason is reason


async def test_a_model_of_another_layout_is_not_measured(
    evaluator: EvaluatorProcess, tmp_path: Path
) -> None:
    await evaluator.initialise(initialise(tmp_path))
    request = Evaluate(
        workload="digits-softmax",
        model_path=str(tmp_path / "model"),
        layout_digest=Digest("0" * 64),
    )
    with pytest.raises(HyperGPUError, match="makes another model"):
        await evaluator.evaluate(request)


async def test_a_model_is_not_judged_by_another_version_than_it_is_trained_by(
    evaluator: EvaluatorProcess, tmp_path: Path
) -> None:
    initial_model = await evaluator.initialise(initialise(tmp_path))
    request = Evaluate(
        workload="digits-softmax",
        workload_version=initial_model.workload_version,
        model_path=str(tmp_path / "model"),
        layout_digest=layout_from_json(initial_model.layout_json).digest,
    )
    assert (await evaluator.evaluate(request)).metric_name == "accuracy"
    newer = msgspec.structs.replace(request, workload_version=initial_model.workload_version + 1)
    with pytest.raises(HyperGPUError, match=r"version 1 where .* and 2 in the job"):
        await evaluator.evaluate(newer)


async def test_a_model_that_is_not_finite_has_no_score(
    evaluator: EvaluatorProcess, tmp_path: Path
) -> None:
    request = initialise(tmp_path)
    initial_model = await evaluator.initialise(request)
    np.full(650, np.nan, np.float32).tofile(tmp_path / "model")
    with pytest.raises(HyperGPUError) as failure:
        await evaluate(evaluator, tmp_path, request, initial_model)
    assert failure.value.reason is Reason.UPDATE_NOT_FINITE


async def test_without_torch_a_torch_workload_is_refused_and_a_numpy_one_is_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "torch.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    evaluator = EvaluatorProcess(environment=environment)
    with pytest.raises(HyperGPUError) as failure:
        await evaluator.initialise(initialise(tmp_path, "digits-cnn"))
    assert failure.value.reason is Reason.TORCH_MISSING
    await evaluator.initialise(initialise(tmp_path, "digits-softmax"))
    await evaluator.stop()


async def test_a_killed_evaluator_is_started_again(
    evaluator: EvaluatorProcess, tmp_path: Path
) -> None:
    first = await evaluator.initialise(initialise(tmp_path))
    killed_id = evaluator.process_id
    assert killed_id is not None
    os.kill(killed_id, signal.SIGKILL)
    again = await evaluator.initialise(initialise(tmp_path))
    assert again.digest == first.digest
    assert evaluator.process_id != killed_id


async def test_an_evaluator_that_cannot_start_is_refused_and_not_tried_for_ever(
    tmp_path: Path,
) -> None:
    evaluator = EvaluatorProcess((sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(HyperGPUError, match="died twice"):
        await evaluator.initialise(initialise(tmp_path))


async def test_an_evaluator_that_hangs_is_ended_and_the_next_request_gets_its_turn(
    tmp_path: Path,
) -> None:
    command = (sys.executable, "-c", "import threading; threading.Event().wait()")
    evaluator = EvaluatorProcess(command, answer_timeout_s=0.3)
    initialisations = [evaluator.initialise(initialise(tmp_path)) for _ in range(2)]
    refusals = await asyncio.gather(*initialisations, return_exceptions=True)

    why = "its first model took more than 0.3 s, the most that an evaluator may take"
    assert [why in str(each) for each in refusals] == [True, True]
    assert evaluator.process_id is None


async def test_an_evaluator_that_floods_its_pipe_is_ended(tmp_path: Path) -> None:
    flood = "import sys; sys.stdout.write('x' * 2_000_000); input()"
    evaluator = EvaluatorProcess((sys.executable, "-c", flood))
    async with asyncio.timeout(240):
        with pytest.raises(HyperGPUError, match="died twice"):
            await evaluator.initialise(initialise(tmp_path))
    assert evaluator.process_id is None


async def test_requests_made_at_once_get_their_own_answers(
    evaluator: EvaluatorProcess, tmp_path: Path
) -> None:
    requests = []
    for number in range(1, 6):
        (tmp_path / str(number)).mkdir()
        request = initialise(tmp_path / str(number), "null", options={"parameters": number})
        requests.append(evaluator.initialise(request))
    replies = await asyncio.gather(*requests)
    assert [reply.size_bytes for reply in replies] == [4, 8, 12, 16, 20]


async def test_a_cancelled_request_does_not_answer_the_next_one(
    evaluator: EvaluatorProcess, tmp_path: Path
) -> None:
    await evaluator.initialise(initialise(tmp_path))
    large = initialise(tmp_path, "null", options={"parameters": 7_000_000})
    assert evaluator.process_id is not None
    # It cannot have answered by then.
    os.kill(evaluator.process_id, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await evaluator.initialise(large)
    reply = await evaluator.initialise(initialise(tmp_path))
    assert reply.size_bytes == 2600


EPSILON = 2e-3
SECRET = bytes(range(32))
EVERY = 10**9
WORKLOADS = ["digits-softmax", "digits-cnn"]
"""One in numpy, one in torch."""


def gradient_request(
    folder: Path, workload: str, made: Initialised, *, samples_most: int = EVERY
) -> MeasureGradient:
    return MeasureGradient(
        workload=workload,
        model_path=str(folder / "model"),
        layout_digest=layout_from_json(made.layout_json).digest,
        samples_most=samples_most,
        sketch_secret=SECRET,
    )


def opened_evaluator(workload: str) -> ModelEvaluator:
    """The evaluator of a workload in this process."""
    entry = find(workload)
    if entry.kind == "numpy":
        return NumpyEvaluator(build(entry, {}), "")
    return TorchEvaluator(build(entry, {}), "")


@pytest.mark.parametrize("workload", WORKLOADS)
async def test_a_gradient_agrees_with_finite_differences_of_the_loss(workload: str) -> None:
    model = opened_evaluator(workload)
    start = model.initial(7)
    loss_gradient = model.gradient(start, EVERY)
    direction = np.random.default_rng(1).standard_normal(loss_gradient.parameters.size)
    # Half along the gradient: at random alone, rounding of the loss would be most of it.
    direction /= np.linalg.norm(direction)
    direction += loss_gradient.parameters / np.linalg.norm(loss_gradient.parameters)
    losses = []
    for sign in (1, -1):
        moved_parameters = start.parameters + (sign * EPSILON * direction).astype(np.float32)
        sums = model.evaluate(start._replace(parameters=moved_parameters))
        losses.append(sums.loss / sums.samples)
    slope = (losses[0] - losses[1]) / (2 * EPSILON)
    assert slope == pytest.approx(float(loss_gradient.parameters @ direction), rel=0.02)


@pytest.mark.parametrize("workload", WORKLOADS)
async def test_the_loss_and_sketch_of_a_gradient_are_those_of_the_whole_set(
    evaluator: EvaluatorProcess, tmp_path: Path, workload: str
) -> None:
    initial_model = await evaluator.initialise(initialise(tmp_path, workload))
    measurement = await evaluator.measure_gradient(
        gradient_request(tmp_path, workload, initial_model)
    )
    layout = layout_from_json(initial_model.layout_json)
    whole = await evaluate(evaluator, tmp_path, initialise(tmp_path, workload), initial_model)
    assert measurement.loss == pytest.approx(whole.loss, rel=1e-5)

    flat = Flat.view(layout, np.fromfile(tmp_path / "model", np.uint8))
    gradient = opened_evaluator(workload).gradient(flat, EVERY).parameters
    expected_sketch = sketch_vector(SketchKey(SECRET), layout, gradient)
    assert np.allclose(np.frombuffer(measurement.sketch), expected_sketch, rtol=1e-3, atol=1e-5)


async def test_a_gradient_is_measured_alike_before_and_after_other_requests(
    evaluator: EvaluatorProcess, tmp_path: Path
) -> None:
    initial_model = await evaluator.initialise(initialise(tmp_path, "digits-cnn"))
    request = gradient_request(tmp_path, "digits-cnn", initial_model)
    first = await evaluator.measure_gradient(request)
    await evaluate(evaluator, tmp_path, initialise(tmp_path, "digits-cnn"), initial_model)
    assert await evaluator.measure_gradient(request) == first


async def test_a_part_of_the_samples_is_spread_over_all(
    evaluator: EvaluatorProcess, tmp_path: Path
) -> None:
    initial_model = await evaluator.initialise(initialise(tmp_path))
    every = await evaluator.measure_gradient(
        gradient_request(tmp_path, "digits-softmax", initial_model)
    )
    some = await evaluator.measure_gradient(
        gradient_request(tmp_path, "digits-softmax", initial_model, samples_most=100)
    )
    one, other = (np.frombuffer(each.sketch) for each in (every, some))
    assert not np.array_equal(one, other)
    cosine = (one * other).sum() / np.sqrt(np.square(one).sum() * np.square(other).sum())
    assert cosine > 0.6
    assert some.loss == pytest.approx(every.loss, rel=0.2)


async def test_a_model_that_is_not_finite_has_neither_a_loss_nor_a_finite_sketch(
    evaluator: EvaluatorProcess, tmp_path: Path
) -> None:
    initial_model = await evaluator.initialise(initialise(tmp_path))
    np.full(650, np.nan, np.float32).tofile(tmp_path / "model")
    measurement = await evaluator.measure_gradient(
        gradient_request(tmp_path, "digits-softmax", initial_model)
    )
    assert isinstance(measurement, GradientMeasured)
    assert measurement.loss is None
    assert not np.isfinite(np.frombuffer(measurement.sketch)).all()


async def test_a_gradient_of_another_layout_is_not_measured(
    evaluator: EvaluatorProcess, tmp_path: Path
) -> None:
    initial_model = await evaluator.initialise(initialise(tmp_path))
    request = gradient_request(tmp_path, "digits-mlp", initial_model)
    with pytest.raises(HyperGPUError, match="makes another model"):
        await evaluator.measure_gradient(request)


async def test_a_model_that_is_not_finite_is_said_to_be_the_source_of_its_loss(
    evaluator: EvaluatorProcess, tmp_path: Path
) -> None:
    request = initialise(tmp_path)
    initial_model = await evaluator.initialise(request)
    model = np.fromfile(tmp_path / "model", np.float32)
    np.full_like(model, np.nan).tofile(tmp_path / "model")
    with pytest.raises(HyperGPUError, match="the model itself holds values that are not finite"):
        await evaluate(evaluator, tmp_path, request, initial_model)


def shards_request(
    folder: Path, made: Initialised, workload: str, *shards: ShardSamples
) -> MeasureShards:
    return MeasureShards(
        workload=workload,
        model_path=str(folder / "model"),
        layout_digest=layout_from_json(made.layout_json).digest,
        seed=7,
        sharding="dirichlet",
        alpha=0.5,
        partitions=4,
        shards=shards,
        sketch_secret=SECRET,
    )


@pytest.mark.parametrize("workload", WORKLOADS)
async def test_the_gradients_of_shards_are_those_of_the_samples_that_nodes_train_on(
    evaluator: EvaluatorProcess, tmp_path: Path, workload: str
) -> None:
    initial_model = await evaluator.initialise(initialise(tmp_path, workload))
    shards = (ShardSamples(1, (0, 5, 9)), ShardSamples(3, (2_000, 2_001)))
    measurement = await evaluator.measure_shards(
        shards_request(tmp_path, initial_model, workload, *shards)
    )
    layout = layout_from_json(initial_model.layout_json)
    flat = Flat.view(layout, np.fromfile(tmp_path / "model", np.uint8))
    model = opened_evaluator(workload)
    partitions = partition_indices(model.dataset.train.labels, Sharding(4, 0.5, 7))
    for shard, sketch in zip(shards, measurement.sketches, strict=True):
        runs = [SampleRange(position, Samples(1)) for position in shard.positions]
        indices = stream_indices(partitions[shard.partition], shard.partition, 7, runs)
        ((_, gradient),) = model.train_gradients(flat, [indices])
        expected_layers = sketch_layers(SketchKey(SECRET), layout, gradient, layer_groups(layout))
        assert np.allclose(
            np.frombuffer(sketch).reshape(expected_layers.shape),
            expected_layers,
            rtol=1e-3,
            atol=1e-5,
        )


async def test_a_partition_that_does_not_exist_is_refused_with_its_number(
    evaluator: EvaluatorProcess, tmp_path: Path
) -> None:
    initial_model = await evaluator.initialise(initialise(tmp_path))
    request = shards_request(tmp_path, initial_model, "digits-softmax", ShardSamples(4, (0,)))
    with pytest.raises(HyperGPUError, match="partition 4 of 4 does not exist"):
        await evaluator.measure_shards(request)
