"""A closed round that is held against gradients of its own samples, which are known."""

import asyncio
from pathlib import Path

import numpy as np
from blake3 import blake3
from msgspec.structs import replace

from coordinator.core.training.job.commands import FoldedUpdate, OwnShard
from coordinator.core.training.job.trust_memory import PayMemory, TrustMemory
from coordinator.core.training.trust.weights import WHOLE
from coordinator.shell.aggregation.layer_groups import layer_groups
from coordinator.shell.aggregation.measurements import OwnGradient
from coordinator.shell.aggregation.sketch import SketchKey, sketch_layers
from hypergpu.assignment import SampleRange
from hypergpu.blobs import BlobRef
from hypergpu.ids import Digest, Slot
from hypergpu.tensors.layout import Float32s
from hypergpu.units import Bytes, Samples
from tests.unit.aggregation.fold_files import LAYOUT, random_flat
from tests.unit.shell.weighed_job import NAMES, SLOPE, WeighedJob
from tests.unit.shell.whole_shell import JOB

MEMORY = TrustMemory(by_own_samples=True, rounds=1)
TRIED_MEMORY = replace(MEMORY, pay=PayMemory())


def slope_of(slot: int) -> Float32s:
    """What the samples of a shard ask for: nodes of skewed data have little in common."""
    slope: Float32s = SLOPE + 3 * random_flat(50 + slot).parameters
    return slope


def honest_update(slot: int) -> Float32s:
    vector: Float32s = slope_of(slot) + random_flat(slot).parameters
    return vector


async def skewed_job(
    folder: Path, *, is_measured: bool = True, is_honest: bool = False
) -> WeighedJob:
    """A job of five honest nodes and a liar, whose shards' gradients are known.

    Args:
        folder: Of its files.
        is_measured: Whether the gradients are there.
        is_honest: Whether the liar's update is honest, too.
    """
    vectors = [honest_update(slot) for slot in range(5)]
    last = honest_update(5) if is_honest else -honest_update(5)
    job = WeighedJob(folder, *vectors, last)
    job.with_gradient(groups=layer_groups(LAYOUT))
    base = job.command.base.blob
    updates = tuple(
        replace(each, own=OwnShard(7 + slot, 0, (SampleRange(0, Samples(9)),), base))
        for slot, each in enumerate(job.command.updates)
    )
    job.command = replace(job.command, trust=MEMORY, updates=updates)
    job.runtime.job = replace(job.runtime.job, trust=MEMORY)
    secret = blake3(JOB.encode(), key=job.services.training.weighing.secret).digest()
    gradients = {
        7 + slot: OwnGradient(
            sketch_layers(SketchKey(secret), LAYOUT, slope_of(slot), layer_groups(LAYOUT)), 1.0
        )
        for slot in range(6)
    }

    async def measure() -> dict[int, OwnGradient]:
        return gradients

    if is_measured:
        task = asyncio.create_task(measure())
        job.runtime.measurements.own = dict.fromkeys(gradients, task)
    return job


async def test_on_skewed_data_a_liar_is_told_from_nodes_that_have_little_in_common(
    tmp_path: Path,
) -> None:
    weighing = (await (await skewed_job(tmp_path)).weigh()).weighing
    assert weighing.votes[NAMES[5]] == 0
    assert weighing.pay_shares[NAMES[5]] == 0
    assert all(weighing.pay_shares.get(node, WHOLE) == WHOLE for node in NAMES[:5])
    assert "own shard" in weighing.pay_reasons[NAMES[5]]


async def test_a_round_that_is_weighed_again_after_a_kill_comes_to_the_same(
    tmp_path: Path,
) -> None:
    first = await (await skewed_job(tmp_path / "first")).weigh()
    again = await (await skewed_job(tmp_path / "again")).weigh()
    assert first.weighing == again.weighing


async def test_where_the_evaluator_cannot_measure_the_memory_decides(tmp_path: Path) -> None:
    job = await skewed_job(tmp_path, is_measured=False)
    weighing = (await job.weigh()).weighing
    assert weighing.pay_shares.get(NAMES[5], WHOLE) == WHOLE
    assert weighing.memory.honesty == {}


async def test_an_updates_sketch_is_the_sum_of_those_of_its_layers(tmp_path: Path) -> None:
    job = await skewed_job(tmp_path)
    await job.weigh()
    task = job.runtime.measurements.sketches[job.command.updates[0].blob.digest]
    sketch = task.result()
    assert np.array_equal(sketch.layers.sum(axis=0), sketch.sketch)
    assert len(sketch.layers) == layer_groups(LAYOUT).groups_count


async def tried_job(folder: Path, *losses_after: float | None) -> WeighedJob:
    """A job of six nodes with honest sketches, and the losses of their samples after the updates;
    None: the evaluator could not measure one.
    """
    job = await skewed_job(folder, is_honest=True)
    job.command = replace(job.command, trust=TRIED_MEMORY)
    job.runtime.job = replace(job.runtime.job, trust=TRIED_MEMORY)

    async def loss_of(loss: float | None) -> float | None:
        return loss

    job.runtime.measurements.trials = {
        (each.own.lease, each.blob.digest): asyncio.create_task(loss_of(loss))
        for each, loss in zip(job.command.updates, losses_after, strict=True)
        if each.own is not None
    }
    return job


async def test_a_node_whose_update_makes_its_own_samples_worse_is_not_paid(
    tmp_path: Path,
) -> None:
    job = await tried_job(tmp_path, 0.5, 0.5, 0.5, 0.5, 0.5, 1.5)
    weighing = (await job.weigh()).weighing
    assert weighing.pay_shares[NAMES[5]] == 0
    assert "from 1 to 1.5" in weighing.pay_reasons[NAMES[5]]
    assert all(weighing.pay_shares.get(node, WHOLE) == WHOLE for node in NAMES[:5])
    assert weighing.memory.pay is not None
    assert list(weighing.memory.pay.debts) == [NAMES[5]]


async def test_trials_of_a_round_that_is_weighed_again_come_to_the_same(tmp_path: Path) -> None:
    losses = (0.5, 0.4, 0.6, 0.5, 0.9, 1.5)
    first = await (await tried_job(tmp_path / "first", *losses)).weigh()
    again = await (await tried_job(tmp_path / "again", *losses)).weigh()
    assert first.weighing == again.weighing


async def test_an_update_that_could_not_be_tried_is_paid(tmp_path: Path) -> None:
    job = await tried_job(tmp_path, 0.5, 0.5, 0.5, 0.5, 0.5, None)
    weighing = (await job.weigh()).weighing
    assert weighing.pay_shares.get(NAMES[5], WHOLE) == WHOLE


async def test_trials_of_a_round_are_forgotten_when_another_is_weighed(tmp_path: Path) -> None:
    job = await tried_job(tmp_path, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5)
    await job.weigh()
    trials = job.runtime.measurements.trials
    assert len(trials) == 6
    other = FoldedUpdate(NAMES[0], Slot(0), BlobRef(Digest("ab" * 32), Bytes(1)), 1, "int4", 1)
    weighing = job.services.training.weighing
    await weighing.trials.trials(job.runtime, {NAMES[0]: other}, {}, b"secret")
    assert trials == {}
