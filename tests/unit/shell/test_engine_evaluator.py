"""Evaluations by an engine run at the same time, and leave a worker to the fold."""

import asyncio
import threading
from collections.abc import Sequence

import msgspec
import pytest

from coordinator.core.hub.evaluator_turns import EvaluatorJob
from coordinator.shell.engine.evaluation import EngineEvaluator, EvaluatorPlace
from coordinator.shell.evaluator.process import Evaluate, Evaluated
from coordinator.shell.evaluator.seat import EvaluatorLimits
from hypergpu.engine.tasks import EngineTask, UnknownTaskError, compute
from hypergpu.ids import Digest, JobId, TokenId
from tests.unit.shell.whole_shell import NoEvaluators

JOB = EvaluatorJob(JobId("job-000000000001"), TokenId("owner"))
PLACE = EvaluatorPlace("/nowhere", EvaluatorLimits())
REQUEST = Evaluate(workload="digits-cnn", model_path="/model", layout_digest=Digest(""))
MEASURED = Evaluated(loss=1.0, metric=0.5, metric_name="accuracy")


class MeetingEngine:
    """Answers an evaluation once as many are asked as the barrier has parties."""

    def __init__(self, workers: int, parties: int) -> None:
        self.workers = workers
        self.tasks: list[EngineTask] = []
        self.running_count = self.most_at_once = 0
        self._barrier = threading.Barrier(parties, timeout=60)

    def run(self, tasks: Sequence[EngineTask]) -> list[bytes | None]:
        self.tasks += tasks
        self.running_count += 1
        self.most_at_once = max(self.most_at_once, self.running_count)
        self._barrier.wait()
        self.running_count -= 1
        return [msgspec.msgpack.encode(MEASURED) for _ in tasks]

    def close(self) -> None:
        """Nothing was started."""


async def evaluate_at_once(engine: MeetingEngine, count: int) -> list[Evaluated]:
    evaluator = EngineEvaluator(engine, NoEvaluators(), PLACE)
    evaluations = await asyncio.gather(*(evaluator.evaluate(JOB, REQUEST) for _ in range(count)))
    await evaluator.stop()
    return list(evaluations)


async def test_evaluations_of_several_jobs_run_at_the_same_time() -> None:
    engine = MeetingEngine(workers=3, parties=2)
    assert await evaluate_at_once(engine, 2) == [MEASURED] * 2


@pytest.mark.parametrize("workers", [1, 2])
async def test_one_worker_is_left_to_folds(workers: int) -> None:
    engine = MeetingEngine(workers=workers, parties=1)
    assert await evaluate_at_once(engine, 3) == [MEASURED] * 3
    assert engine.most_at_once == 1


async def test_evaluation_by_torch_wants_a_gpu() -> None:
    engine = MeetingEngine(workers=2, parties=1)
    await evaluate_at_once(engine, 1)
    assert [task.wants_gpu for task in engine.tasks] == [True]


def test_task_whose_kind_is_not_listed_is_computed_by_nobody() -> None:
    with pytest.raises(UnknownTaskError, match=r"os\.system"):
        compute(EngineTask("os.system", b"true"))
