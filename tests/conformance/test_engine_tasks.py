"""One suite for every engine: evaluations, receipts and worlds come out as without one."""

from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from msgspec.structs import replace

from coordinator.core.hub.evaluator_turns import EvaluatorJob
from coordinator.shell.engine.evaluation import EngineEvaluator, EvaluatorPlace
from coordinator.shell.evaluator.pool import EvaluatorPool
from coordinator.shell.evaluator.process import Evaluate, Initialise, MeasureGradient
from coordinator.shell.evaluator.seat import EvaluatorLimits, SeatMaker, machine_limits
from hypergpu.engine.engine import Engine, LocalEngine
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId, TokenId
from hypergpu.tensors.layout import layout_from_json
from hypergpu.units import Wei
from netsim.run.choices import Choices, chosen_world
from netsim.run.job import run_virtually
from netsim.run.world_task import inputs_of, simulate
from payments.core.verify import ReceiptFile, receipt_faults
from payments.shell.receipt_tasks import check_receipts
from tests.properties.statements import JOB, TERMS, Work, node_key, signed_receipt

ROOT = Path(__file__).parents[2]
ASKING = EvaluatorJob(JobId("job-000000000001"), TokenId(""))
LIMITS = machine_limits(EvaluatorLimits(spares=0))
WORLD = str(ROOT / "examples" / "worlds" / "five-homes.toml")


@pytest_asyncio.fixture
async def own(tmp_path: Path) -> AsyncIterator[EvaluatorPool]:
    pool = EvaluatorPool(SeatMaker(tmp_path / "own", LIMITS))
    yield pool
    await pool.stop()


def by_engine(engine: Engine, own: EvaluatorPool, folder: Path) -> EngineEvaluator:
    return EngineEvaluator(engine, own, EvaluatorPlace(str(folder / "engine"), LIMITS))


def nobody(folder: Path) -> EvaluatorPool:
    """Evaluators that cannot start."""
    return EvaluatorPool(SeatMaker(folder / "nobody", LIMITS, ("false",)))


async def requests(
    own: EvaluatorPool, folder: Path, workload: str
) -> tuple[Evaluate, MeasureGradient]:
    model_path = str(folder / "model")
    initial_model = await own.initialise(
        ASKING,
        Initialise(workload=workload, model_path=model_path, layout_path=str(folder / "layout")),
    )
    digest = layout_from_json(initial_model.layout_json).digest
    evaluate = Evaluate(workload=workload, model_path=model_path, layout_digest=digest)
    gradient = MeasureGradient(
        workload=workload,
        model_path=model_path,
        layout_digest=digest,
        samples_most=100,
        sketch_secret=bytes(32),
    )
    return evaluate, gradient


@pytest.mark.parametrize("workload", ["digits-softmax", "digits-cnn"])
async def test_engine_measures_the_bits_that_the_own_evaluator_does(
    engine: Engine, own: EvaluatorPool, tmp_path: Path, workload: str
) -> None:
    evaluate, gradient = await requests(own, tmp_path, workload)
    engine_evaluator = by_engine(engine, nobody(tmp_path), tmp_path)
    assert await engine_evaluator.evaluate(ASKING, evaluate) == await own.evaluate(ASKING, evaluate)
    measurement = await engine_evaluator.measure_gradient(ASKING, gradient)
    assert measurement == await own.measure_gradient(ASKING, gradient)
    await engine_evaluator.stop()


async def test_what_the_engine_cannot_measure_fails_with_the_words_of_the_own_evaluator(
    engine: Engine, own: EvaluatorPool, tmp_path: Path
) -> None:
    evaluate, _ = await requests(own, tmp_path, "digits-softmax")
    engine_evaluator = by_engine(engine, own, tmp_path)
    (tmp_path / "model").write_bytes(b"\xff" * (tmp_path / "model").stat().st_size)
    with pytest.raises(HyperGPUError) as failure:
        await engine_evaluator.evaluate(ASKING, evaluate)
    assert failure.value.reason is Reason.UPDATE_NOT_FINITE
    await engine_evaluator.stop()


async def test_code_of_workloads_sees_no_secret_beside_a_worker(
    own: EvaluatorPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    evaluate, _ = await requests(own, tmp_path, "digits-softmax")
    engine = LocalEngine(1)
    engine_evaluator = by_engine(engine, nobody(tmp_path), tmp_path)
    await engine_evaluator.evaluate(ASKING, evaluate)
    (worker,) = engine.children
    (evaluator,) = psutil.Process(worker.process_id).children()
    assert "coordinator.shell.evaluator" in evaluator.cmdline()
    assert "HF_TOKEN" not in evaluator.environ()
    await engine_evaluator.stop()
    engine.close()
    psutil.wait_procs([evaluator])


def test_receipts_have_the_faults_that_one_process_finds(engine: Engine) -> None:
    sound = [
        signed_receipt(node_key(0), Work(number, 0, 320, 9_000), sequence=number)
        for number in range(5)
    ]
    bad = [replace(sound[3], signature=bytes(65)), replace(sound[4], contribution_signature=b"")]
    file = ReceiptFile(JOB, TERMS, Wei(1), (*sound, *bad))
    faults = check_receipts(engine, file)
    assert faults == receipt_faults(file.terms, file.receipts)
    assert [bool(fault) for fault in faults] == [False] * 5 + [True] * 2


def test_world_has_the_report_that_one_process_gives(engine: Engine) -> None:
    choices = Choices(world=WORLD, seed=3, rounds=2)
    world = chosen_world(choices)
    assert simulate(engine, choices, inputs_of(world)) == run_virtually(world)


def test_world_that_is_another_where_it_is_simulated_is_refused(engine: Engine) -> None:
    choices = Choices(world=WORLD, seed=3, rounds=2)
    other = inputs_of(chosen_world(replace(choices, seed=4)))
    with pytest.raises(HyperGPUError, match="is another here"):
        simulate(engine, choices, other)
