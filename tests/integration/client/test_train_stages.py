"""A fine-tuning through a ring: three real nodes hold the base, one of them and the coordinator are
killed on the way, the ring answers with what it learnt, and peft loads that.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from benchmarks.ours.stages.trained_ring import TrainedRing
from benchmarks.ours.stages.virtual_training import StageTimes, VirtualTraining
from coordinator.core.rings.training_ring import RingPlan
from coordinator.shell.kinds.serving.training_batches import TrainingBatches
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.journal.serving_events import (
    RingPlacedEvent,
    RingRoundStoredEvent,
    StageMovedEvent,
)
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.token_rows import write_rows
from hypergpu.serving.calls import AnswerToken, ModelCall, Sampling
from hypergpu.user.cli.main import app
from hypergpu.user.client import Coordinator
from hypergpu.user.client.values import JobEvent, Submitted
from hypergpu.user.serving.ring_file import RingJob, read_ring_file
from hypergpu.user.serving.ring_model import finetune_ring
from hypergpu.user.serving.starting import wait_until_ready
from hypergpu.workloads.slices.rows import labelled_rows
from tests.processes import Cluster, NodeProcess
from tests.tiny_bases import save_base

pytestmark = pytest.mark.full
LAYERS, STAGES, ROUNDS = 6, 3, 6
FILE = f"""
workload = "hf-causal-lm"
name = "taught"

[training]
rounds = {ROUNDS}
inner_steps = 3
batch_size = 4

[inner]
learning_rate = 0.02
micro_batch = 1
clip_norm = 1.0

[data]
path = "data"

[options]
rank = 4
sequence_length = 32

[stages]
count = {STAGES}
codec = "float32"
gradient_codec = "float32"
"""
SLOW = {"HYPERGPU_NODE_WORKER_STEP_FLOOR_MS": "10"}


class RingCluster(NamedTuple):
    """Four nodes, one of which has no stage."""

    job: RingJob
    file: Path
    cluster: Cluster
    client: Coordinator
    nodes: dict[str, NodeProcess]
    """By their names."""


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RingCluster]:
    folder = tmp_path_factory.mktemp("training")
    base = save_base(folder, num_hidden_layers=LAYERS, max_position_embeddings=256)
    rows_folder = folder / "data"
    rows_folder.mkdir()
    (rows_folder / "base").symlink_to(base)
    rows = [{"text": f"colour {number} is a colour that nobody named"} for number in range(12)]
    (rows_folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "job.toml").write_text(FILE)
    job = read_ring_file(folder / "job.toml")
    assert job is not None
    (folder / "cluster").mkdir()
    with Cluster(folder / "cluster", is_plaintext=False) as cluster, cluster.client() as client:
        nodes = {
            f"node-{number}": cluster.add_nodes(
                1,
                "torch",
                kinds=("training", "serve"),
                settings={**SLOW, "HYPERGPU_NODE_NAME": f"node-{number}"},
            )[0]
            for number in range(STAGES + 1)
        }
        yield RingCluster(job, folder / "job.toml", cluster, client, nodes)


def losses_of_one_process(ring: RingCluster, folder: Path) -> list[tuple[float, float]]:
    """Mean losses of each round, and of held-out rows, where one process has all layers."""
    torch.set_num_threads(1)
    train, held_out = labelled_rows(ring.job.data, dict(ring.job.options))
    write_rows(train, folder / "rows")
    training = ring.job.training
    batches = TrainingBatches(folder / "rows", training)
    whole = AutoModelForCausalLM.from_pretrained(ring.job.data / "base", dtype=torch.float32)
    alone = TrainedRing(whole, (0, LAYERS), training, batches.rows_of, held_out=held_out)
    plan = RingPlan(
        *(training.steps, training.micro_batches, training.inner_steps, training.clip_norm),
        held_out_batches=len(held_out),
    )
    VirtualTraining(plan, [StageTimes(1.0, 1.0, 0.0)], 1, alone).run()
    rounds, held_out_count = [], sum(row.counted_tokens for row in held_out)
    for number in range(ROUNDS):
        steps = range(number * training.inner_steps, (number + 1) * training.inner_steps)
        token_count = sum(batches.step_totals(step).counted_tokens for step in steps)
        loss = sum(alone.loss_sums[step] for step in steps) / token_count
        rounds.append((loss, alone.held_out_sums[steps.stop] / held_out_count))
    return rounds


def submit_file(ring: RingCluster) -> str:
    """The job that `hypergpu job submit` creates of the file."""
    ready = ring.cluster.coordinator._ready
    assert ready is not None
    words = ["job", "submit", str(ring.file), "--json", "--address", ready.address]
    result = CliRunner().invoke(app, [*words, "--token-file", ready.operator_token_file])
    assert result.exit_code == 0, result.output
    return msgspec.json.decode(result.stdout, type=Submitted).job


class WatchedTraining(NamedTuple):
    """What the journal told of a training."""

    losses: list[tuple[float, float | None]]
    """Losses of each round's rows, and of those that are held out."""
    holders: dict[LayerSpan, str]
    """Nodes that hold the stages at its end."""
    victim: str
    """The node that was killed."""


def watch_with_deaths(ring: RingCluster, job_id: str) -> WatchedTraining:
    """Watch a training to its end; kill a node after its first round, and the coordinator after its
    second one.
    """
    names = {each.id: each.name for each in ring.client.nodes()}
    losses, holders, victim = list[tuple[float, float | None]](), dict[LayerSpan, str](), ""
    for update in ring.client.watch(job_id):
        content = update.content if isinstance(update, JobEvent) else None
        if isinstance(content, RingPlacedEvent):
            holders.update({stage.span: stage.node for stage in content.stages})
        if isinstance(content, StageMovedEvent):
            spans = [span for span, node in holders.items() if node == content.node]
            holders |= dict.fromkeys(spans, content.to)
        if isinstance(content, RingRoundStoredEvent):
            losses.append((content.loss, content.held_out_loss))
            if len(losses) == 1:
                victim = holders[sorted(holders)[1]]
                ring.nodes[names[victim]].kill()
            if len(losses) == 2:
                ring.cluster.coordinator.kill()
                ring.cluster.coordinator.start()
            if len(losses) == ROUNDS:
                return WatchedTraining(losses, holders, victim)
    raise AssertionError("the journal ended")


def test_a_ring_is_trained_through_two_deaths_with_the_losses_of_one_process_and_answers(
    ring: RingCluster, tmp_path: Path
) -> None:
    client = ring.client
    job_id = submit_file(ring)
    with pytest.raises(HyperGPUError) as refusal:
        [*client.answer("taught", ModelCall(text="colour", new_tokens_most=1))]
    assert refusal.value.reason is Reason.NOT_READY
    assert "once its ring has trained it" in refusal.value.message
    training = watch_with_deaths(ring, job_id)
    assert training.victim not in training.holders.values()
    assert training.losses == losses_of_one_process(ring, tmp_path)
    assert training.losses[-1] < training.losses[0]
    wait_until_ready(client, job_id)
    assert client.job(job_id).job.reason.startswith(f"{STAGES} stages on nodes, fine-tuned in")
    call = ModelCall(text="colour", sampling=Sampling(temperature=0.0), new_tokens_most=8)
    parts = client.answer("taught", call)
    assert sum(isinstance(part, AnswerToken) for part in parts) == 8
    files = client.export(job_id, tmp_path / "export")
    assert files.loader.name == "adapter_config.json"
    assert client.job(job_id).job.loss == training.losses[-1][1]
    client.stop(job_id)


def test_python_submits_the_same_and_answers_only_once_it_is_trained(ring: RingCluster) -> None:
    model = finetune_ring(
        ring.job.data / "base",
        data=[{"text": "colour"}] * 4,
        stages=STAGES,
        coordinator=ring.client,
        name="again",
        rounds=1,
        inner_steps=1,
        batch_size=2,
        options={"sequence_length": 32},
        settings={"inner.optimizer": "adamw"},
    )
    with pytest.raises(HyperGPUError, match="once its ring has trained it"):
        model.generate("colour", new_tokens_most=1)
    model.stop()
