"""Which weights Muon steps: those of a network's layers before the last."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hypergpu.programs.checks import read_program
from hypergpu.programs.samples import SampleWriter
from hypergpu.workloads.layouts import numpy_hidden_weights
from hypergpu.workloads.networks.hidden_weights import hidden_weights
from hypergpu.workloads.networks.program import ProgramWorkload
from hypergpu.workloads.networks.program_layers import program_hidden_weights
from hypergpu.workloads.networks.tracing import BatchShape, trace
from hypergpu.workloads.registry import build, find


@pytest.mark.parametrize(
    ("workload", "names"),
    [
        ("digits-softmax", set()),
        ("digits-mlp", {"0.weight", "2.weight"}),
        ("digits-cnn", {"0.weight", "4.weight", "7.weight", "12.weight"}),
        (
            "text-gpt",
            {
                f"layers.{layer}.{part}.weight"
                for layer in range(4)
                for part in ("attention_in", "attention_out", "hidden_in", "hidden_out")
            },
        ),
    ],
)
def test_the_last_layer_embeddings_and_positions_are_not_hidden(
    workload: str, names: set[str]
) -> None:
    model = build(find(workload), {})
    if find(workload).kind == "numpy":
        assert numpy_hidden_weights(model) == names
    else:
        assert hidden_weights(model.model()) == names


class TiedText(nn.Module):
    """A model of text whose output layer is its embedding, by one of two ways."""

    def __init__(self, *, has_head: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 12)
        self.places = nn.Parameter(torch.zeros(6, 12))
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.wide = nn.Linear(12, 20)
        self.narrow = nn.Linear(20, 12)
        if has_head:
            self.head = nn.Linear(12, 30, bias=False)
            self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = x + self.narrow(F.gelu(self.wide(x)))
        return F.linear(x, self.words.weight)


HIDDEN_OF_TEXT = {
    "attention.in_proj_weight",
    "attention.out_proj.weight",
    "wide.weight",
    "narrow.weight",
}


def test_an_output_layer_that_is_the_embedding_hides_no_layer_before_it() -> None:
    assert hidden_weights(TiedText(has_head=True)) == HIDDEN_OF_TEXT


def next_word_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    words = batch["words"]
    return F.cross_entropy(model(words)[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def test_a_programs_calls_tell_its_hidden_weights(tmp_path: Path) -> None:
    arrays = {"words": np.arange(240, dtype=np.int64).reshape(40, 6) % 30}
    writer = SampleWriter(tmp_path)
    fields = writer.write_part("train", [arrays])
    writer.write_part("held_out", [arrays])
    writer.close()
    shape = BatchShape(tuple(arrays), is_tuple=False)
    trace(TiedText(has_head=False), next_word_loss, shape, fields).write(tmp_path)
    assert program_hidden_weights(read_program(tmp_path)) == HIDDEN_OF_TEXT
    assert hidden_weights(ProgramWorkload(tmp_path).model()) == HIDDEN_OF_TEXT


def test_frozen_weights_are_layers_but_not_hidden_ones() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model[0].requires_grad_(requires_grad=False)
    model[1].requires_grad_(requires_grad=False)
    assert hidden_weights(model) == {"2.weight"}
