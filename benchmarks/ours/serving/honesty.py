"""Honest replicas by unlike settings, and liars, before the rule that judges them.

Answers are written by the engine's own conversations and scored by its own checks; whoever is
doubted by the rule of `coordinator.core.serving.honesty` counts as accused, before any third node
decides.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from coordinator.core.serving.honesty import after_check, fault_reason
from coordinator.core.serving.state import NodeHonesty
from gpu_node.shell.worker.farm.language_model import LanguageModel
from gpu_node.shell.worker.serving.answer_check import AnswerCheck
from gpu_node.shell.worker.serving.conversation import ModelConversation
from gpu_node.shell.worker.serving.engine import is_last
from gpu_node.shell.worker.serving.transformers_model import TransformersModel
from hypergpu.serving.calls import (
    AnswerClaim,
    AnswerEnded,
    AnswerPart,
    AnswerToken,
    CheckFigures,
    CheckResult,
    ModelCall,
    Sampling,
)

SWAP_TOKENS_MOST = 1_500
"""Tokens after which a liar counts as not found."""
_GROUP = 32
_LEVELS = 7
_PIECE_TOKENS = 5
_POSITIONS = 2_048
_TRAIN_STEPS = 150
_TRAIN_BATCH = 16


class NodeSetting(NamedTuple):
    """How an honest node computes."""

    name: str
    dtype: torch.dtype = torch.float32
    threads: int = 1
    piece_tokens: int = 512
    """Tokens that a check reads at a time."""


SETTINGS = (
    NodeSetting("float32, one thread"),
    NodeSetting("float32, two threads", threads=2),
    NodeSetting("bfloat16", dtype=torch.bfloat16),
    NodeSetting("float32, read by five tokens", piece_tokens=_PIECE_TOKENS),
)
"""Those that check. All but the last also answer, token by token."""
ANSWERING = SETTINGS[:3]
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "temperature 1": Sampling(),
    "temperature 0.7": Sampling(temperature=0.7),
    "top_p 0.9": Sampling(top_p=0.9),
    "top_k 40": Sampling(top_k=40),
}
Cut = Callable[[Sampling], Sampling]


def _cooler(sampling: Sampling) -> Sampling:
    return replace(sampling, temperature=0.8 * sampling.temperature)


def _fewer(sampling: Sampling) -> Sampling:
    return replace(sampling, top_k=sampling.top_k // 2 or 20)


CUTS: Mapping[str, Cut] = {"temperature lowered by a fifth": _cooler, "top_k lowered": _fewer}


class CheckedBase:
    """A model by all settings, and the models that liars answer with.

    Args:
        name: Of the model.
        base: The model in float32.
        prompts: Tokens of prompts.
        new_tokens: Tokens of an answer.
    """

    def __init__(
        self, name: str, base: LanguageModel, prompts: Sequence[tuple[int, ...]], new_tokens: int
    ) -> None:
        self.name = name
        self._new_tokens = new_tokens
        self._prompts = prompts
        half = base._replace(model=copy.deepcopy(base.model).to(torch.bfloat16))
        self._by_dtype = {torch.float32: base, torch.bfloat16: half}
        self.swaps = {
            "4-bit weights": base._replace(model=four_bit(base.model)),
            "a smaller model": base._replace(model=shallower(base.model)),
        }

    def model(self, setting: NodeSetting) -> LanguageModel:
        """The model as a setting computes it."""
        torch.set_num_threads(setting.threads)
        return self._by_dtype[setting.dtype]

    def call(self, sampling: Sampling, number: int) -> ModelCall:
        """A call of a number, each with a seed of its own."""
        own_sampling = replace(sampling, seed=number)
        prompt = self._prompts[number % len(self._prompts)]
        return ModelCall(tokens=prompt, sampling=own_sampling, new_tokens_most=self._new_tokens)


def honest_figures(
    base: CheckedBase, sampling: Sampling, answers: int
) -> Iterator[tuple[str, CheckFigures]]:
    """The checks of honest answers, of each pair of settings, with the pair's name."""
    for author in ANSWERING:
        claims = []
        for number in range(answers):
            call = base.call(sampling, number)
            claims.append(claimed_answer(base.model(author), call, call))
        for checker in SETTINGS:
            for claim in claims:
                yield f"{author.name} / {checker.name}", score(base, checker, claim)


def accusations(figures: Sequence[CheckFigures]) -> int:
    """How often the rule doubts a node with these checks; after each it begins anew."""
    honesty, count = NodeHonesty(), 0
    for each in figures:
        honesty = after_check(honesty, each)
        if fault_reason(honesty, each):
            honesty, count = NodeHonesty(), count + 1
    return count


def tokens_until_found(
    base: CheckedBase, liar: LanguageModel, sampling: Sampling, cut: Cut = lambda rules: rules
) -> int:
    """Scored tokens until the rule doubts a liar, by the setting that takes longest."""
    torch.set_num_threads(1)
    records = dict.fromkeys(SETTINGS, NodeHonesty())
    counts: dict[NodeSetting, int] = {}
    number = scored_tokens = 0
    while len(counts) < len(SETTINGS) and scored_tokens < SWAP_TOKENS_MOST:
        call = base.call(sampling, number)
        lie = replace(call, sampling=cut(call.sampling))
        claim = claimed_answer(liar, lie, call)
        number += 1
        for setting in [each for each in SETTINGS if each not in counts]:
            figures = score(base, setting, claim)
            records[setting] = after_check(records[setting], figures)
            if fault_reason(records[setting], figures):
                counts[setting] = records[setting].checked_tokens
        scored_tokens = max(each.checked_tokens for each in records.values())
    return max(counts.values()) if len(counts) == len(SETTINGS) else SWAP_TOKENS_MOST


def claimed_answer(model: LanguageModel, call: ModelCall, stated_call: ModelCall) -> ModelCall:
    """The check of an answer that a model writes to one call and claims for another."""
    conversation = ModelConversation(TransformersModel(model), call, _POSITIONS)
    parts: list[AnswerPart] = []
    while not is_last(parts):
        parts += conversation.step()
    tokens = tuple(part.token for part in parts if isinstance(part, AnswerToken))
    end = parts[-1]
    has_ended = isinstance(end, AnswerEnded) and end.finish == "stop"
    return replace(stated_call, tokens_out=tokens, claim=AnswerClaim(0, has_ended))


def score(base: CheckedBase, setting: NodeSetting, claim: ModelCall) -> CheckFigures:
    """What a check of a claimed answer gives."""
    model = TransformersModel(base.model(setting))
    check = AnswerCheck(model, claim, _POSITIONS, piece_tokens=setting.piece_tokens)
    parts: list[AnswerPart] = []
    while not parts:
        parts = check.step()
    (part,) = parts
    if not isinstance(part, CheckResult):
        raise TypeError("a check gives figures")
    return part.figures


@torch.inference_mode()
def four_bit(model: Any) -> Any:
    """A copy whose layers' weights have 15 levels in groups of 32, as 4-bit formats have them."""
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear):
                groups = module.weight.data.reshape(-1, _GROUP)
                scale = groups.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / _LEVELS
                module.weight.data = ((groups / scale).round() * scale).reshape(module.weight.shape)
    return model


def shallower(model: Any) -> Any:
    """A copy without the last quarter of its layers."""
    shallow = copy.deepcopy(model)
    shallow.model.layers = shallow.model.layers[: -max(1, len(shallow.model.layers) // 4)]
    return shallow


def train_to_count(base: LanguageModel, vocabulary: int) -> LanguageModel:
    """A copy that was trained for a moment to count up from any token, with gaps by chance."""
    model = copy.deepcopy(base.model).train()
    draws = torch.Generator().manual_seed(11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(_TRAIN_STEPS):
        begin = torch.randint(0, vocabulary, (_TRAIN_BATCH, 1), generator=draws)
        gaps = torch.randint(1, 4, (_TRAIN_BATCH, 32), generator=draws)
        rows = (begin + torch.cumsum(gaps, dim=1)) % vocabulary
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return base._replace(model=model.eval())


def text_prompts(base: LanguageModel) -> list[tuple[int, ...]]:
    """Prompts of a model that has read English, by its own tokenizer."""
    texts = (
        "The history of the city began when a small group of traders settled near the river",
        "In order to understand how a computer works, we first have to look at the way it stores",
        "She opened the old wooden door and saw that the garden behind the house was full of",
        "The recipe is simple: take two cups of flour, a pinch of salt, some water, and then",
    )
    return [tuple(base.tokenizer(text)["input_ids"]) for text in texts]
