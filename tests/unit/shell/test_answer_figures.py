"""Figures of served models' answers: what is counted of each, and how a monitor reads it."""

from collections.abc import AsyncGenerator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.core.serving.kind import SERVING
from coordinator.shell.kinds.serving.answer_figures import AnswerFigures, Histogram, RecentRate
from coordinator.shell.kinds.serving.runtime import ServeRuntime
from coordinator.shell.metrics.serving import answer_families
from coordinator.shell.metrics.text import metrics_text
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.serving.calls import (
    AnswerBegun,
    AnswerEnded,
    AnswerPart,
    AnswerRefused,
    AnswerToken,
    ModelCall,
)
from tests.kinds.serving.walk import created_model

CALL = ModelCall(text="zebra crossing")


async def parts_of(
    *parts: AnswerPart, failure: HyperGPUError | None = None
) -> AsyncGenerator[AnswerPart, None]:
    for part in parts:
        yield part
    if failure is not None:
        raise failure


async def test_an_answer_is_counted_with_its_tokens_and_its_end() -> None:
    runtime = ServeRuntime(SERVING.transition(None, created_model()).job, 0)
    parts = (AnswerBegun(7), AnswerToken(1, "a"), AnswerToken(2, "b"), AnswerEnded("stop"))
    assert [part async for part in runtime.figures.observe(CALL, parts_of(*parts))] == [*parts]
    text = metrics_text(answer_families([runtime])).decode()
    assert "zebra" not in text
    samples = {
        (sample.name, sample.labels.get("gen_ai_token_type") or sample.labels.get("error_type")): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.endswith(("_count", "_sum"))
    }
    assert samples["gen_ai_client_token_usage_sum", "input"] == 7
    assert samples["gen_ai_client_token_usage_sum", "output"] == 2
    assert samples["gen_ai_server_time_to_first_token_seconds_count", None] == 1
    assert samples["gen_ai_server_time_per_output_token_seconds_count", None] == 1
    assert samples["gen_ai_server_request_duration_seconds_count", ""] == 1


async def test_answers_that_end_otherwise_are_counted_by_their_error() -> None:
    figures = AnswerFigures()
    async for _ in figures.observe(CALL, parts_of(AnswerRefused("too long"))):
        pass
    failure = HyperGPUError(Reason.NOT_READY, "none was free")
    with pytest.raises(HyperGPUError):
        async for _ in figures.observe(CALL, parts_of(failure=failure)):
            pass
    stream = figures.observe(CALL, parts_of(AnswerToken(1), AnswerToken(2)))
    await anext(stream)
    await stream.aclose()
    errors = [sample.labels[-1] for sample in figures.request_s.samples()]
    assert errors == ["refused", "not_ready", "cancelled"]


def test_a_value_counts_in_each_bucket_that_holds_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value, "chat")
    (sample,) = histogram.samples()
    assert sample.buckets == [(1.0, 2), (2.0, 3), (float("inf"), 4)]
    assert sample.sum == 12.0


def test_a_recent_rate_is_of_the_last_ten_whole_seconds() -> None:
    rate = RecentRate()
    for second in range(100, 130):
        for _ in range(4):
            rate.note(second + 0.5)
    assert rate.per_s(130.2) == 4.0
    assert rate.per_s(135.0) == 2.0
    assert rate.per_s(200.0) == 0.0
