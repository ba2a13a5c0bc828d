"""The weighing of a closed round: updates on disk, held against a gradient that is known."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from coordinator.core.training.job.events import AggregateReady
from coordinator.core.training.job.state import Model
from coordinator.core.training.job.trust_memory import TrustMemory, Weighing
from coordinator.core.training.trust.weights import ROLLBACKS_MOST, WHOLE, known_votes
from coordinator.core.work.work_events import JobPaused
from coordinator.shell.aggregation.fold_request import BaseDamagedError
from coordinator.shell.kinds.training.aggregation import counted_updates
from hypergpu.jobfile.spec import Trust
from tests.unit.aggregation.fold_files import LAYOUT, random_flat
from tests.unit.shell.weighed_job import NAMES, WeighedJob, honest_update
from tests.unit.shell.whole_shell import SPEC, NoEvaluators


# Four with a cosine of a fifth between them; sparse ones hardly overlap.
@pytest.mark.parametrize(("codec", "agreement"), [("fp32", 1.6), ("int4", 1.6), ("topk64", 1.1)])
async def test_updates_against_the_held_out_gradient_do_not_count(
    codec: str, agreement: float, tmp_path: Path
) -> None:
    liar = -3 * honest_update(5)
    job = WeighedJob(tmp_path, *(honest_update(seed) for seed in range(1, 5)), liar, codec=codec)
    job.with_gradient()
    weighed_round = await job.weigh()
    assert weighed_round.weighing.votes[NAMES[4]] == 0
    assert "influence" in weighed_round.weighing.reasons[NAMES[4]]
    assert weighed_round.weighing.memory.loss == 1.0
    updates = counted_updates(job.command, weighed_round).updates
    assert [update.node for update in updates] == list(NAMES[:4])
    assert weighed_round.agreement == pytest.approx(agreement, abs=0.2)


async def test_a_long_update_is_clipped_to_the_length_of_the_others(tmp_path: Path) -> None:
    job = WeighedJob(tmp_path, *(honest_update(seed) for seed in range(1, 5)), 3 * honest_update(5))
    job.with_gradient()
    weighed_round = await job.weigh()
    clip = weighed_round.weighing.clips[NAMES[4]]
    assert clip == pytest.approx(WHOLE / 3, rel=0.05)
    assert counted_updates(job.command, weighed_round).updates[4].clip == clip


async def test_without_a_gradient_copies_still_share_one_vote(tmp_path: Path) -> None:
    first = honest_update(1)
    job = WeighedJob(tmp_path, first, first, *(honest_update(seed) for seed in range(2, 6)))
    job.without_gradient()
    votes = (await job.weigh()).weighing.votes
    assert votes[NAMES[0]] == votes[NAMES[1]] < votes[NAMES[2]]


async def test_a_round_without_a_gradient_says_so_and_leaves_each_weight_as_it_was(
    tmp_path: Path,
) -> None:
    job = WeighedJob(tmp_path, *(honest_update(seed) for seed in range(1, 4)))
    weights = {NAMES[0]: WHOLE // 2, NAMES[1]: WHOLE // 4, NAMES[2]: WHOLE}
    job.command = replace(job.command, trust=TrustMemory(rounds=4, weights=weights))
    job.runtime.measurements.gradient_failure = "the gradient of its held-out loss took too long"
    job.without_gradient()
    weighing = (await job.weigh()).weighing
    assert weighing.no_evidence == "the gradient of its held-out loss took too long"
    assert weighing.memory.weights == weights
    assert weighing.votes == known_votes(job.command.trust, NAMES[:2])


async def test_an_update_that_is_gone_is_named_and_the_others_are_weighed(tmp_path: Path) -> None:
    job = WeighedJob(tmp_path, *(honest_update(seed) for seed in range(1, 5)))
    job.with_gradient()
    job.services.blobs.path(job.command.updates[1].blob.digest).unlink()
    weighed_round = await job.weigh()
    ((node, _),) = weighed_round.unreadable
    assert node == NAMES[1]
    updates = counted_updates(job.command, weighed_round).updates
    assert [update.node for update in updates] == [NAMES[0], NAMES[2], NAMES[3]]


async def test_no_update_is_to_blame_where_the_model_is_gone_and_made_again(
    tmp_path: Path,
) -> None:
    job = WeighedJob(tmp_path, *(honest_update(seed) for seed in range(1, 5)))
    job.with_gradient()
    job.services.blobs.path(job.command.base.blob.digest).unlink()
    for update in job.command.updates:
        job.services.training.weighing.prepare_sketch(job.runtime, update.blob, update.codec)
    await asyncio.wait(job.runtime.measurements.sketches.values())
    with pytest.raises(BaseDamagedError):
        await job.weigh()
    job.put(random_flat(0))
    assert (await job.weigh()).unreadable == ()


async def test_a_plain_mean_asks_for_no_gradient_and_counts_liars(tmp_path: Path) -> None:
    job = WeighedJob(tmp_path, *(honest_update(seed) for seed in range(1, 5)), -honest_update(5))
    job.command = replace(job.command, spec=replace(SPEC, trust=Trust(rule="mean")))
    job.runtime.job = replace(job.runtime.job, spec=job.command.spec)
    weighed_round = await job.weigh()
    assert weighed_round.weighing == Weighing({}, {}, {}, job.command.trust)
    assert weighed_round.agreement is not None
    assert job.runtime.measurements.gradients == {}
    assert isinstance(job.services.evaluator, NoEvaluators)
    assert job.services.evaluator.serving_processes() == {}


def exploded_job(folder: Path, rollbacks: int = 0) -> WeighedJob:
    """A job whose newest model is far worse than the one before, by the update of one liar."""
    job = WeighedJob(folder, *(honest_update(seed) for seed in range(1, 5)))
    makers = job.updates([honest_update(1), honest_update(2), -honest_update(3)])
    memory = TrustMemory(rounds=4, loss=1.0, rollbacks=rollbacks)
    fallback = Model(3, job.put(random_flat(1)), job.put(random_flat(2)))
    job.command = replace(job.command, trust=memory, fallback=fallback, makers=makers)
    return job


@pytest.mark.parametrize(("loss", "found"), [(50.0, "is 50"), (None, "is not finite")])
async def test_a_job_goes_back_from_a_model_that_exploded_and_blames_who_made_it(
    loss: float | None, found: str, tmp_path: Path
) -> None:
    job = exploded_job(tmp_path)
    job.with_gradient(loss)
    await job.services.training.aggregation.aggregate(job.runtime, job.command)
    (ready,) = job.driver.reported
    assert isinstance(ready, AggregateReady)
    fallback = job.command.fallback
    assert fallback is not None
    assert ready.model == Model(5, fallback.blob, fallback.outer_state)
    assert ready.weighing is not None
    assert ready.weighing.rollback == f"the held-out loss of the model of round 4 {found}"
    assert ready.weighing.votes == {NAMES[2]: 0}
    assert ready.weighing.memory.weights[NAMES[2]] == 0
    assert ready.weighing.memory.rollbacks == 1


async def test_an_old_gradient_says_nothing_of_the_newest_model(tmp_path: Path) -> None:
    job = exploded_job(tmp_path)
    assert job.command.fallback is not None
    job.with_gradient(50.0, job.command.fallback.blob)
    assert (await job.weigh()).weighing.rollback == ""


async def test_a_model_that_the_job_went_back_to_ends_no_row_of_rollbacks(tmp_path: Path) -> None:
    job = exploded_job(tmp_path, rollbacks=2)
    job.with_gradient(1.1)
    assert (await job.weigh()).weighing.memory.rollbacks == 0
    job.command = replace(job.command, fallback=None, makers=())
    assert (await job.weigh()).weighing.memory.rollbacks == 2


async def test_a_job_that_goes_back_again_and_again_pauses_with_advice(tmp_path: Path) -> None:
    job = exploded_job(tmp_path, rollbacks=ROLLBACKS_MOST - 1)
    job.runtime.job = replace(job.runtime.job, trust=TrustMemory(rollbacks=ROLLBACKS_MOST))
    job.with_gradient(None)
    await job.services.training.aggregation.aggregate(job.runtime, job.command)
    pause = job.driver.reported[-1]
    assert isinstance(pause, JobPaused)
    assert f"{ROLLBACKS_MOST} times in a row: training itself diverges" in pause.reason


async def test_where_every_update_overflows_the_model_stays(tmp_path: Path) -> None:
    huge = np.full(LAYOUT.parameters_count, np.inf, np.float32)
    job = WeighedJob(tmp_path, huge, huge, huge)
    job.with_gradient()
    await job.services.training.aggregation.aggregate(job.runtime, job.command)
    ready = job.driver.reported[0]
    assert isinstance(ready, AggregateReady)
    assert ready.model.blob == job.command.base.blob
    assert ready.weighing is not None
    assert set(ready.weighing.votes.values()) == {0}
    assert ready.omitted == ()
