"""A fine-tuning through two rings of two real nodes each: a node of one and the coordinator are
killed on the way, and the losses are those of one process all the same.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.ours.stages.several_rings import RingsInOneProcess, RingsRound
from hypergpu.journal.serving_events import (
    RingPlacedEvent,
    RingRoundStoredEvent,
    StageMovedEvent,
)
from hypergpu.rings.token_rows import write_rows
from hypergpu.serving.calls import AnswerToken, ModelCall, Sampling
from hypergpu.user.client.values import JobEvent
from hypergpu.user.serving.ring_file import read_ring_file
from hypergpu.user.serving.starting import wait_until_ready
from hypergpu.workloads.slices.rows import labelled_rows
from tests.integration.client.test_train_stages import SLOW, RingCluster, submit_file
from tests.processes import Cluster
from tests.tiny_bases import save_base

pytestmark = pytest.mark.full
LAYERS, STAGES, RINGS, ROUNDS = 4, 2, 2, 5
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

[outer]
learning_rate = 0.7
momentum = 0.5

[data]
path = "data"

[options]
rank = 4
sequence_length = 32

[stages]
count = {STAGES}
rings = {RINGS}
codec = "float32"
gradient_codec = "float32"
"""


@pytest.fixture(scope="module")
def rings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RingCluster]:
    """Five nodes, one of which stands by."""
    folder = tmp_path_factory.mktemp("rings")
    base = save_base(folder, num_hidden_layers=LAYERS, max_position_embeddings=256)
    rows_folder = folder / "data"
    rows_folder.mkdir()
    (rows_folder / "base").symlink_to(base)
    rows = [{"text": f"colour {number} is a colour that nobody named"} for number in range(20)]
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
            for number in range(RINGS * STAGES + 1)
        }
        yield RingCluster(job, folder / "job.toml", cluster, client, nodes)


def rounds_of_one_process(rings: RingCluster, folder: Path) -> list[RingsRound]:
    torch.set_num_threads(1)
    train, held_out = labelled_rows(rings.job.data, dict(rings.job.options))
    write_rows(train, folder / "rows")
    whole = AutoModelForCausalLM.from_pretrained(rings.job.data / "base", dtype=torch.float32)
    training = rings.job.training
    return RingsInOneProcess(whole, LAYERS, training, folder / "rows", held_out).run()


class RingsStory:
    """What the journal told of a training."""

    def __init__(self) -> None:
        self.second_ring = set[str]()
        """Nodes that held it first."""
        self.rounds = list[RingRoundStoredEvent]()
        self.is_moved = False
        """Whether layers went to another node after the first round."""

    def note(self, content: object) -> bool:
        """Take in an event; gives whether it is another round."""
        match content:
            case RingPlacedEvent(stages=stages, ring=1) if not self.rounds:
                self.second_ring = {stage.node for stage in stages}
            case RingPlacedEvent() | StageMovedEvent():
                self.is_moved = self.is_moved or bool(self.rounds)
            case RingRoundStoredEvent():
                self.rounds.append(content)
                return True
            case _:
                pass
        return False


def train_with_deaths(rings: RingCluster, job_id: str) -> list[RingRoundStoredEvent]:
    """Watch a training to its end; kill a node of the second ring after the first round, and the
    coordinator after the second one.
    """
    names = {each.id: each.name for each in rings.client.nodes()}
    story = RingsStory()
    for update in rings.client.watch(job_id):
        if not story.note(update.content if isinstance(update, JobEvent) else None):
            continue
        if len(story.rounds) == 1:
            rings.nodes[names[min(story.second_ring)]].kill()
        if len(story.rounds) == 2:
            rings.cluster.coordinator.kill()
            rings.cluster.coordinator.start()
        if len(story.rounds) == ROUNDS:
            assert story.is_moved
            return story.rounds
    raise AssertionError("the journal ended")


def test_two_rings_are_trained_through_two_deaths_with_the_losses_of_one_process_and_answer(
    rings: RingCluster, tmp_path: Path
) -> None:
    client = rings.client
    job_id = submit_file(rings)
    rounds = train_with_deaths(rings, job_id)
    plain_rounds = rounds_of_one_process(rings, tmp_path)
    figures = [(each.loss, each.held_out_loss, each.tokens) for each in rounds]
    assert figures == [(each.loss, each.held_out_loss, each.tokens) for each in plain_rounds]
    assert [[share.ring for share in each.shares] for each in rounds] == [[0, 1]] * ROUNDS
    assert {each.outer for each in rounds} == {"rate 0.7, momentum 0.5: as the job states"}
    assert figures[-1] < figures[0]
    wait_until_ready(client, job_id)
    assert client.job(job_id).job.reason.startswith(f"{STAGES} stages on nodes")
    call = ModelCall(text="colour", sampling=Sampling(temperature=0.0), new_tokens_most=8)
    parts = client.answer("taught", call)
    assert sum(isinstance(part, AnswerToken) for part in parts) == 8
    files = client.export(job_id, tmp_path / "export")
    assert files.loader.name == "adapter_config.json"
    client.stop(job_id)
