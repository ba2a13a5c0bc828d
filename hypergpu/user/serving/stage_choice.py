"""Whether a model is served whole or in stages, where its user does not state it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.rings.stage_work import STAGE_KIND, CutSizes, memory_for_models
from hypergpu.serving.serve_request import ENGINE_KIND
from hypergpu.units import several
from hypergpu.user.client.values import NodeView
from hypergpu.user.serving.plan import plan_model

WHOLE_SHARE = 0.9
"""Part of a node's memory that a model may take that is held whole."""
_NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class StageChoice(NamedTuple):
    """How a model is held."""

    stages: int
    """0: each node holds it whole."""
    reason: str
    """Empty: nothing is to be told."""


def parameter_bytes(folder: Path, dtype: str) -> int:
    """Memory of a folder's parameters, held as a type; of headers alone. 0: they cannot be read."""
    numbers = 0
    try:
        for path in folder.glob("*.safetensors"):
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    size = 1
                    for side in file.get_slice(name).get_shape():
                        size *= side
                    numbers += size
    except (OSError, SafetensorError):
        return 0
    return numbers * _NUMBER_BYTES.get(dtype, 4)


def choose_stages(
    model: str, model_bytes: int, nodes: Sequence[NodeView], read_sizes: Callable[[], CutSizes]
) -> StageChoice:
    """Hold a model whole where a node that is there has the memory, else by as few as can hold it.

    Args:
        model: Its name, for people.
        model_bytes: Memory of its parameters.
        nodes: All that are known.
        read_sizes: Gives its sizes, or raises why it cannot be cut; takes seconds.

    Raises:
        HyperGPUError: NOT_READY, the nodes that are there cannot hold it together.
    """
    memories = [
        memory_for_models(node.device, node.memory_bytes)
        for node in nodes
        if ENGINE_KIND in node.workloads and not node.is_gone
    ]
    # A node whose memory is not known may hold it, as may those that are still to come.
    if not memories or 0 in memories or model_bytes <= WHOLE_SHARE * max(memories):
        return StageChoice(0, "")
    lack = f"no node holds {model} whole: it has {model_bytes / 1e9:.2f} GB"
    lack = f"{lack}, and the largest node {max(memories) / 1e9:.2f} GB"
    plan = plan_model(model, read_sizes(), nodes, STAGE_KIND)
    if not plan.is_possible:
        missing_text = f"{plan.missing_bytes / 1e9:.2f} GB"
        detail = f"{lack}; {missing_text} are missing to hold it in stages"
        fix = "connect more nodes: hypergpu plan FOLDER; or give --stages N, which waits for them"
        raise HyperGPUError(Reason.NOT_READY, detail, fix=fix)
    names = ", ".join(each.name or each.node for each in plan.stages)
    stages = len(plan.stages)
    return StageChoice(stages, f"{lack}; {several(stages, 'stage')} do: {names}")
