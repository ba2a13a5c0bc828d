"""Examples of held-out samples, and what real models make of them, as the journal takes them."""

import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from coordinator.core.training.job.events import EvaluationReady, Event, ModelInitialised
from coordinator.shell.evaluator.examples import (
    TEXT_BYTES_MOST,
    example_outputs,
    held_out_examples,
)
from coordinator.shell.evaluator.model_evaluator import NumpyEvaluator
from coordinator.shell.evaluator.torch_evaluator import TorchEvaluator
from hypergpu.blobs import BlobRef
from hypergpu.ids import Digest
from hypergpu.units import Bytes, Milliseconds, Samples
from hypergpu.workloads.digits import DigitsSoftmax, digits
from hypergpu.workloads.examples import Example
from hypergpu.workloads.networks.task import CONTINUATION_BYTES, Classification
from hypergpu.workloads.registry import build, find
from tests.unit.job_states import model

TINY_GPT = {"width": 16, "layers": 1, "heads": 2, "block_length": 64}


def pixels(png: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(png)))


def softmax_after(steps: int) -> tuple[NumpyEvaluator, Any]:
    workload = DigitsSoftmax()
    inputs, targets = digits().train.batch(np.arange(1_000))
    parameters = workload.initial(0)
    for _ in range(steps):
        _, slope = workload.gradient(parameters, inputs, targets)
        parameters = {name: parameters[name] - slope[name] for name in slope}
    evaluator = NumpyEvaluator(workload, "")
    flat = evaluator.initial(0)
    flat.parameters[:] = np.concatenate([parameters[name].ravel() for name in sorted(parameters)])
    return evaluator, flat


def test_held_out_digits_are_shown_and_a_model_that_learned_reads_them() -> None:
    evaluator, flat = softmax_after(300)
    examples = held_out_examples(evaluator)
    labels = [each.label for each in examples]
    assert len(set(labels)) == 8
    for example in examples:
        held_out = digits().test.inputs[digits().test.labels == int(example.label)]  # type: ignore[attr-defined]
        drawn_pixels = pixels(example.image) // 8
        assert any(
            (drawn_pixels == (each.reshape(8, 8) * 255).astype(int) // 8).all() for each in held_out
        )
    outputs = example_outputs(evaluator, flat)
    assert sum(a == b for a, b in zip(outputs, labels, strict=True)) >= 7
    assert example_outputs(evaluator, evaluator.initial(0)) == ("0",) * 8


def test_a_convolutional_network_reads_the_same_digits() -> None:
    evaluator = TorchEvaluator(build(find("digits-cnn"), {"channels": 4}), "")
    assert held_out_examples(evaluator) == held_out_examples(softmax_after(0)[0])
    outputs = example_outputs(evaluator, evaluator.initial(1))
    assert len(outputs) == 8
    assert set(outputs) <= set("0123456789")


def test_a_text_model_goes_on_with_a_held_out_line_the_same_way_each_time(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("the quick brown fox\njumps over the dog\n" * 20_000)
    evaluator = TorchEvaluator(build(find("text-gpt"), TINY_GPT), str(tmp_path))
    (example,) = held_out_examples(evaluator)
    assert example.text.startswith(("the quick", "jumps over"))
    flat = evaluator.initial(3)
    before, weights = torch.get_rng_state(), flat.parameters.copy()
    (continuation,) = example_outputs(evaluator, flat)
    assert example_outputs(evaluator, flat) == (continuation,)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(flat.parameters, weights)
    assert CONTINUATION_BYTES / 4 <= len(continuation) <= CONTINUATION_BYTES
    assert len(continuation.encode()) <= TEXT_BYTES_MOST


@pytest.mark.parametrize("name", ["null", "vectors"])
def test_a_workload_whose_samples_cannot_be_shown_has_no_examples(name: str) -> None:
    vectors = Classification(lambda: torch.nn.Linear(64, 10), lambda _: digits())
    evaluator = (
        TorchEvaluator(vectors, "")
        if name == "vectors"
        else NumpyEvaluator(build(find(name), {}), "")
    )
    assert held_out_examples(evaluator) == ()
    assert example_outputs(evaluator, evaluator.initial(0)) == ()


class Excessive(DigitsSoftmax):
    """Shows more than a journal takes, in colour, and names its classes."""

    def load(self, data_dir: str) -> Any:
        return digits()._replace(class_names=("cat", "dog" * 100))

    def examples(self, inputs: Any, targets: Any) -> list[Example]:
        noise = np.random.default_rng(0).integers(0, 256, (50, 70, 3)).astype(np.uint8)
        return [Example("€" * 10_000, noise, label=number % 3) for number in range(50)]

    def outputs(self, parameters: Any, inputs: Any) -> list[int | str]:
        return [0, "ü" * 10_000, *range(2, 50)]


def test_what_a_workload_shows_is_bounded_and_its_classes_are_named() -> None:
    evaluator = NumpyEvaluator(Excessive(), "")
    examples = held_out_examples(evaluator)
    assert [each.label for each in examples[:3]] == ["cat", ("dog" * 100)[:40], "2"]
    assert {pixels(each.image).shape for each in examples} == {(16, 23, 3)}
    assert {each.text for each in examples} == {"€" * (TEXT_BYTES_MOST // 3)}
    outputs = example_outputs(evaluator, evaluator.initial(0))
    assert outputs[:3] == ("cat", "ü" * 25, "2")
    assert sum(len(each.encode()) for each in outputs) <= TEXT_BYTES_MOST
    assert len(msgspec.json.encode(examples)) <= 40_000


class Broken(DigitsSoftmax):
    """Cannot show anything."""

    def examples(self, inputs: Any, targets: Any) -> list[Example]:
        return [Example(image=np.zeros((4, 4), dtype=np.float64))]

    def outputs(self, parameters: Any, inputs: Any) -> list[int | str]:
        raise MemoryError("no memory is left")


def test_a_workload_that_fails_to_show_its_samples_is_evaluated_all_the_same() -> None:
    evaluator = NumpyEvaluator(Broken(), "")
    flat = evaluator.initial(0)
    assert held_out_examples(evaluator) == ()
    assert example_outputs(evaluator, flat) == ()
    assert evaluator.evaluate(flat).samples > 0


def test_journals_keep_examples_and_read_without_them() -> None:
    examples = held_out_examples(softmax_after(0)[0])
    at_ms = Milliseconds(7)
    whole = ModelInitialised(
        at_ms=at_ms, model=model(0), partition_sizes=(Samples(1),), examples=examples
    )
    evaluation = EvaluationReady(
        at_ms=at_ms,
        round=1,
        model=BlobRef(Digest("aa"), Bytes(1)).digest,
        loss=0.5,
        metric=0.5,
        metric_name="accuracy",
        outputs=("3",) * 8,
    )
    for event, field, bytes_most in ((whole, "examples", 2_000), (evaluation, "outputs", 50)):
        content = msgspec.json.encode(event)
        assert msgspec.json.decode(content, type=Event) == event
        old = msgspec.json.decode(content)
        added_field = old.pop(field)
        assert len(msgspec.json.encode(added_field)) <= bytes_most
        without = msgspec.json.decode(msgspec.json.encode(old), type=Event)
        assert getattr(without, field) == ()
