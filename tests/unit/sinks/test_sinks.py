"""What each sink wrote, read by its own library; a watch that broke off is watched again."""

import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hypergpu.errors import HyperGPUError
from hypergpu.user.client.values import JobEvent
from hypergpu.user.sinks.sink import named_sink
from tests.unit.sinks.conftest import Watch

LOSSES = [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
ACCURACIES = [(1, 0.0), (1, 0.25), (2, 0.5)]
SPENT = [(1, 6400.0), (2, 12_800.0), (3, 19_200.0)]
BREAK = 5
"""Events that the first watch sees."""


def test_tensorboard_reads_each_round_once(
    journal: list[JobEvent], watch: Watch, tmp_path: Path
) -> None:
    for events in (journal[:BREAK], journal, journal):
        watch(named_sink(f"tensorboard:{tmp_path}"), events)
    folder = tmp_path / "first-job-0123456789ab"
    assert len(list(folder.iterdir())) == 2  # nothing was left for the third
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()

    def points(tag: str) -> list[tuple[int, float]]:
        return [(each.step, each.value) for each in accumulator.Scalars(tag)]

    assert points("round/loss") == LOSSES
    assert points("evaluation/accuracy") == ACCURACIES
    assert points("pay/spent") == SPENT
    assert points("round/participants") == [(1, 2.0), (2, 2.0), (3, 2.0)]


def test_a_tensorboard_file_that_was_cut_goes_on_behind_its_last_whole_record(
    journal: list[JobEvent], watch: Watch, tmp_path: Path
) -> None:
    watch(named_sink(f"tensorboard:{tmp_path}"), journal[:BREAK])
    (path,) = (tmp_path / "first-job-0123456789ab").iterdir()
    path.write_bytes(path.read_bytes()[:-10])
    watch(named_sink(f"tensorboard:{tmp_path}"), journal)
    accumulator = EventAccumulator(str(path.parent))
    accumulator.Reload()
    assert [(each.step, each.value) for each in accumulator.Scalars("round/loss")] == LOSSES


def test_mlflow_reads_each_round_once(
    journal: list[JobEvent], watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Seconds of imports, which each of several pytest processes would pay as it collects tests.
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs all of MLflow
    uri = (tmp_path / "store").as_uri()
    for events in (journal[:BREAK], journal, journal):
        watch(named_sink(f"mlflow:{uri}"), events)
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("hypergpu")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert run.data.params["inner.learning_rate"] == "0.001"

    def points(key: str) -> list[tuple[int, float]]:
        metric_history = client.get_metric_history(run.info.run_id, key)
        return [(each.step, each.value) for each in metric_history]

    assert points("round/loss") == LOSSES
    assert points("evaluation/accuracy") == ACCURACIES
    assert points("pay/spent") == SPENT


def test_weights_and_biases_hold_each_round_once(
    journal: list[JobEvent], watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    for events in (journal[:BREAK], journal):
        watch(named_sink("wandb:trials"), events)
    wandb.teardown()
    rows = [
        row
        for path in sorted(tmp_path.glob("wandb/offline-run-*/run-job-0123456789ab.wandb"))
        for row in history(path)
    ]

    def points(key: str) -> list[tuple[int, float]]:
        return [(int(row["rounds"]), row[key]) for row in rows if key in row]

    assert points("round/loss") == LOSSES
    assert points("evaluation/accuracy") == ACCURACIES
    assert points("pay/spent") == SPENT


def history(path: Path) -> Iterator[dict[str, float]]:
    """Rows of a run that W&B wrote: records in blocks, as LevelDB has them."""
    from wandb.proto.wandb_internal_pb2 import Record

    for record_bytes in packed_records(path.read_bytes()):
        record = Record.FromString(record_bytes)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {
                "/".join(each.nested_key) or each.key: msgspec.json.decode(each.value_json)
                for each in items
            }


def packed_records(content: bytes) -> Iterator[bytes]:
    """Whole records: each part has a checksum, a length and its place among the parts."""
    block, header, at, parts = 32_768, 7, 7, b""
    while at + header <= len(content):
        if block - at % block < header:
            at += block - at % block
            continue
        _, length, place = struct.unpack_from("<IHB", content, at)
        parts += content[at + header : at + header + length]
        at += header + length
        if place in (1, 4):  # the whole, or the last part
            yield parts
            parts = b""


@pytest.mark.parametrize("text", ["tensorboard", "tensorboard:", "folder:runs", ""])
def test_a_text_that_names_no_sink_is_told_what_does(text: str) -> None:
    with pytest.raises(HyperGPUError) as failure:
        named_sink(text)
    assert failure.value.fix == "give tensorboard:FOLDER, wandb:PROJECT or mlflow:URI"
