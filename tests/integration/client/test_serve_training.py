"""Models of trainings, served while they train and afterwards: base and adapter travel apart."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import torch
import transformers

import hypergpu
from hypergpu.errors import HyperGPUError
from hypergpu.ids import JobId
from hypergpu.serving.calls import AnswerToken, ModelCall, Sampling
from hypergpu.serving.tuned_model import TuningSource
from hypergpu.user.client import Coordinator, connect
from hypergpu.user.client.models import AnswerRoute, ServedModelView
from hypergpu.user.serving.model import ServedModel
from hypergpu.user.serving.starting import ServeOrder, model_named, start_tuned, wait_until_ready
from hypergpu.user.training.finetune import AdapterRun
from hypergpu.wire.credentials import Role
from tests.integration.dashboard.test_live import page_beside
from tests.polling import first_true
from tests.processes import Cluster
from tests.tiny_bases import save_base

ROWS = [{"prompt": f"{n} and", "completion": f" {n + 1}"} for n in range(40)]
PROMPT = "number 7 comes"
CALL = ModelCall(text=PROMPT, sampling=Sampling(temperature=0.0), new_tokens_most=12)
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # peft reads it


class Trained(NamedTuple):
    """A fine-tuning that goes on for ever, and whom it is served by."""

    cluster: Cluster
    coordinator: Coordinator
    run: AdapterRun
    base: Path


@pytest.fixture(scope="module")
def training_case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("follow")
    base = save_base(folder)
    (folder / "cluster").mkdir()
    with Cluster(folder / "cluster", is_plaintext=False) as cluster:
        cluster.add_nodes(1, "torch", kinds=("training",))
        cluster.add_nodes(1, "torch", kinds=("serve",))
        with cluster.client() as coordinator:
            run = hypergpu.finetune(
                base,
                data=ROWS,
                coordinator=coordinator,
                steps=100_000,
                inner_steps=4,
                learning_rate=0.02,
                options={"sequence_length": 32, "packing": False},
            )
            first_true(lambda: coordinator.job(run.id).job.round)
            yield Trained(cluster, coordinator, run, base)


def view_of(coordinator: Coordinator, model: ServedModel) -> ServedModelView:
    return model_named(coordinator, model.job)


def answer_of(coordinator: Coordinator, job: str) -> tuple[list[int], int]:
    """Tokens of an answer, and the round of the model that gave all of them."""
    tokens: list[int] = []
    rounds: list[int] = []
    for part in coordinator.answer(job, CALL):
        if isinstance(part, AnswerRoute):
            rounds.append(int(part.fingerprint.rpartition("-r")[2]))
        elif isinstance(part, AnswerToken):
            tokens.append(part.token)
    (version,) = rounds
    return tokens, version


def newest_model(training_case: Trained, folder: Path) -> tuple[int, list[int]]:
    """Rounds of a paused training's newest model, and tokens of transformers alone of what an
    export merges of it. A round whose updates were in is still folded after the pause.
    """
    while True:
        target = Path(tempfile.mkdtemp(dir=folder))
        job = training_case.coordinator.job(training_case.run.id).job
        if training_case.run.save(target).digest == job.model:
            return job.round, plain_tokens(target / "merged")


def plain_tokens(folder: Path) -> list[int]:
    """Tokens of transformers alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    count = inputs["input_ids"].shape[1]
    tokens: list[int] = output[0, count:].tolist()
    return [token for token in tokens if token != tokenizer.eos_token_id]


def pause_and_wait(training_case: Trained) -> None:
    training_case.run.pause()
    first_true(lambda: training_case.coordinator.job(training_case.run.id).job.phase == "paused")


def test_a_served_model_follows_its_training_round_by_round(
    training_case: Trained, tmp_path: Path
) -> None:
    coordinator, run = training_case.coordinator, training_case.run
    model = hypergpu.serve(run, coordinator=coordinator, name="live", follow=True)
    versions: list[int] = []
    while len({*versions}) < 3:
        published_rounds = view_of(coordinator, model).rounds
        versions.append(answer_of(coordinator, model.job)[1])
        assert versions[-1] >= published_rounds - 1
    assert versions == sorted(versions)
    pause_and_wait(training_case)
    newest, merged_tokens = newest_model(training_case, tmp_path)
    while (answer := answer_of(coordinator, model.job))[1] != newest:
        newest, merged_tokens = newest_model(training_case, tmp_path)
    assert answer == (merged_tokens, newest)
    assert view_of(coordinator, model).training == run.id
    run.resume()
    model.stop()


def test_a_training_of_another_user_is_not_served(training_case: Trained) -> None:
    coordinator, run = training_case.coordinator, training_case.run
    token = coordinator.create_token(Role.USER, ttl_s=600).token
    source = TuningSource(job=JobId(run.id))
    with connect(coordinator.target.address, token=token) as stranger:
        with pytest.raises(HyperGPUError, match="there is no training"):
            start_tuned(stranger, source, ServeOrder(""))
        unknown_source = TuningSource(job=JobId("job-000000000000"))
        with pytest.raises(HyperGPUError, match="there is no training"):
            start_tuned(stranger, unknown_source, ServeOrder(""))


@pytest.mark.full
def test_a_model_goes_on_to_follow_once_its_coordinator_was_killed(training_case: Trained) -> None:
    coordinator, run = training_case.coordinator, training_case.run
    model = hypergpu.serve(run, coordinator=coordinator, name="killed", follow=True)
    newest = answer_of(coordinator, model.job)[1]
    training_case.cluster.coordinator.kill()
    training_case.cluster.coordinator.start()
    first_true(lambda: view_of(coordinator, model).ready_replicas)
    while answer_of(coordinator, model.job)[1] <= newest:
        pass
    model.stop()


def test_a_model_of_a_kept_round_stays_as_it_is_and_is_unloaded_when_nobody_calls(
    training_case: Trained, tmp_path: Path
) -> None:
    coordinator, run = training_case.coordinator, training_case.run
    pause_and_wait(training_case)
    newest, merged_tokens = newest_model(training_case, tmp_path)
    with pytest.raises(HyperGPUError, match="keeps no model after 100000 rounds"):
        hypergpu.serve(run, coordinator=coordinator, round=100_000)
    model = hypergpu.serve(
        run, coordinator=coordinator, round=newest, name="kept", idle_minutes=0.02
    )
    tokens, version = answer_of(coordinator, model.job)
    assert (tokens, version) == (merged_tokens, newest)
    first_true(lambda: view_of(coordinator, model).is_unloaded)
    view = view_of(coordinator, model)
    assert view.reason == "nobody called for 1 second: the next call loads it again"
    assert view.ready_replicas == 0
    assert answer_of(coordinator, model.job) == (tokens, newest)
    assert not view_of(coordinator, model).is_unloaded
    model.stop()


def test_the_base_of_a_training_is_served_from_its_page(training_case: Trained) -> None:
    coordinator, run = training_case.coordinator, training_case.run
    token = coordinator.create_token(Role.OPERATOR, ttl_s=600).token
    headers = {"authorization": f"Bearer {token}"}
    with (
        page_beside(training_case.cluster) as origin,
        httpx.Client(base_url=f"{origin}/api/v1", headers=headers, trust_env=False) as page,
    ):
        refusal = page.post(f"/jobs/{run.id}/serve", json={"round": 100_000})
        assert "keeps no model after 100000 rounds" in refusal.text
        job = page.post(f"/jobs/{run.id}/serve", json={"which": "base"}).json()["job"]
        wait_until_ready(coordinator, job)
        tokens, version = answer_of(coordinator, job)
        assert page.get(f"/jobs/{job}/served").json()["stages"] == []
        assert page.get(f"/jobs/{run.id}/served").status_code == 404
    assert version == 0
    assert tokens == plain_tokens(training_case.base)
    coordinator.stop(job)
