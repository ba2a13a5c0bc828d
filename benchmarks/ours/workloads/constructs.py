"""Things that people write in models and losses, each in a small module: what a program must train
as the module does, or refuse with the user's line.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from benchmarks.ours.workloads import construct_gradients as gradients
from benchmarks.ours.workloads import construct_layers as layers
from benchmarks.ours.workloads import construct_losses as losses
from benchmarks.ours.workloads import construct_states as states

Arrays = Mapping[str, NDArray[Any]]
Batch = Mapping[str, Tensor]
_DRAWS = np.random.default_rng(0)
ROWS: Arrays = {
    "x": _DRAWS.normal(size=(24, 8)).astype(np.float32),
    "y": _DRAWS.integers(0, 3, 24),
}
SERIES: Arrays = {
    "x": _DRAWS.normal(size=(24, 6, 8)).astype(np.float32),
    "mask": _DRAWS.random((24, 6)) > 0.3,
    "y": _DRAWS.integers(0, 3, 24),
}
IMAGES: Arrays = {
    "x": _DRAWS.normal(size=(24, 3, 8, 8)).astype(np.float32),
    "y": _DRAWS.integers(0, 3, 24),
}
TOKENS: Arrays = {"x": _DRAWS.integers(0, 20, (24, 6)), "y": _DRAWS.integers(0, 3, 24)}


class Construct(NamedTuple):
    """One of them."""

    name: str
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Any]
    arrays: Arrays
    is_refused: bool = False
    """Whether no program can hold it."""


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of the classes."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def masked_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The same of series with a mask."""
    return F.cross_entropy(model(batch["x"], batch["mask"]), batch["y"])


def measured_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Cross-entropy, and counts of a class that was found."""
    logits = model(batch["x"])
    is_guessed, right = logits.argmax(1) == 1, batch["y"] == 1
    hits = (is_guessed & right).float().sum()
    f1 = 2 * hits / (is_guessed.float().sum() + right.float().sum()).clamp(min=1)
    return F.cross_entropy(logits, batch["y"]), {"f1": f1}


class Between(nn.Module):
    """Two layers with a function between them."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 12), nn.Linear(12, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.b(self.function(self.a(x)))
        return logits


def _between(
    name: str, function: Callable[[Tensor], Tensor], *, refused: bool = False
) -> Construct:
    return Construct(name, partial(Between, function), class_loss, ROWS, refused)


def _of_loss(name: str, loss: Callable[..., Any], outputs: int = 3) -> Construct:
    def whole(model: nn.Module, batch: Batch) -> Any:
        return loss(model(batch["x"]), batch["y"])

    return Construct(name, partial(_two_layers, outputs), whole, ROWS)


def _two_layers(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, outputs))


def _parametrization(name: str, function: Callable[..., Any], width: int = 12) -> Construct:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls some of them old
            function(model[0])
        return model

    return Construct(name, make, class_loss, ROWS)


def _module(
    name: str, make: Callable[[], nn.Module], arrays: Arrays = ROWS, **named: Any
) -> Construct:
    return Construct(name, make, named.pop("loss", class_loss), arrays, **named)


def _activations() -> list[Construct]:
    functions: list[Any] = [
        F.gelu,
        F.silu,
        F.mish,
        F.selu,
        F.hardswish,
        F.softplus,
        F.rrelu,
        torch.sin,
    ]
    return [_between(f"activation {each.__name__}", each) for each in functions]


def _own_gradients() -> list[Construct]:
    return [
        _between("straight-through estimator", gradients.StraightThrough.apply),
        _between("straight-through by detach", lambda h: h + (h.round() - h).detach()),
        _between("gradient reversal", gradients.Reversal.apply),
        _between("gradient scaling by a context", lambda h: gradients.Scaling.apply(h, 0.3)),
        _between("own exponential of saved results", gradients.Exponential.apply),
        _between("own function by setup_context", gradients.Cube.apply),
        _between("own function of two tensors", lambda h: gradients.Product.apply(h, h.sin())),
        _between("own function of two results", lambda h: sum(gradients.Parts.apply(h))),
        _between("own clipped gradient", gradients.ClippedGradient.apply),
        _between("own function with no_grad in it", gradients.Guarded.apply),
        _between("own function of a class that inherits", gradients.HalfReversal.apply),
        _between("hook of a tensor", gradients.doubled_by_hook),
        _between("hook before other uses", gradients.hooked_before_uses),
        _between("two hooks of a tensor", gradients.two_hooks),
        _between("hook that clamps", gradients.clamped_by_hook),
        _between("hook that prints nothing and returns nothing", gradients.observing_hook),
        _module("hook of a parameter", gradients.parameter_hook),
        _module("backward hook of a module", gradients.module_hook),
        _module("backward pre-hook of a module", gradients.module_pre_hook),
        _module("hook of a node of the graph", gradients.GraphNodeHook, is_refused=True),
        _module("backward with Python's numbers", gradients.NumberBackward, is_refused=True),
    ]


def _buffers() -> list[Construct]:
    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int16, torch.uint8]
    counters = [
        _module(f"counter of {each}".replace("torch.", ""), partial(states.Counting, each))
        for each in [*dtypes, torch.int8, torch.bool]
    ]
    return [
        *counters,
        _module("assigned buffer", states.AssignedBuffer),
        _module("statistics in float64", states.DoubleStatistics),
        _module("buffer that is not kept", states.PassingBuffer),
        _module("complex table", states.ComplexTable),
        _module("frozen copy that follows by momentum", states.MomentumCopy),
        _module("weights that the forward pass bounds", states.BoundedWeights),
        _module("number that the forward pass counts", states.StepNumber, is_refused=True),
        _module("state in an attribute", states.HiddenState, is_refused=True),
        _module("tensor attribute that is changed", states.ChangedTable, is_refused=True),
    ]


def _ties() -> list[Construct]:
    return [
        _module("weights tied by object", partial(states.TiedTokens, "object"), TOKENS),
        _module("weights tied by memory", partial(states.TiedTokens, "memory"), TOKENS),
        _module("weights tied transposed", partial(states.TiedTokens, "transposed"), TOKENS),
        _module("weight that is a part of another", states.SlicedWeight, is_refused=True),
        _module("frozen layer", states.FrozenLayer),
        _module("requires_grad changed in forward", states.ToggledLayer),
        _module("complex parameters", states.ComplexWeights),
        _module("parameter made in forward", states.LateParameter, is_refused=True),
    ]


def _layers() -> list[Construct]:
    attention = partial(nn.TransformerEncoderLayer, 8, 2, 16, batch_first=True)
    return [
        _module("convolutions and BatchNorm", layers.PlainConvolutions, IMAGES),
        _module("grouped, dilated, transposed convolutions", layers.OddConvolutions, IMAGES),
        _module("GroupNorm, InstanceNorm, LayerNorm", layers.Norms, IMAGES),
        _module("RMSNorm", lambda: nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 3))),
        _module("U-Net with bilinear upsampling", layers.SmallUNet, IMAGES),
        _module("max pooling with indices", layers.PooledIndices, IMAGES),
        _module("unfold and fold", layers.Patches, IMAGES),
        _module("grid_sample", layers.Warp, IMAGES),
        _module("LSTM", partial(layers.Recurrent, nn.LSTM), SERIES, loss=masked_loss),
        _module("GRU, both ways", partial(layers.Recurrent, nn.GRU), SERIES, loss=masked_loss),
        _module("LSTMCell in a loop", layers.CellLoop, SERIES, loss=masked_loss),
        _module("attention with a padding mask", layers.MaskedAttention, SERIES, loss=masked_loss),
        _module("TransformerEncoder", partial(layers.Encoder, attention), SERIES, loss=masked_loss),
        _module("Transformer with both halves", layers.BothHalves, SERIES, loss=masked_loss),
        _module("mask of the least float", layers.LeastFloatMask, SERIES, loss=masked_loss),
        _module("rotary positions by complex numbers", layers.Rotary, SERIES, loss=masked_loss),
        _module("graph network by scatter", layers.Scatter, SERIES, loss=masked_loss),
        _module("mixture of experts by topk", layers.Experts),
        _module("EmbeddingBag, sum", partial(layers.Bags, "sum"), TOKENS),
        _module("EmbeddingBag, mean, with offsets", partial(layers.Bags, "mean"), TOKENS),
        _module("EmbeddingBag, max", partial(layers.Bags, "max"), TOKENS),
        _module("Embedding with max_norm", partial(layers.EmbeddingTable, max_norm=0.5), TOKENS),
        _module(
            "Embedding with sparse gradients", partial(layers.EmbeddingTable, sparse=True), TOKENS
        ),
        _module("fake quantisation", layers.FakeQuantised),
        _module("lazy layer, called once", layers.lazy_layer),
        _module("outputs in a dictionary", layers.NamedOutputs, loss=layers.named_output_loss),
        _module("inputs changed in place", layers.InPlaceInputs),
        _module("bilinear layer", layers.BilinearLayer),
    ]


def _parametrizations() -> list[Construct]:
    orthogonal = parametrizations.orthogonal
    return [
        _parametrization("weight_norm", parametrizations.weight_norm),
        _parametrization("spectral_norm", parametrizations.spectral_norm),
        _parametrization("orthogonal", orthogonal),
        _parametrization("orthogonal, square", orthogonal, 8),
        _parametrization("orthogonal by cayley", partial(orthogonal, orthogonal_map="cayley"), 8),
        _parametrization("weight_norm as before", nn.utils.weight_norm),
        _parametrization("spectral_norm as before", nn.utils.spectral_norm),
        _parametrization("own parametrization", layers.symmetric),
    ]


def _checkpoints() -> list[Construct]:
    return [
        _module("checkpoint", partial(losses.Checkpointed, reentrant=False)),
        _module("reentrant checkpoint", partial(losses.Checkpointed, reentrant=True)),
        _module("reentrant checkpoint of the input", losses.CheckpointedInput),
        _between("no_grad in the middle", losses.without_gradient),
        _between("set_grad_enabled and enable_grad", losses.toggled_gradient),
        _between("detach", lambda h: h * h.detach().abs()),
        _between("gradient penalty", losses.gradient_penalty),
        Construct("gradient penalty of inputs", _two_layers, losses.penalised_loss, ROWS),
        Construct("physics-informed loss", _two_layers, losses.physics_loss, ROWS),
    ]


def _operators() -> list[Construct]:
    return [
        _between("einsum", lambda h: torch.einsum("bi,bj->bi", h, h)),
        _between("einsum with an ellipsis", lambda h: torch.einsum("...i, ...i -> ...i", h, h)),
        _between(
            "large floats", lambda h: h.masked_fill(h < -1e20, -1e30) + 0 * h.clamp(min=-3e38)
        ),
        _between("boolean indexing", lambda h: h + h[h > 0].mean()),
        _between("rows by a mask", lambda h: h + h[h[:, 0] > 0].sum(0)),
        _between("assignment by a mask", losses.assigned_by_mask),
        _between("nonzero", lambda h: h + h[torch.nonzero(h[:, 0] > 0)[:, 0]].sum(0)),
        _between("where with one argument", lambda h: h + h[torch.where(h > 0)].sum()),
        _between("masked_select", lambda h: h + torch.masked_select(h, h > 0).mean()),
        _between("unique", lambda h: h * torch.unique(h.argmax(1)).float().sum()),
        _between("FFT", lambda h: torch.fft.irfft(torch.fft.rfft(h) * 2, n=12)),
        _between("complex numbers", lambda h: torch.complex(h, h.sin()).abs()),
        _between("gumbel_softmax", lambda h: F.gumbel_softmax(h, hard=True)),
        _between("dropout of all kinds", losses.all_dropouts),
        _between("Normal.rsample", lambda h: torch.distributions.Normal(h, 1.0).rsample()),
        _between(
            "Gamma.rsample", lambda h: torch.distributions.Gamma(F.softplus(h), 1.0).rsample()
        ),
        _between("Categorical.sample", losses.sampled_class),
        _between("own generator", losses.own_generator),
        _between("numpy's generator", losses.numpy_noise, refused=True),
        _between("vmap", losses.map_samples, refused=True),
        _between("item", lambda h: h * h.mean().item()),
        _between("Python if", lambda h: h if h.sum() > 0 else -h, refused=True),
        _between("loop over samples", lambda h: torch.stack([*h]), refused=True),
        _between("fixed batch", lambda h: h.reshape(-1, 12) + h[:4].mean(), refused=True),
        _between("root of the batch size", lambda h: h / h.shape[0] ** 0.5),
        _between("cumulative and sorted", lambda h: h.sort(1)[0].cumsum(1)),
        _between("determinant and inverse", losses.determinant),
        _between("cdist", lambda h: torch.cdist(h, h[:, :1].expand(-1, 12) + 5)[:, :1] + h),
        _between("STFT", losses.spectrum),
        _between("numpy in forward", lambda h: h * float(np.ones(1)[0])),
        _between(
            "tensor to numpy", lambda h: h * torch.from_numpy(h.detach().numpy()), refused=True
        ),
    ]


def _losses() -> list[Construct]:
    return [
        _of_loss("class weights", losses.weighted_loss),
        _of_loss("ignore_index", lambda o, y: F.cross_entropy(o, y.masked_fill(y == 2, -100))),
        _of_loss("label smoothing", partial(F.cross_entropy, label_smoothing=0.1)),
        _of_loss("focal loss", losses.focal_loss),
        _of_loss("KL divergence", losses.divergence),
        _of_loss("contrastive loss", losses.contrastive_loss, 6),
        _of_loss("triplet loss", losses.triplet_loss, 6),
        _of_loss("binary with logits", losses.binary_loss),
        _of_loss("Huber and smooth L1", losses.robust_loss),
        _of_loss("CTC", losses.ctc, 20),
        _of_loss("Gaussian likelihood", losses.gaussian_loss, 4),
        Construct("F1 of counts", _two_layers, measured_loss, ROWS),
        Construct("variational autoencoder", losses.Variational, losses.variational_loss, ROWS),
        Construct("diffusion step", losses.Denoiser, losses.diffusion_loss, ROWS),
        Construct("two losses of a GAN", losses.Adversaries, losses.adversarial_loss, ROWS),
        Construct("loss over a masked selection", _two_layers, losses.selected_loss, ROWS),
        Construct("norm of the parameters", _two_layers, losses.decayed_loss, ROWS),
    ]


def constructs() -> list[Construct]:
    """All of them."""
    groups = (
        _activations,
        _own_gradients,
        _buffers,
        _ties,
        _layers,
        _parametrizations,
        _checkpoints,
        _operators,
        _losses,
    )
    return [each for group in groups for each in group()]
