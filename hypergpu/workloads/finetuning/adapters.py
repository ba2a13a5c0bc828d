"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685) as the model of a job.

Averaging both factors apart is not averaging their product. In mode ``b`` the factor A is therefore
frozen, drawn alike on every node, so that averages of B are averages of the product (as FFA-LoRA,
Sun et al. 2024, arXiv:2403.12313), at half of the bytes.
"""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from peft import LoraConfig, TaskType, get_peft_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hypergpu.workloads.datasets import DatasetError
from hypergpu.workloads.entry import Options
from hypergpu.workloads.finetuning.base_model import LoadedBase, first_sentence
from hypergpu.workloads.networks.task import PartModule

_ALL = "all-linear"
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding, Conv1D)
"""Kinds of modules that peft has an adapter of; the last is transformers' transposed layer."""
_MAMBA = frozenset({"out_proj", "conv1d"})
_FUSED = dict.fromkeys(("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"), _MAMBA)
"""Layers whose weights a base's kernels use without calling them: peft refuses these."""
_SHOWN_MOST = 8
_HEAD_SCALE = 0.02
"""Spread of a new head's weights, as transformers' models have it."""


class AdapterPlan(NamedTuple):
    """Settings of an adapter."""

    mode: str
    rank: int
    alpha: int
    targets: str
    seed: int
    task: str = ""
    """One of peft's kinds of task; empty: none of them."""
    head: tuple[str, ...] = ()
    """Modules that are trained as a whole."""

    @classmethod
    def of(cls, options: Options, task: str = "", head: tuple[str, ...] = ()) -> "AdapterPlan":
        """The plan that a job's options state."""
        return cls(
            str(options["mode"]),
            int(options["rank"]),
            int(options["alpha"]),
            str(options["targets"]),
            int(options["adapter_seed"]),
            task,
            head,
        )

    def peft_config(self, targets: Sequence[str]) -> LoraConfig:
        """The same for peft, with the paths or last names of the modules that get an adapter."""
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=list(targets),
            exclude_modules=list(self.head) or None,
            modules_to_save=list(self.head) or None,
            task_type=TaskType(self.task) if self.task else None,
        )


def uniform_numbers(seed: int, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Numbers in [-1, 1) that are the same bits on every machine: multiples of 2^-23."""
    key = blake3(f"hypergpu.adapter\0{seed}\0{name}".encode()).digest(16)
    bits = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(int(np.prod(shape)))
    numbers = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-23) - np.float32(1)
    return numbers.reshape(shape)


class AdaptedModule(PartModule):
    """A base with an adapter. What is trained, and a name that tells the base, are the job's model.

    Args:
        base: A model of transformers, which is changed, and what its head lacks.
        plan: The adapter's settings.
        digest: The base's.

    Raises:
        DatasetError: The base has no modules of the names that the plan targets.
    """

    def __init__(self, base: LoadedBase, plan: AdapterPlan, digest: str) -> None:
        super().__init__()
        # Factors of low rank are AdamW's: Muon came less far with them at each of three rates.
        self.hidden_weights: frozenset[str] = frozenset()
        self._is_checkpointed = False
        _draw_head(base, plan.seed)
        targets = adapted_modules(base.model, plan)
        try:
            self.adapted: Any = add_adapter(base.model, plan.peft_config(targets))
        except ValueError as wrong:
            raise DatasetError(
                f"options.targets: {first_sentence(wrong)}. Fix: set options.targets = {_ALL!r}"
            ) from wrong
        _draw(self.adapted, plan)
        # Its name is in the layout, so that a model never meets another base.
        self.register_buffer(base_name(digest), torch.zeros((), dtype=torch.int64))

    def train(self, mode: bool = True) -> "AdaptedModule":  # noqa: FBT001, FBT002 - torch's own
        """Train, with the base's statistics of batches as they are."""
        super().train(mode)
        for module in self.adapted.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):  # noqa: SLF001 - has no other name
                module.eval()
        return self

    def checkpoint_activations(self, *, is_on: bool) -> None:
        """See `CheckpointedModule`. Models of which transformers cannot do so stay as they are."""
        model = self.adapted.get_base_model()
        if is_on == self._is_checkpointed or not model.supports_gradient_checkpointing:
            return
        self._is_checkpointed = is_on
        with warnings.catch_warnings():
            # From 5.23 on transformers has another name for both, with which older ones lack them.
            warnings.simplefilter("ignore", FutureWarning)
            if is_on:
                # The other kind finds no gradient behind frozen inputs.
                model.gradient_checkpointing_enable({"use_reentrant": False})
            else:
                model.gradient_checkpointing_disable()

    def forward(self, **inputs: Any) -> Tensor:
        """The base's logits."""
        logits: Tensor = self.adapted(**inputs).logits
        return logits


def adapted_modules(base: Any, plan: AdapterPlan) -> list[str]:
    """Names of the base's modules that a plan gives an adapter.

    ``all-linear`` are all linear layers but the head and the output; of a base that has none, all
    its convolutions in one group.

    Raises:
        DatasetError: There are none of a name, or they are of a kind that takes no adapter.
    """
    if plan.targets == _ALL:
        linear_names = _linear_names(base, plan.head)
        if not linear_names:
            raise DatasetError(
                f"options.targets: the base ({type(base).__name__}) has neither a linear layer nor"
                " a convolution. Fix: name modules that get an adapter in options.targets"
            )
        return linear_names
    target_names = [name.strip() for name in plan.targets.split(",")]
    modules = dict(base.named_modules())
    for name in target_names:
        matching_paths = [path for path in modules if path == name or path.endswith(f".{name}")]
        kinds = {
            type(modules[path]).__name__ for path in matching_paths if not _is_layer(modules[path])
        }
        if not matching_paths or kinds:
            what = "is none of the base's modules"
            if kinds:
                what = f"is {', '.join(sorted(kinds))}, which takes no adapter"
            raise DatasetError(
                f"options.targets: {name or 'an empty name'} {what}."
                f" Fix: take from {', '.join(_layer_names(base))}"
            )
    return target_names


def _is_layer(module: nn.Module) -> bool:
    # bitsandbytes' linear layers are subclasses.
    return isinstance(module, _LAYERS) and getattr(module, "groups", 1) == 1


def _layer_names(base: nn.Module) -> list[str]:
    """Last names of modules that take an adapter, some of them."""
    layer_names = dict.fromkeys(
        name.rpartition(".")[2] for name, module in base.named_modules() if _is_layer(module)
    )
    return [name for name in layer_names if not name.isdigit()][:_SHOWN_MOST]


def _linear_names(base: Any, head: tuple[str, ...]) -> list[str]:
    output = base.get_output_embeddings()
    fused_names = _FUSED.get(base.config.model_type, frozenset())
    others = {
        name: module
        for name, module in base.named_modules()
        if _is_layer(module)
        and module is not output
        and not set(head) & set(name.split("."))
        and name.rpartition(".")[2] not in fused_names
    }
    for kinds in ((nn.Linear, Conv1D), (nn.Conv1d, nn.Conv2d)):
        if linear_names := [name for name, module in others.items() if isinstance(module, kinds)]:
            return linear_names
    return []


def add_adapter(base: Any, config: LoraConfig) -> Any:
    """The base with an adapter by peft; transposed layers are told by it in a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(base, config)


def base_name(digest: str) -> str:
    """Name of the tensor that tells which base an adapter belongs to."""
    return f"base_{digest[:32]}"


@torch.no_grad()
def _draw_head(base: LoadedBase, seed: int) -> None:
    """Set what the base's folder lacks to what every node draws alike."""
    for name, parameter in base.model.named_parameters():
        if name in base.absent and parameter.dim() > 1:
            head_values = uniform_numbers(seed, name, tuple(parameter.shape)) * np.float32(
                _HEAD_SCALE
            )
            parameter.copy_(torch.from_numpy(head_values))
        elif name in base.absent:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


@torch.no_grad()
def _draw(adapted: nn.Module, plan: AdapterPlan) -> None:
    """Set A to what every node draws alike, and B to zeros."""
    for name, parameter in adapted.named_parameters():
        if "lora_A" in name or "lora_embedding_A" in name:
            # As peft's kaiming. Of an embedding's inputs one alone is 1.
            inputs = 1 if "embedding" in name else np.prod(parameter.shape[1:])
            bound = np.float32(1 / np.sqrt(inputs))
            initial_values = uniform_numbers(plan.seed, name, tuple(parameter.shape)) * bound
            parameter.copy_(torch.from_numpy(initial_values))
            parameter.requires_grad = plan.mode == "full"
        elif "lora_B" in name or "lora_embedding_B" in name:
            parameter.zero_()
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
