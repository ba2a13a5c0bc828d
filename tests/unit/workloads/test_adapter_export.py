"""An adapter that a ring trained, written for peft: the whole model with it is the ring."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from benchmarks.ours.stages.trained_ring import TrainedRing, random_rows
from benchmarks.ours.stages.virtual_training import StageTimes, VirtualTraining
from coordinator.core.rings.training_ring import RingPlan
from hypergpu.rings.ring_adapter import RingAdapter
from hypergpu.rings.ring_training import RingTraining
from hypergpu.rings.stage_work import layer_blob
from hypergpu.workloads.slices.adapter_export import (
    ADAPTER_FOLDER,
    CONFIG_NAME,
    RING_FILE,
    SETTINGS_FOLDER,
    main,
)
from hypergpu.workloads.slices.ragged_attention import PassingKeys, SessionSegment
from tests.tiny_bases import save_base

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # peft reads it
LAYERS = 3
TOKENS = torch.tensor([5, 9, 2, 7, 11])
TRAINING = RingTraining(
    rounds=2,
    inner_steps=3,
    batch_rows=4,
    micro_rows=2,
    rank=4,
    alpha=8,
    learning_rate=5e-2,
    gradient_codec="float32",
)


def ring_logits(ring: TrainedRing) -> torch.Tensor:
    """What the slices give, one after another."""
    states = TOKENS
    for stage in ring.stages:
        segments = [SessionSegment(PassingKeys(), 0, len(TOKENS))]
        states = stage._slice.compute_rows(states, segments)
    return states.detach()


@pytest.fixture(scope="module", params=["b", "full"])
def ring_export(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Files of a trained ring as an export fetches them, its base and its logits."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("export")
    base: Path = save_base(folder, num_hidden_layers=LAYERS)
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    training = msgspec.structs.replace(TRAINING, mode=request.param)
    rows = random_rows(training.batch_rows, whole.config.vocab_size)
    ring = TrainedRing(whole, (0, 1, LAYERS), training, lambda _: rows)
    plan = RingPlan(training.steps, training.micro_batches, training.inner_steps)
    VirtualTraining(plan, [StageTimes(1.0, 1.0, 0.0)] * 2, 2, ring).run()
    adapter = RingAdapter(
        job="j-1", training=training, layers=LAYERS, rounds=2, step=training.steps, loss=1.0
    )
    (folder / SETTINGS_FOLDER).mkdir()
    (folder / SETTINGS_FOLDER / "config.json").write_bytes((base / "config.json").read_bytes())
    (folder / RING_FILE).write_bytes(msgspec.json.encode(adapter))
    for layer, content in ring.stored[training.steps].items():
        (folder / layer_blob(layer)).write_bytes(content)
    return folder, base, ring_logits(ring)


def test_peft_loads_it_onto_the_whole_base_with_the_logits_of_the_ring(ring_export: Any) -> None:
    folder, base, logits = ring_export
    assert main([str(folder), "{}"]) == 0
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        base_logits = whole(input_ids=TOKENS[None]).logits[0]
        model = PeftModel.from_pretrained(whole, folder / ADAPTER_FOLDER)
        peft_logits = model(input_ids=TOKENS[None]).logits[0]
    assert float((base_logits - logits).abs().max()) > 0.01
    assert torch.allclose(peft_logits, logits, rtol=0, atol=1e-5)
    settings = json.loads((folder / ADAPTER_FOLDER / CONFIG_NAME).read_bytes())
    assert (settings["r"], settings["lora_alpha"]) == (4, 8)
    assert str(folder) not in settings["base_model_name_or_path"]


def test_a_layer_of_another_size_is_refused_with_the_file(
    ring_export: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _, _ = ring_export
    layer = folder / layer_blob(1)
    content = layer.read_bytes()
    layer.write_bytes(content[:-4])
    assert main([str(folder), "{}"]) == 1
    layer.write_bytes(content)
    assert "layer-001 has" in capsys.readouterr().err
