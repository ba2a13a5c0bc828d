"""A model that no node holds whole is served in stages, and the reason is told."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from hypergpu.errors import HyperGPUError
from hypergpu.rings.stage_work import STAGE_KIND, CutSizes
from hypergpu.serving.serve_request import ENGINE_KIND
from hypergpu.user.client.values import NodeView
from hypergpu.user.serving.stage_choice import choose_stages, parameter_bytes
from tests.unit.serving.test_plan import SIZES, node


def serving_node(name: str, memory_bytes: int, state: str = "idle") -> NodeView:
    view = node(name, memory_bytes, state=state)
    return msgspec.structs.replace(view, workloads={STAGE_KIND: 1, ENGINE_KIND: 1})


def no_sizes() -> CutSizes:
    raise AssertionError("a model that is held whole is not cut")


@pytest.mark.parametrize(
    "nodes",
    [
        [],
        [node("other", 100)],
        [serving_node("large", 1_000), serving_node("small", 100)],
        [serving_node("unknown", 0), serving_node("small", 100)],
    ],
)
def test_it_is_held_whole_where_a_node_may_hold_it(nodes: list[NodeView]) -> None:
    assert choose_stages("m", 900, nodes, no_sizes) == (0, "")


def test_as_few_stages_as_can_hold_it_are_chosen_and_named() -> None:
    nodes = [serving_node("a", 850), serving_node("b", 850), serving_node("gone", 9_000, "lost")]
    choice = choose_stages("m", 900, nodes, lambda: SIZES)
    assert choice.stages == 2
    assert choice.reason.startswith("no node holds m whole: it has 0.00 GB, and the largest node")
    assert "2 stages do: " in choice.reason
    assert sorted(choice.reason.rpartition(": ")[2].split(", ")) == ["a", "b"]


def test_what_is_missing_is_told_where_the_nodes_together_do_not_hold_it() -> None:
    nodes = [serving_node("a", 300), serving_node("b", 300)]
    with pytest.raises(HyperGPUError, match="are missing to hold it in stages"):
        choose_stages("m", 900, nodes, lambda: SIZES)


def test_parameters_are_counted_by_headers_whatever_they_are_saved_as(tmp_path: Path) -> None:
    save_file({"a": np.zeros((3, 5), np.float32)}, tmp_path / "one.safetensors")
    save_file({"b": np.zeros(7, np.float16)}, tmp_path / "two.safetensors")
    assert parameter_bytes(tmp_path, "bfloat16") == 44
    assert parameter_bytes(tmp_path, "float32") == 88
    (tmp_path / "two.safetensors").write_bytes(b"no model")
    assert parameter_bytes(tmp_path, "float32") == 0
