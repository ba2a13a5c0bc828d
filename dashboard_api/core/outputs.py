"""Held-out examples and the model's output for them, from the journal to the feed."""

from typing import Any

import msgspec

from dashboard_api.core.changes import JsonObject
from dashboard_api.core.state import ExampleState, OutputSample


def example_states(journalled: list[Any]) -> list[JsonObject]:
    """Examples of ``ModelInitialised``; older journals have none."""
    return [_example(each) for each in journalled if isinstance(each, dict)]


def _example(journalled: JsonObject) -> JsonObject:
    text, image, label = (str(journalled.get(name) or "") for name in ("text", "image", "label"))
    url = f"data:image/png;base64,{image}" if image else ""
    return msgspec.structs.asdict(ExampleState(text, url, label))


def output_sample(
    examples: list[Any], outputs: list[Any], number: int, at_ms: int
) -> JsonObject | None:
    """Outputs of ``EvaluationReady``; None where they do not belong to examples."""
    if not outputs or len(outputs) != len(examples):
        return None
    return msgspec.structs.asdict(OutputSample(number, at_ms, [str(each) for each in outputs]))
