"""A real evaluator in its sandbox that tries updates on samples of their own shards."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from coordinator.core.hub.evaluator_turns import EvaluatorJob
from coordinator.shell.aggregation.layer_groups import layer_groups
from coordinator.shell.aggregation.sketch import SketchKey, sketch_vector
from coordinator.shell.evaluator.model_evaluator import ModelEvaluator, NumpyEvaluator
from coordinator.shell.evaluator.pool import EvaluatorPool
from coordinator.shell.evaluator.process import (
    Initialise,
    Initialised,
    MeasureGradient,
    MeasureShards,
    ShardSamples,
    TryUpdate,
)
from coordinator.shell.evaluator.seat import EvaluatorLimits, SeatMaker, machine_limits
from coordinator.shell.evaluator.torch_evaluator import TorchEvaluator
from hypergpu.assignment import SampleRange
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId, TokenId
from hypergpu.partitions import Indices, Sharding, partition_indices, stream_indices
from hypergpu.tensors.codec import encode_update
from hypergpu.tensors.layout import Flat, Float32s, layout_from_json
from hypergpu.units import Samples
from hypergpu.workloads.registry import build, find

pytestmark = pytest.mark.asyncio(loop_scope="module")


JOB = EvaluatorJob(JobId("job-00000000000a"), TokenId("ada"))
WORKLOADS = ["digits-softmax", "digits-mlp"]
"""One in numpy, one in torch."""
SECRET = bytes(range(32))
SHARD = ShardSamples(1, (0, 5, 9, 40))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EvaluatorPool]:
    """One pool for all: a request must not depend on those before it."""
    folder = tmp_path_factory.mktemp("coordinator")
    pool = EvaluatorPool(SeatMaker(folder, machine_limits(EvaluatorLimits(spares=0))))
    yield pool
    await pool.stop()


class OpenedJob:
    """A job whose first model lies in a folder."""

    def __init__(self, pool: EvaluatorPool, folder: Path, workload: str) -> None:
        self.pool, self.folder, self.workload = pool, folder, workload

    async def open(self) -> None:
        initial_model: Initialised = await self.pool.initialise(
            JOB,
            Initialise(
                workload=self.workload,
                model_path=str(self.folder / "model"),
                layout_path=str(self.folder / "layout"),
            ),
        )
        self.layout = layout_from_json(initial_model.layout_json)
        self.base = Flat.view(self.layout, np.fromfile(self.folder / "model", np.uint8))
        entry = find(self.workload)
        self.model: ModelEvaluator = (
            NumpyEvaluator(build(entry, {}), "")
            if entry.kind == "numpy"
            else TorchEvaluator(build(entry, {}), "")
        )

    @property
    def indices(self) -> Indices:
        """Dataset indices of the samples."""
        labels = self.model.dataset.train.labels
        partition = partition_indices(labels, Sharding(4, 0.5, 7))[SHARD.partition]
        runs = [SampleRange(position, Samples(1)) for position in SHARD.positions]
        return stream_indices(partition, SHARD.partition, 7, runs)

    async def loss_after(self, update: Float32s, codec: str = "fp32") -> float | None:
        """The loss that the evaluator finds after an update."""
        flat = Flat(update, self.base.statistics, self.base.integers)
        payload = encode_update(self.layout, codec, flat).payload
        (self.folder / "update").write_bytes(payload.tobytes())
        return await self.tried_loss(codec)

    async def tried_loss(self, codec: str) -> float | None:
        """The loss after the update that lies in the folder."""
        answer = await self.pool.try_update(
            JOB,
            TryUpdate(
                workload=self.workload,
                model_path=str(self.folder / "model"),
                layout_digest=self.layout.digest,
                seed=7,
                sharding="dirichlet",
                alpha=0.5,
                partitions=4,
                shard=SHARD,
                update_path=str(self.folder / "update"),
                codec=codec,
            ),
        )
        return answer.loss

    async def measured_loss(self) -> float | None:
        """The loss at the base, as the gradients of the shards tell it."""
        answer = await self.pool.measure_shards(
            JOB,
            MeasureShards(
                workload=self.workload,
                model_path=str(self.folder / "model"),
                layout_digest=self.layout.digest,
                seed=7,
                sharding="dirichlet",
                alpha=0.5,
                partitions=4,
                shards=(SHARD,),
                sketch_secret=SECRET,
            ),
        )
        return answer.losses[0]


async def opened_job(pool: EvaluatorPool, folder: Path, workload: str) -> OpenedJob:
    job = OpenedJob(pool, folder, workload)
    await job.open()
    return job


@pytest.mark.parametrize("workload", WORKLOADS)
async def test_a_step_down_the_samples_gradient_takes_off_their_loss_and_one_up_adds_to_it(
    pool: EvaluatorPool, tmp_path: Path, workload: str
) -> None:
    job = await opened_job(pool, tmp_path, workload)
    (gradient,) = job.model.train_gradients(job.base, [job.indices])
    assert await job.measured_loss() == pytest.approx(gradient.loss, rel=1e-4)
    step = np.float32(0.1) * gradient.parameters
    assert await job.loss_after(0 * step) == pytest.approx(gradient.loss, rel=1e-4)
    down, up = await job.loss_after(step), await job.loss_after(-step)
    assert down is not None
    assert up is not None
    assert down < gradient.loss - 0.01
    assert up > gradient.loss + 0.01
    moved_base = job.base._replace(parameters=job.base.parameters - step)
    assert down == pytest.approx(job.model.train_loss(moved_base, job.indices), rel=1e-4)


@pytest.mark.parametrize("codec", ["int4", "topk64"])
async def test_an_update_of_each_codec_is_tried_as_it_is_folded(
    pool: EvaluatorPool, tmp_path: Path, codec: str
) -> None:
    job = await opened_job(pool, tmp_path, "digits-mlp")
    (gradient,) = job.model.train_gradients(job.base, [job.indices])
    loss = await job.loss_after(gradient.parameters, codec)
    assert loss is not None
    assert loss < gradient.loss


async def test_an_update_that_overflows_the_model_has_no_loss(
    pool: EvaluatorPool, tmp_path: Path
) -> None:
    job = await opened_job(pool, tmp_path, "digits-mlp")
    draws = np.random.default_rng(1)
    huge = np.float32(3e38) * draws.uniform(-1, 1, job.layout.parameters_count)
    assert await job.loss_after(huge.astype(np.float32)) is None


async def test_an_update_that_is_gone_is_an_error_with_its_name(
    pool: EvaluatorPool, tmp_path: Path
) -> None:
    job = await opened_job(pool, tmp_path, "digits-softmax")
    with pytest.raises(HyperGPUError, match="the file update is gone") as failure:
        await job.tried_loss("fp32")
    assert failure.value.reason is Reason.NOT_READY


async def test_a_gradient_by_layers_has_the_signs_of_updates_by_layers(
    pool: EvaluatorPool, tmp_path: Path
) -> None:
    job = await opened_job(pool, tmp_path, "digits-mlp")
    gradient = job.model.gradient(job.base, 64).parameters
    sketches = []
    for by_layers in (True, False):
        answer = await pool.measure_gradient(
            JOB,
            MeasureGradient(
                workload=job.workload,
                model_path=str(tmp_path / "model"),
                layout_digest=job.layout.digest,
                samples_most=64,
                sketch_secret=SECRET,
                by_layers=by_layers,
            ),
        )
        sketches.append(np.frombuffer(answer.sketch))
    groups = layer_groups(job.layout)
    for sketch, of_groups in zip(sketches, (groups, None), strict=True):
        expected_sketch = sketch_vector(SketchKey(SECRET), job.layout, gradient, of_groups)
        assert np.allclose(sketch, expected_sketch, rtol=1e-3, atol=1e-5)
    assert not np.allclose(sketches[0], sketches[1], rtol=1e-3, atol=1e-5)
