"""Runs of MLflow, on a tracking server or in a database, by its URI."""

from typing import Any

from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

from hypergpu.user.client.values import JobDetail, JobView
from hypergpu.user.sinks.records import SinkRecord

_EXPERIMENT = "hypergpu"
_JOB_TAG = "hypergpu.job"
_SEQUENCE_TAG = "hypergpu.next_event"
_PARAMETER_CHARACTERS = 500
_STATES = {"failed": "FAILED", "finished": "FINISHED", "stopped": "KILLED"}


class MlflowSink:
    """A run of each job, which a second watch finds by its tag. Implements `Sink`."""

    def __init__(self, uri: str) -> None:
        self._client = MlflowClient(tracking_uri=uri)
        self._run_id = ""

    def open(self, job: JobDetail) -> int:
        """See `Sink`."""
        experiment = self._client.get_experiment_by_name(_EXPERIMENT)
        number = experiment.experiment_id if experiment else None
        number = number or self._client.create_experiment(_EXPERIMENT)
        runs = self._client.search_runs([number], f"tags.`{_JOB_TAG}` = '{job.job.id}'")
        if runs:
            self._run_id = runs[0].info.run_id
            return int(runs[0].data.tags.get(_SEQUENCE_TAG, 0))
        run = self._client.create_run(
            number, tags={_JOB_TAG: job.job.id}, run_name=job.job.name or job.job.id
        )
        self._run_id = run.info.run_id
        params = [Param(key, str(value)[:_PARAMETER_CHARACTERS]) for key, value in _flat(job.spec)]
        self._client.log_batch(self._run_id, params=params)
        return 0

    def record(self, record: SinkRecord) -> None:
        """See `Sink`."""
        metrics = [
            Metric(name, value, record.at_ms, record.round)
            for name, value in record.named_values().items()
        ]
        # Tag and metrics are one transaction where the store is a database.
        tags = [RunTag(_SEQUENCE_TAG, str(record.sequence + 1))]
        self._client.log_batch(self._run_id, metrics=metrics, tags=tags)

    def close(self, job: JobView) -> None:
        """See `Sink`."""
        if job.phase in _STATES:
            self._client.set_terminated(self._run_id, _STATES[job.phase])


def _flat(spec: dict[str, Any]) -> list[tuple[str, Any]]:
    """Settings under dotted names."""
    settings: list[tuple[str, Any]] = []
    for key, value in spec.items():
        if isinstance(value, dict):
            settings += [(f"{key}.{name}", each) for name, each in _flat(value)]
        else:
            settings.append((key, value))
    return settings
