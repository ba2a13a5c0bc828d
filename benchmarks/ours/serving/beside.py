"""Time of a token of a fine-tuning: its adapter beside the base, and merged into it."""

import copy
import statistics
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

from benchmarks.ours.serving.random_model import save_random_base
from benchmarks.ours.table import PartFigures
from gpu_node.shell.worker.farm.language_model import LanguageModel
from gpu_node.shell.worker.serving.conversation import ModelConversation
from gpu_node.shell.worker.serving.engine import is_last
from gpu_node.shell.worker.serving.transformers_model import TransformersModel
from hypergpu.serving.calls import AnswerPart, ModelCall, Sampling

_RANK = 16
_TOKENS = 64
_CALL = ModelCall(
    tokens=tuple(range(100, 164)), sampling=Sampling(temperature=0.0), new_tokens_most=_TOKENS
)


def beside_figures(turns: int) -> PartFigures:
    """The same answers by both, by turns, one thread."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = save_random_base(Path(name) / "base", width=512, layers=8)
        base = LanguageModel.load(folder, {}, torch.device("cpu"))
    settings = LoraConfig(r=_RANK, target_modules="all-linear", init_lora_weights=False)
    adapted_model = get_peft_model(copy.deepcopy(base.model), settings).eval()
    merged_model = copy.deepcopy(adapted_model).merge_and_unload()
    models = [
        TransformersModel(base._replace(model=each))
        for each in (adapted_model.get_base_model(), merged_model)
    ]
    times_ms: tuple[list[float], list[float]] = ([], [])
    for _ in range(turns):
        for model, model_ms in zip(models, times_ms, strict=True):
            model_ms.append(_token_ms(model))
    beside_ms, merged_ms = map(statistics.median, times_ms)
    return PartFigures(
        rows=[
            ("time of a token, adapter beside the base", f"{beside_ms:.1f} ms", ""),
            ("the same, merged into it", f"{merged_ms:.1f} ms", ""),
            ("beside over merged", f"{beside_ms / merged_ms:.2f}x", ""),
        ],
        metrics={"adapter_beside_over_merged": beside_ms / merged_ms},
        notes=[f"27M parameters, rank {_RANK}, all linear layers, one thread, {turns} turns."],
    )


def _token_ms(model: TransformersModel) -> float:
    """Time of a token after the first."""
    conversation = ModelConversation(model, _CALL, 2_048)
    parts: list[AnswerPart] = [*conversation.step()]
    began_s = time.perf_counter()
    while not is_last(parts):
        parts += conversation.step()
    conversation.close()
    return 1000 * (time.perf_counter() - began_s) / (_TOKENS - 1)
