"""Single updates measured on held-out data by a real evaluator process."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from coordinator.shell.evaluator.messages import (
    Evaluate,
    Initialise,
    Initialised,
    MeasureUpdates,
    UpdateFile,
    UpdatesMeasured,
)
from coordinator.shell.evaluator.process import EvaluatorProcess
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError
from hypergpu.tensors.codec import update_bytes
from hypergpu.tensors.layout import layout_from_json
from hypergpu.workloads.registry import build, find


@pytest.fixture
async def evaluator() -> AsyncIterator[EvaluatorProcess]:
    process = EvaluatorProcess()
    yield process
    await process.stop()


class UpdateFolder:
    """A model, and updates to it."""

    def __init__(self, folder: Path, made: Initialised) -> None:
        self.folder = folder
        self.layout = layout_from_json(made.layout_json)
        self.base = folder / "model"
        self.count = update_bytes(self.layout, "fp32") // 4

    def update(self, name: str, values: np.ndarray) -> UpdateFile:
        path = self.folder / name
        path.write_bytes(values.astype("<f4").tobytes())
        return UpdateFile(str(path), "fp32")

    def gradient(self) -> np.ndarray:
        """One step of softmax regression over some training samples."""
        workload = build(find("digits-softmax"), {})
        samples = workload.load("").train
        inputs, labels = samples.batch(np.arange(500))
        pixels = inputs.reshape(len(inputs), -1).astype(np.float64)
        hot = np.eye(10)[labels]
        errors = (1 / 10 - hot) / len(hot)
        by_name = {10: errors.sum(0), pixels.shape[1] * 10: pixels.T @ errors}
        parts = [by_name[tensor.count].ravel() for tensor in self.layout.tensors]
        return np.concatenate(parts)

    def request(self, *updates: UpdateFile, most: int = 0) -> MeasureUpdates:
        digest = digest_of(self.base.read_bytes())
        return MeasureUpdates(
            workload="digits-softmax",
            layout_digest=self.layout.digest,
            base_path=str(self.base),
            base_digest=digest,
            made_path=str(self.base),
            made_digest=digest,
            updates=updates,
            samples_most=most,
        )


@pytest.fixture
async def round_(evaluator: EvaluatorProcess, tmp_path: Path) -> UpdateFolder:
    request = Initialise(
        workload="digits-softmax",
        model_path=str(tmp_path / "model"),
        layout_path=str(tmp_path / "layout"),
    )
    return UpdateFolder(tmp_path, await evaluator.initialise(request))


async def test_what_an_update_alone_does_to_the_loss_is_found(
    evaluator: EvaluatorProcess, round_: UpdateFolder
) -> None:
    step = round_.gradient()
    found = await evaluator.measure_updates(
        round_.request(
            round_.update("zero", np.zeros(round_.count)),
            round_.update("good", step),
            round_.update("turned", -step),
        )
    )
    assert found.base_loss is not None
    nothing, good, turned = found.losses
    assert nothing == found.base_loss == found.made_loss
    assert good is not None
    assert turned is not None
    assert good < found.base_loss < turned


async def test_all_held_out_samples_give_the_loss_that_an_evaluation_gives(
    evaluator: EvaluatorProcess, round_: UpdateFolder
) -> None:
    found = await evaluator.measure_updates(round_.request())
    whole = await evaluator.evaluate(
        Evaluate(
            workload="digits-softmax",
            model_path=str(round_.base),
            layout_digest=round_.layout.digest,
        )
    )
    assert found == UpdatesMeasured(base_loss=whole.loss, made_loss=whole.loss, losses=())


async def test_a_part_of_the_samples_is_spread_over_all(
    evaluator: EvaluatorProcess, round_: UpdateFolder
) -> None:
    some = await evaluator.measure_updates(round_.request(most=100))
    every = await evaluator.measure_updates(round_.request())
    assert some.base_loss is not None
    assert some.base_loss == pytest.approx(every.base_loss, rel=0.2)


async def test_a_loss_that_is_not_finite_is_none(
    evaluator: EvaluatorProcess, round_: UpdateFolder
) -> None:
    huge = round_.update("huge", np.full(round_.count, 3e38))
    found = await evaluator.measure_updates(round_.request(huge))
    assert found.losses == (None,)


async def test_an_update_of_another_size_is_refused(
    evaluator: EvaluatorProcess, round_: UpdateFolder
) -> None:
    short = round_.update("short", np.zeros(round_.count - 1))
    with pytest.raises(HyperGPUError, match="an update has"):
        await evaluator.measure_updates(round_.request(short))
