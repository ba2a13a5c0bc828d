"""Served models as a monitor sees them, by the names of OpenTelemetry's GenAI conventions."""

from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily, Metric

from coordinator.shell.kinds.serving.answer_figures import Histogram
from coordinator.shell.kinds.serving.runtime import ServeRuntime

MODELS_MOST = 100
"""Models with series of their own: the newest."""
_COMMON = ["gen_ai_request_model", "hypergpu_job", "gen_ai_operation_name"]
_FAMILIES: tuple[tuple[str, str, str, list[str]], ...] = (
    (
        "first_token_s",
        "gen_ai_server_time_to_first_token_seconds",
        "Time from a call's arrival to its first token.",
        [],
    ),
    (
        "token_s",
        "gen_ai_server_time_per_output_token_seconds",
        "Time of a token after the first, the mean of an answer.",
        [],
    ),
    (
        "request_s",
        "gen_ai_server_request_duration_seconds",
        "Time of a call; error_type is empty where it was answered.",
        ["error_type"],
    ),
    ("tokens", "gen_ai_client_token_usage", "Tokens of a call.", ["gen_ai_token_type"]),
)


def answer_families(runtimes: Sequence[ServeRuntime]) -> list[Metric]:
    """Figures of the answers of some models since this process began."""
    families: list[Metric] = []
    for name, metric, meaning, labels in _FAMILIES:
        family = HistogramMetricFamily(metric, meaning, labels=[*_COMMON, *labels])
        for runtime in runtimes[-MODELS_MOST:]:
            histogram: Histogram = getattr(runtime.figures, name)
            for sample in histogram.samples():
                buckets = [(_bound_text(bound), count) for bound, count in sample.buckets]
                job = runtime.job
                values = [job.request.model, job.job_id, *sample.labels]
                family.add_metric(values, buckets, sample.sum)
        families.append(family)
    return families


def _bound_text(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(float(bound))
