"""`hypergpu.train` against a real coordinator and torch nodes, as a notebook uses it."""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hypergpu
from hypergpu.user.client import (
    AsyncCoordinator,
    Coordinator,
    ExportedModel,
    HyperGPUError,
    JobDetail,
    JobView,
)
from hypergpu.user.client.connection import ConnectionTarget
from hypergpu.user.sinks.records import SinkRecord
from hypergpu.wire.credentials import parse_token
from hypergpu.workloads.digits import digits
from tests.processes import Cluster

SETTINGS = {"strategy": "diloco", "codec.up": "int8", "trust.duplicates": "none"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A coordinator with two nodes."""
    with Cluster(tmp_path_factory.mktemp("train"), is_plaintext=False) as cluster:
        cluster.add_nodes(2, "torch")
        yield cluster


@pytest.fixture(scope="module")
def coordinator(cluster: Cluster) -> Iterator[Coordinator]:
    """A connection to it."""
    with cluster.coordinator.client() as client:
        yield client


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(batch["image"])
    hits = (logits.argmax(1) == batch["digit"]).float().mean()
    surest = logits.softmax(1).max(1).values.mean()
    return F.cross_entropy(logits, batch["digit"]), {"accuracy": hits, "sureness": surest}


class ListSink:
    """A sink of one's own."""

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.evaluated: set[str] = set()

    def open(self, job: JobDetail) -> int:
        return 0

    def record(self, record: SinkRecord) -> None:
        if record.kind == "round":
            self.rounds.append(record.round)
        else:
            self.evaluated |= record.values.keys()

    def close(self, job: JobView) -> None:
        assert job.phase == "finished"


def assert_loaded_by_its_users_code(saved: ExportedModel) -> None:
    """Card and loader of an export say how its user's code loads it."""
    card = saved.card.read_text("utf-8")
    assert 'model.load_state_dict(load_file("model.safetensors"), strict=False)' in card
    assert "python load.py" not in card
    load = [sys.executable, str(saved.loader)]
    process = subprocess.run(load, check=False, capture_output=True, text=True)
    assert "loaded a program of " in process.stdout


def test_a_model_of_ones_own_trains_on_nodes_that_have_no_code_of_it(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    train, test, _ = digits()
    parts = [
        {"image": part.batch(slice(None))[0], "digit": part.labels}  # type: ignore[arg-type]
        for part in (train, test)
    ]
    curves = ListSink()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    run = hypergpu.train(
        model,
        loss=loss,
        data=parts[0],
        held_out=parts[1],
        coordinator=coordinator,
        name="own",
        nodes=2,
        steps=120,
        learning_rate=0.005,
        settings=SETTINGS,
        sinks=[curves],
    )
    job = run.result().job
    assert curves.rounds == [1, 2, 3, 4, 5, 6]
    assert curves.evaluated == {"loss", "accuracy", "sureness"}
    assert (job.phase, job.metric_name, job.rounds) == ("finished", "accuracy", 6)
    assert (job.metric or 0) > 0.85
    history = run.history()
    assert (len(history.rounds), history.evaluations[-1].metric) == (6, job.metric)
    newest = history.frame().iloc[-1]
    assert (newest["accuracy"], newest["sureness"]) == (job.metric, job.metrics["sureness"])
    model.load_state_dict(run.state_dict())
    model.eval()
    with torch.no_grad():
        held_out = {name: torch.from_numpy(each) for name, each in parts[1].items()}
        value, metrics = loss(model, held_out)
    job_metrics = {"accuracy": job.metric, **job.metrics}
    assert {name: float(each) for name, each in metrics.items()} == pytest.approx(
        job_metrics, rel=1e-4
    )
    assert float(value) == pytest.approx(job.loss, rel=1e-4)
    assert_loaded_by_its_users_code(run.save(tmp_path / "model"))
    assert repr(hypergpu.Run.find("own", coordinator)) == f"<Run {run.id}: finished, round 6 of 6>"
    longer = hypergpu.Run.find(coordinator.continue_job(run.id, 1, name="on"), coordinator).result()
    assert (longer.job.phase, longer.job.rounds) == ("finished", 1)
    assert longer.job.loss == pytest.approx(job.loss, abs=0.2)


async def test_a_program_with_an_event_loop_trains_skewed_classes(cluster: Cluster) -> None:
    train, _, _ = digits()
    images = {"image": train.batch(slice(None))[0], "digit": train.labels}  # type: ignore[arg-type]
    token = parse_token((cluster.coordinator.data_dir / "operator.token").read_text("utf-8"))
    model = nn.Linear(64, 10)
    async with await AsyncCoordinator.open(
        ConnectionTarget(cluster.coordinator.address, token, 60.0)
    ) as connection:
        run = await hypergpu.train_async(
            model,
            loss=loss,
            data=images,
            coordinator=connection,
            nodes=2,
            rounds=1,
            inner_steps=2,
            settings={"data.sharding": "dirichlet", "data.alpha": 0.1},
        )
        assert (await run.result()).job.phase == "finished"
        state = await run.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert not torch.equal(state["weight"], model.weight)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"steps": 10, "rounds": 3}, "steps and rounds are both given"),
        ({"batchsize": 3}, "train takes no batchsize"),
        ({"learning_rate": -1.0}, r"\[inner\] learning_rate: -1.0 is outside"),
        ({"settings": {"codec.up": "int3"}}, 'did you mean "int8"'),
    ],
)
def test_wrong_settings_are_told_before_anything_is_sent(
    settings: dict[str, object], said: str
) -> None:
    with pytest.raises(HyperGPUError, match=said):
        hypergpu.train(nn.Linear(2, 2), loss=loss, data={}, **settings)  # type: ignore[arg-type]


def test_data_without_a_known_form_are_told_before_anything_is_sent(
    coordinator: Coordinator,
) -> None:
    with pytest.raises(HyperGPUError) as failure:
        hypergpu.train(nn.Linear(2, 2), loss=loss, data=7, coordinator=coordinator)
    assert failure.value.detail == "data: data of type int"
    assert failure.value.fix.startswith("give a dictionary")
