"""Held-out examples and the model's output for them, from the journal to the feed."""

from base64 import b64encode
from collections.abc import Iterable, Sequence

import msgspec

from dashboard_api.core.changes import JsonObject
from dashboard_api.core.state import ExampleState, OutputSample
from hypergpu.workloads.entry import HeldOutExample


def example_states(examples: Iterable[HeldOutExample]) -> list[JsonObject]:
    """Examples of ``ModelInitialised``; older journals have none."""
    return [msgspec.structs.asdict(_example(each)) for each in examples]


def _example(example: HeldOutExample) -> ExampleState:
    image = b64encode(example.image).decode()
    url = f"data:image/png;base64,{image}" if image else ""
    return ExampleState(example.text, url, example.label)


def output_sample(
    examples: Sequence[object], outputs: Sequence[str], number: int, at_ms: int
) -> JsonObject | None:
    """Outputs of ``EvaluationReady``; None where they do not belong to examples."""
    if not outputs or len(outputs) != len(examples):
        return None
    return msgspec.structs.asdict(OutputSample(number, at_ms, list(outputs)))
