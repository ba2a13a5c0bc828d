"""A real coordinator has two rings of two stages train, which compute in this process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.ours.stages.several_rings import RingsInOneProcess, RingsRound, values_of
from benchmarks.ours.stages.trained_ring import random_rows
from hypergpu.journal.serving_events import (
    RingPlacedEvent,
    RingRoundStoredEvent,
    RingUnplacedEvent,
    WindowCountedEvent,
)
from hypergpu.rings.ring_training import RingTraining
from hypergpu.serving.stage_messages import StageReply, StageRequest
from hypergpu.serving.training_messages import AdapterKept, Gradients
from tests.kinds.serving.test_wire_ring import WireStage
from tests.kinds.serving.test_wire_training import (
    HELD_OUT,
    LAYERS,
    TRAINING,
    VOCABULARY,
    TrainedWires,
    trained_wires,
)
from tests.node_client import NOBODY_LOST
from tests.processes import Cluster
from tests.tiny_bases import tiny_config

RINGS = replace(TRAINING, rings=2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("rings"), *NOBODY_LOST) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def whole() -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    config = tiny_config("llama", VOCABULARY, num_hidden_layers=LAYERS)
    return AutoModelForCausalLM.from_config(config)


def honest(_: WireStage, __: StageRequest, reply: StageReply) -> StageReply:
    return reply


def rounds_of_one_process(
    whole: Any, rows: Path, training: RingTraining, taking: tuple[int, ...] = (0, 1)
) -> list[RingsRound]:
    held_out = random_rows(10 + HELD_OUT, VOCABULARY)[10:]
    return RingsInOneProcess(whole, LAYERS, training, rows, held_out).run(taking)


async def rounds_of_rings(wires: TrainedWires) -> list[RingRoundStoredEvent]:
    rounds = list[RingRoundStoredEvent]()
    async for event in wires.user.read_events(wires.job):
        if isinstance(event.content, RingRoundStoredEvent):
            rounds.append(event.content)
            if len(rounds) == TRAINING.rounds:
                return rounds
    raise AssertionError("the journal ended")


async def test_two_rings_give_the_bits_of_one_process_and_the_first_one_answers(
    cluster: Cluster, tmp_path: Path, whole: Any
) -> None:
    loss_count = 0

    def say(stage: WireStage, _: StageRequest, reply: StageReply) -> StageReply:
        nonlocal loss_count
        if isinstance(reply, Gradients) and stage.span.end == LAYERS:
            loss_count += 1
            # Within the second round one ring loses a stage, and begins the round again.
            if loss_count == 2 * 2 * TRAINING.inner_steps + 1:
                return replace(reply, states=reply.states + b"-")
        return reply

    async with trained_wires(cluster, tmp_path, whole, say, training=RINGS, node_count=4) as wires:
        rounds = await rounds_of_rings(wires)
        assert [[share.ring for share in each.shares] for each in rounds] == [[0, 1]] * 3
        assert rounds[0].outer == "rate 1, momentum 0: momentum 0.00 after 0 rounds"
        assert rounds[2].outer.endswith("momentum 0.15 after 2 rounds")
        assert "sealed bytes of gradients, not" in await wires.first_fault()
        while not (model := (await wires.user.models())[0]).ready_replicas:
            pass
        assert [(each.first_layer, each.end_layer) for each in model.stages] == [(0, 1), (1, 2)]
        assert model.reason.startswith("2 stages on nodes")
        assert "fine-tuned in 3 rounds, loss" in model.reason
        files = await wires.user.export(wires.job, tmp_path / "out")
    plain_rounds = rounds_of_one_process(whole, wires.rows, RINGS)
    figures = [(each.loss, each.held_out_loss, each.tokens) for each in rounds]
    assert figures == [(each.loss, each.held_out_loss, each.tokens) for each in plain_rounds]
    exported_values = load_file(files.model)
    trained_values = torch.cat(
        [exported_values[name].flatten() for name in exported_values if "lora_B" in name]
    )
    values = [torch.from_numpy(values_of(each).copy()) for each in plain_rounds[-1].layers.values()]
    assert torch.equal(trained_values.sort().values, torch.cat(values).sort().values)


async def test_each_ring_is_counted_for_what_its_stages_trained(
    cluster: Cluster, tmp_path: Path, whole: Any
) -> None:
    rings, tokens = dict[str, int](), {0: 0, 1: 0}
    counts = list[tuple[str, int]]()
    async with trained_wires(
        cluster, tmp_path, whole, honest, training=RINGS, node_count=4, signs_counts=True
    ) as wires:
        async for event in wires.user.read_events(wires.job):
            match event.content:
                case RingPlacedEvent(stages=stages, ring=ring):
                    rings |= {stage.node: ring for stage in stages}
                case RingRoundStoredEvent(shares=shares):
                    for share in shares:
                        tokens[share.ring] += share.tokens
                case WindowCountedEvent(node=node, count=count):
                    counts.append((node, count.prompt_tokens))
                case _:
                    pass
            if len(counts) >= 4 * TRAINING.rounds:
                break
    assert sorted(rings.values()) == [0, 0, 1, 1]
    counts_by_node = {
        node: sum(count for other, count in counts if other == node) for node in rings
    }
    held_out_tokens = sum(len(row.tokens) for row in random_rows(10 + HELD_OUT, VOCABULARY)[10:])
    for ring, trained_tokens in tokens.items():
        extra = {
            counts_by_node[node] - 3 * trained_tokens
            for node, each in rings.items()
            if each == ring
        }
        # Rounds whose folded adapter this ring measured before the other one did.
        assert len(extra) == 1
        assert extra <= {rounds * held_out_tokens for rounds in range(TRAINING.rounds + 1)}
    total = sum(counts_by_node.values()) - 2 * 3 * sum(tokens.values())
    assert total == 2 * TRAINING.rounds * held_out_tokens


async def test_a_stage_whose_adapter_is_not_finite_loses_its_layers_and_no_round_is_folded_of_it(
    cluster: Cluster, tmp_path: Path, whole: Any
) -> None:
    kept_count = 0

    def say(_: WireStage, __: StageRequest, reply: StageReply) -> StageReply:
        nonlocal kept_count
        if isinstance(reply, AdapterKept):
            kept_count += 1
            # Of the first round: two were given to measure lines, and each ring's before it.
            if kept_count == 2 * LAYERS + 4:
                infinite = np.full(len(reply.content) // 4, np.inf, "<f4")
                return AdapterKept(infinite.tobytes())
        return reply

    async with trained_wires(cluster, tmp_path, whole, say, training=RINGS, node_count=4) as wires:
        rounds = await rounds_of_rings(wires)
        assert (await wires.first_fault()).endswith("is not finite")
    plain_rounds = rounds_of_one_process(whole, wires.rows, RINGS)
    assert [each.loss for each in rounds] == [each.loss for each in plain_rounds]


async def test_two_rings_that_are_paused_go_on_with_the_same_bits(
    cluster: Cluster, tmp_path: Path, whole: Any
) -> None:
    async with trained_wires(
        cluster, tmp_path, whole, honest, training=RINGS, node_count=4
    ) as wires:
        rounds = list[RingRoundStoredEvent]()
        async for event in wires.user.read_events(wires.job):
            if isinstance(event.content, RingRoundStoredEvent):
                rounds.append(event.content)
                if len(rounds) == 1:
                    await wires.user.pause(wires.job)
                    await wires.user.resume(wires.job)
                if len(rounds) == TRAINING.rounds:
                    break
    plain_rounds = rounds_of_one_process(whole, wires.rows, RINGS)
    figures = [(each.loss, each.held_out_loss) for each in rounds]
    assert figures == [(each.loss, each.held_out_loss) for each in plain_rounds]


@pytest.mark.full
async def test_a_ring_whose_node_stays_away_is_waited_for_once_and_the_first_ring_answers(
    cluster: Cluster, tmp_path: Path, whole: Any
) -> None:
    loss_count = 0

    def say(stage: WireStage, _: StageRequest, reply: StageReply) -> StageReply:
        nonlocal loss_count
        if isinstance(reply, Gradients) and stage.span.end == LAYERS:
            loss_count += 1
            if loss_count == 2 * 2 * TRAINING.inner_steps + 1:
                stage.lose_all(is_back=False)
        return reply

    async with trained_wires(cluster, tmp_path, whole, say, training=RINGS, node_count=4) as wires:
        rounds = await rounds_of_rings(wires)
        # Either ring may be the one; nodes of the other one fill its gap in the end.
        assert [len(each.shares) for each in rounds] == [2, 1, 1]
        assert "not in after 120 s, where 1 ring took" in rounds[1].left_out
        assert [rounds[0].left_out, rounds[2].left_out] == ["", ""]
        while not (model := (await wires.user.models())[0]).ready_replicas:
            pass
        assert model.reason.startswith("2 stages on nodes")
    plain_rounds = rounds_of_one_process(whole, wires.rows, RINGS)
    assert rounds[0].loss == plain_rounds[0].loss


async def test_fewer_nodes_begin_with_the_rings_that_there_are_and_say_so(
    cluster: Cluster, tmp_path: Path, whole: Any
) -> None:
    async with trained_wires(
        cluster, tmp_path, whole, honest, training=RINGS, node_count=3
    ) as wires:
        rounds = await rounds_of_rings(wires)
        assert {each.outer for each in rounds} == {"rate 1, momentum 0: plain: one ring was in"}
        async for event in wires.user.read_events(wires.job):
            # Told of ring 1, too, as long as fewer than two nodes had come.
            text = "ring 2: waits for nodes: 1 of 2 stages are there"
            if isinstance(event.content, RingUnplacedEvent) and event.content.reason == text:
                break
    plain_rounds = rounds_of_one_process(whole, wires.rows, RINGS, (0,))
    figures = [(each.loss, each.held_out_loss) for each in rounds]
    assert figures == [(each.loss, each.held_out_loss) for each in plain_rounds]
