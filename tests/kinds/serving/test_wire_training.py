"""A real coordinator has two stages train, which compute in this process and say what a test wants
said.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.ours.stages.trained_ring import TrainedRing, random_rows, trained_stage
from benchmarks.ours.stages.virtual_training import StageTimes, VirtualTraining
from coordinator.core.rings.training_ring import RingPlan
from coordinator.shell.kinds.serving.training_batches import TrainingBatches
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.farm.base_files import BASE_INDEX
from hypergpu.farm.folder_index import FolderIndex, index_bytes
from hypergpu.journal.serving_events import ReplicaHandedBackEvent, RingRoundStoredEvent
from hypergpu.rings.layer_span import LayerSpan
from hypergpu.rings.ring_training import HELD_OUT_ROWS, TRAINING_ROWS, RingTraining
from hypergpu.rings.stage_work import STAGE_KIND, ModelCut, span_blobs
from hypergpu.rings.token_rows import write_rows
from hypergpu.serving.serve_request import STAGE_VERSION, ServeRequest
from hypergpu.serving.stage_messages import (
    JoinRing,
    StageReply,
    StageRequest,
    stage_message_parts,
)
from hypergpu.serving.training_messages import (
    Activations,
    Gradients,
    TrainingRequest,
)
from hypergpu.user.client import AsyncCoordinator
from hypergpu.work_units import WorkUnit
from tests.kinds.serving.test_wire_ring import CALL, WireStage
from tests.kinds.serving.wire_replica import WireReplica, first_model, open_user
from tests.node_client import NOBODY_LOST, WireNode
from tests.processes import Cluster
from tests.tiny_bases import tiny_config

LAYERS, WIDTH, VOCABULARY = 2, 32, 48
TRAINING = RingTraining(
    rounds=3,
    inner_steps=2,
    batch_rows=4,
    micro_rows=2,
    rank=4,
    learning_rate=1e-2,
    clip_norm=0.5,
    gradient_codec="float32",
)
Say = Callable[[WireStage, StageRequest, StageReply], StageReply]
"""What a stage says in place of what it computed."""
RoundLoss = tuple[float, float | None]
"""Mean loss of a round's tokens, and of those that are held out."""
HELD_OUT = 5


class TrainedWires(NamedTuple):
    """Two stages that train, and the model's user."""

    user: AsyncCoordinator
    job: str
    rows: Path

    async def losses(self) -> list[RoundLoss]:
        """Losses of all rounds, once they are stored."""
        losses = list[RoundLoss]()
        async for event in self.user.read_events(self.job):
            if isinstance(event.content, RingRoundStoredEvent):
                losses.append((event.content.loss, event.content.held_out_loss))
                if len(losses) == TRAINING.rounds:
                    return losses
        raise AssertionError("the journal ended")

    async def first_fault(self) -> str:
        """Why a node lost its layers first."""
        async for event in self.user.read_events(self.job):
            if isinstance(event.content, ReplicaHandedBackEvent):
                return event.content.reason
        raise AssertionError("the journal ended")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("training"), *NOBODY_LOST) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def whole() -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    config = tiny_config("llama", VOCABULARY, num_hidden_layers=LAYERS)
    return AutoModelForCausalLM.from_config(config)


async def train_as_told(
    stage: WireStage,
    whole: Any,
    say: Say,
    note: Callable[[StageReply], None],
    settings: RingTraining = TRAINING,
) -> None:
    """Hold the layers that the coordinator names, and compute what it asks, lease after lease."""

    def perform(request: TrainingRequest) -> StageReply:
        reply = training.perform(request)
        note(reply)
        return reply

    await stage.begin()
    training = trained_stage(whole, stage.span, settings)
    async for message in stage._wire._stream:
        if message.HasField("work_assignment"):
            stage._wire._work = message.work_assignment
            stage.say_ready()
            # As by another node: nothing of the lease before is there.
            training = trained_stage(whole, stage.span, settings)
        if message.HasField("work_call"):
            request = stage.request_of(message.work_call)
            if isinstance(request, JoinRing):
                stage.join(request)
            if isinstance(request, TrainingRequest):
                bodies = stage_message_parts(
                    say(stage, request, stage.link.perform(request, perform))
                )
                for place, body in enumerate(bodies):
                    is_last = place == len(bodies) - 1
                    stage._wire.say_bytes(message.work_call.call, body, is_last=is_last)


@asynccontextmanager
async def trained_wires(
    cluster: Cluster,
    folder: Path,
    whole: Any,
    say: Say,
    note: Callable[[StageReply], None] = lambda _: None,
    *,
    training: RingTraining = TRAINING,
    node_count: int = 2,
    signs_counts: bool = False,
) -> AsyncIterator[TrainedWires]:
    coordinator = cluster.coordinator
    addresses = (coordinator.address, coordinator.node_address)
    nodes = [WireNode(*addresses) for _ in range(node_count)]
    (folder / "blob").write_bytes(b"nobody reads it")
    write_rows(random_rows(10, VOCABULARY), folder / "rows")
    settings = {"config.json": whole.config.to_json_string().encode()}
    (folder / "index").write_bytes(index_bytes(FolderIndex(small_files=settings, large_files={})))
    write_rows(random_rows(10 + HELD_OUT, VOCABULARY)[10:], folder / "held-out")
    paths = [folder / name for name in ("blob", "index", "rows", "held-out")]
    async with open_user(cluster) as user:
        blob, index, rows, held_out = await user.send_blobs(paths, step="sending")
        files = dict.fromkeys(span_blobs(LayerSpan(0, LAYERS), LAYERS), blob) | {BASE_INDEX: index}
        cut = ModelCut(layers=LAYERS, hidden_size=WIDTH, layer_bytes=1, end_bytes=1, stages=2)
        request = ServeRequest(
            model="cut",
            files={**files, TRAINING_ROWS: rows, HELD_OUT_ROWS: held_out},
            engine=STAGE_KIND,
            cut=cut,
            training=training,
            unit=WorkUnit.LAYER_TOKENS if signs_counts else WorkUnit.TOKENS,
        )
        job = await user.create_serve(request)
        async with asyncio.TaskGroup() as group:
            tasks = []
            for node in nodes:
                await node.join(coordinator.node_token())
                node.signs_counts = signs_counts
                wire = WireReplica(node, node.control([(STAGE_KIND, STAGE_VERSION)]))
                work = train_as_told(WireStage(wire), whole, say, note, training)
                tasks.append(group.create_task(work))
            yield TrainedWires(user, job, folder / "rows")
            await user.stop(job)
            for task in tasks:
                task.cancel()
    for node in nodes:
        await node.close()


def ring_of_one_process(whole: Any, rows: Path) -> TrainedRing:
    """The same training where one process has all layers."""
    batches = TrainingBatches(rows, TRAINING)
    held_out = random_rows(10 + HELD_OUT, VOCABULARY)[10:]
    alone = TrainedRing(whole, (0, LAYERS), TRAINING, batches.rows_of, held_out=held_out)
    plan = RingPlan(TRAINING.steps, TRAINING.micro_batches, TRAINING.inner_steps, 0.5, 3)
    VirtualTraining(plan, [StageTimes(1.0, 1.0, 0.0)], 1, alone).run()
    return alone


def losses_of_one_process(whole: Any, rows: Path) -> list[RoundLoss]:
    """Losses of each of its rounds."""
    alone, batches = ring_of_one_process(whole, rows), TrainingBatches(rows, TRAINING)
    rounds = list[RoundLoss]()
    for number in range(TRAINING.rounds):
        steps = range(number * TRAINING.inner_steps, (number + 1) * TRAINING.inner_steps)
        token_count = sum(batches.step_totals(step).counted_tokens for step in steps)
        loss = sum(alone.loss_sums[step] for step in steps) / token_count
        held_out_count = sum(row.counted_tokens for row in alone._held_out)
        rounds.append((loss, alone.held_out_sums[steps.stop] / held_out_count))
    return rounds


async def test_a_stage_that_is_lost_on_the_way_changes_no_bit_and_the_ring_then_answers(
    cluster: Cluster, tmp_path: Path, whole: Any
) -> None:
    forward_count = 0

    def say(stage: WireStage, _: StageRequest, reply: StageReply) -> StageReply:
        nonlocal forward_count
        if isinstance(reply, Gradients) and stage.span.end == LAYERS:
            forward_count += 1
            # In the middle of the second step of the second round.
            if forward_count == 3 * TRAINING.micro_batches + 1:
                return replace(reply, states=reply.states + b"-")
        return reply

    async with trained_wires(cluster, tmp_path, whole, say) as wires:
        with pytest.raises(HyperGPUError) as refusal:
            _ = [part async for part in wires.user.answer("cut", CALL)]
        assert refusal.value.reason is Reason.NOT_READY
        assert "once its ring has trained it" in refusal.value.message
        losses = await wires.losses()
        assert (await wires.user.job(wires.job)).job.loss == losses[-1][1]
        expected_losses = await asyncio.to_thread(losses_of_one_process, whole, wires.rows)
        assert losses == expected_losses
        assert "sealed bytes of gradients, not" in await wires.first_fault()
        await first_model(wires.user, lambda model: model.ready_replicas)


class Tampering:
    """Says once in place of a frame something that a relay could have put there.

    Args:
        wrong: Makes it of the frames of a kind that were given before, and the newest one.
        kind: Frames that are meant.
    """

    def __init__(
        self, wrong: Callable[[list[bytes]], bytes], kind: type[Activations] | type[Gradients]
    ) -> None:
        self._wrong = wrong
        self._kind = kind
        self._frames = list[bytes]()
        self._is_done = False

    def say(self, _: WireStage, __: StageRequest, reply: StageReply) -> StageReply:
        if not isinstance(reply, self._kind) or not reply.states:
            return reply
        self._frames.append(reply.states)
        # In the second step.
        if self._is_done or len(self._frames) <= TRAINING.micro_batches:
            return reply
        self._is_done = True
        return replace(reply, states=self._wrong(self._frames))


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda frames: bytes([*frames[-1][:-1], frames[-1][-1] ^ 1]), "not sealed for this"),
        (lambda frames: frames[0], "came before, or after a later one"),
    ],
    ids=["changed", "repeated"],
)
@pytest.mark.parametrize("kind", [Activations, Gradients])
async def test_a_frame_of_a_training_that_does_not_open_costs_its_sender_the_layers_and_no_bit(
    cluster: Cluster,
    tmp_path: Path,
    whole: Any,
    wrong: Callable[[list[bytes]], bytes],
    reason: str,
    kind: type[Activations] | type[Gradients],
) -> None:
    tamper = Tampering(wrong, kind)
    async with trained_wires(cluster, tmp_path, whole, tamper.say) as wires:
        losses = await wires.losses()
        assert losses == await asyncio.to_thread(losses_of_one_process, whole, wires.rows)
        fault = await wires.first_fault()
        side = "before" if kind is Activations else "behind"
        assert fault.startswith(f"the stage beside it says: what came from the stage {side}: ")
        assert reason in fault


async def test_the_relay_of_a_training_sees_no_activation_and_no_gradient(
    cluster: Cluster, tmp_path: Path, whole: Any
) -> None:
    seen_bodies, plain_rows = list[bytes](), list[bytes]()

    def say(stage: WireStage, _: StageRequest, reply: StageReply) -> StageReply:
        seen_bodies.append(stage.body)
        return reply

    def note(reply: StageReply) -> None:
        if isinstance(reply, Activations | Gradients) and reply.states:
            plain_rows.append(reply.states)

    async with trained_wires(cluster, tmp_path, whole, say, note) as wires:
        await wires.losses()
    evaluation_count = 3 * TRAINING.rounds
    assert len(plain_rows) == 2 * TRAINING.steps * TRAINING.micro_batches + evaluation_count
    assert not any(rows[:16] in body for rows in plain_rows for body in seen_bodies)


async def test_its_owner_alone_exports_what_the_ring_trained_and_as_often_as_they_like(
    cluster: Cluster, tmp_path: Path, whole: Any
) -> None:
    out = tmp_path / "out"
    async with trained_wires(cluster, tmp_path, whole, lambda *told: told[-1]) as wires:
        with pytest.raises(HyperGPUError, match=r"no round of .* is stored yet"):
            await wires.user.export(wires.job, out)
        await wires.losses()
        await wires.user.export(wires.job, out)
        files = await wires.user.export(wires.job, out)
        with pytest.raises(HyperGPUError, match="newest round alone"):
            await wires.user.export(wires.job, out, which="best")
        (out / "README.md").write_text("notes of somebody")
        with pytest.raises(HyperGPUError) as refusal:
            await wires.user.export(wires.job, out)
        assert refusal.value.reason is Reason.FILE_PRESENT
        async with open_user(cluster) as stranger:
            with pytest.raises(HyperGPUError) as refusal:
                await stranger.export(wires.job, tmp_path / "stolen")
            assert refusal.value.reason is Reason.ROLE_FORBIDDEN
        assert sorted(path.name for path in out.iterdir()) == [
            "README.md",
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        alone = await asyncio.to_thread(ring_of_one_process, whole, wires.rows)
    exported_values = load_file(files.model)
    trained_values = {
        name.replace(".default.", "."): value for name, value in alone.values().items()
    }
    assert trained_values.keys() < exported_values.keys()
    assert all(torch.equal(exported_values[name], each) for name, each in trained_values.items())


async def test_a_loss_that_is_not_finite_pauses_the_job_with_its_step(
    cluster: Cluster, tmp_path: Path, whole: Any
) -> None:
    def say(_: WireStage, __: StageRequest, reply: StageReply) -> StageReply:
        return replace(reply, loss=float("nan")) if isinstance(reply, Gradients) else reply

    async with trained_wires(cluster, tmp_path, whole, say) as wires:
        model = await first_model(wires.user, lambda model: model.phase == "paused")
        assert "not finite in step 1. Fix: stop it" in model.reason
