"""Checkpoints, contexts of gradients, operators and losses. See `constructs`."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Batch = Mapping[str, Tensor]


class Checkpointed(nn.Module):
    """A block whose activations are computed again, with dropout in it."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 12), nn.Linear(12, 3)
        self.block = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Dropout(0.3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden_state = self.first(x)
        hidden_state = hidden_state + checkpoint(
            self.block, hidden_state, use_reentrant=self.reentrant
        )
        logits: Tensor = self.head(hidden_state)
        return logits


class CheckpointedInput(nn.Module):
    """A reentrant checkpoint of what has no gradient: torch trains nothing within."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(checkpoint(self.block, x, use_reentrant=True).relu())
        return logits


def without_gradient(h: Tensor) -> Tensor:
    """A scale that has no gradient."""
    with torch.no_grad():
        scale = h.abs().amax(1, keepdim=True)
    return h / (1 + scale)


def toggled_gradient(h: Tensor) -> Tensor:
    """Contexts within contexts."""
    with torch.set_grad_enabled(False):
        a = h.sin()
        with torch.enable_grad():
            b = h.cos()
    return a + b * h


def gradient_penalty(h: Tensor) -> Tensor:
    """A loss of a gradient, Gulrajani et al. 2017, arXiv:1704.00028."""
    if not h.requires_grad:
        return h.tanh()
    (gradient,) = torch.autograd.grad(h.tanh().sum(), h, create_graph=True)
    return h.tanh() + 0.1 * gradient.square()


def penalised_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The norm of a critic's gradient between samples, as for Wasserstein's distance."""
    x = batch["x"]
    share = torch.rand(x.shape[0], 1, device=x.device)
    with torch.enable_grad():
        between = (share * x + (1 - share) * x.flip(0)).detach().requires_grad_(True)
        outputs = model(between).sum()
        gradient = torch.autograd.grad(outputs, between, create_graph=True)[0]
    penalty = (gradient.norm(dim=1) - 1).square().mean()
    return F.cross_entropy(model(x), batch["y"]) + 10 * penalty


def physics_loss(model: nn.Module, batch: Batch) -> Tensor:
    """A second derivative by the inputs, Raissi et al. 2019, doi:10.1016/j.jcp.2018.10.045."""
    with torch.enable_grad():
        x = batch["x"].requires_grad_()
        u = model(x)[:, 0]
        first = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
        ones = torch.ones_like(first)
        second = torch.autograd.grad(first, x, grad_outputs=ones, create_graph=True)[0]
    return (second.sum(1) + u.sin()).square().mean()


def assigned_by_mask(h: Tensor) -> Tensor:
    """Values at places that a mask names."""
    out = h.clone()
    out[h < 0] = 0.1
    out[:, 0] = h[:, 1] * 2
    return out


def all_dropouts(h: Tensor) -> Tensor:
    """One after the other."""
    h = F.dropout(h, 0.2)
    h = F.alpha_dropout(h, 0.1, training=True)
    return F.feature_alpha_dropout(h[..., None], 0.1, training=True).squeeze(-1)


def sampled_class(h: Tensor) -> Tensor:
    """REINFORCE's two parts."""
    distribution = torch.distributions.Categorical(logits=h)
    sample = distribution.sample()
    return h + distribution.log_prob(sample)[:, None] + distribution.entropy()[:, None]


def own_generator(h: Tensor) -> Tensor:
    """Noise of a generator of one's own."""
    generator = torch.Generator(h.device).manual_seed(3)
    noise = torch.empty_like(h).normal_(generator=generator)
    return h * torch.rand(h.shape, generator=generator) + noise


def numpy_noise(h: Tensor) -> Tensor:
    """Noise that a trace would hold as one number."""
    return h * float(np.random.random())  # noqa: NPY002 - as people write it


def map_samples(h: Tensor) -> Tensor:
    """A function of one sample, over all."""
    return torch.vmap(torch.sin)(h)


def determinant(h: Tensor) -> Tensor:
    """Linear algebra of a small matrix."""
    square = h.T @ h / h.shape[0] + torch.eye(12, device=h.device)
    whitened_rows = h @ torch.linalg.inv(square) + torch.linalg.eigvalsh(square)
    return whitened_rows + torch.logdet(square) + torch.linalg.solve(square, h.T).T


def spectrum(h: Tensor) -> Tensor:
    """A short-time Fourier transform."""
    window = torch.hann_window(4, device=h.device)
    bins = torch.stft(h, 4, 2, window=window, return_complex=True).abs()
    return h + bins.mean((1, 2))[:, None]


def weighted_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Classes that count unequally."""
    return F.cross_entropy(logits, y, weight=torch.tensor([1.0, 2.0, 0.5], device=y.device))


def focal_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Lin et al. 2017, arXiv:1708.02002."""
    each = F.cross_entropy(logits, y, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


def divergence(logits: Tensor, y: Tensor) -> Tensor:
    """Against a smooth target."""
    target = F.one_hot(y, 3).float() * 0.7 + 0.1
    return F.kl_div(logits.log_softmax(1), target, reduction="batchmean")


def contrastive_loss(features: Tensor, y: Tensor) -> Tensor:
    """Pairs within the batch, van den Oord et al. 2018, arXiv:1807.03748."""
    one, other = F.normalize(features[:, :3], dim=1), F.normalize(features[:, 3:], dim=1)
    scores = one @ other.T / 0.1
    return F.cross_entropy(scores, torch.arange(scores.shape[0], device=y.device))


def triplet_loss(features: Tensor, y: Tensor) -> Tensor:
    """Rolled samples as positive and negative."""
    return F.triplet_margin_loss(features, features.roll(1, 0), features.roll(2, 0), margin=0.5)


def binary_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Several labels."""
    weight = torch.tensor([1.0, 3.0, 1.0], device=y.device)
    target = F.one_hot(y, 3).float()
    return F.binary_cross_entropy_with_logits(logits, target, pos_weight=weight)


def robust_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Two of them."""
    target = F.one_hot(y, 3).float()
    return F.huber_loss(logits, target, delta=0.3) + F.smooth_l1_loss(logits, target, beta=0.2)


def ctc(logits: Tensor, y: Tensor) -> Tensor:
    """Five classes at four moments."""
    scores = logits.view(-1, 4, 5).log_softmax(2).transpose(0, 1)
    lengths = torch.full_like(y, 4), torch.ones_like(y)
    return F.ctc_loss(scores, y[:, None] + 1, *lengths, zero_infinity=True)


def gaussian_loss(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean and variance of two numbers."""
    target = torch.stack([y, y + 1], 1).float()
    return F.gaussian_nll_loss(outputs[:, :2], target, F.softplus(outputs[:, 2:]))


class Variational(nn.Module):
    """Kingma and Welling 2014, arXiv:1312.6114."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, logarithm = self.encoder(x).chunk(2, 1)
        sample = mean + torch.randn_like(mean) * (0.5 * logarithm).exp()
        return self.decoder(sample), mean, logarithm


def variational_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Reconstruction and divergence."""
    rebuilt, mean, logarithm = model(batch["x"])
    error = F.mse_loss(rebuilt, batch["x"])
    distance = -0.5 * (1 + logarithm - mean.square() - logarithm.exp()).sum(1).mean()
    return error + 0.1 * distance, {"error": error, "distance": distance}


class Denoiser(nn.Module):
    """Ho et al. 2020, arXiv:2006.11239, on rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(9, 16), nn.SiLU(), nn.Linear(16, 8))
        self.shares: Tensor
        self.register_buffer("shares", torch.cumprod(1 - torch.linspace(1e-4, 0.2, 50), 0))

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        rebuilt: Tensor = self.layers(torch.cat([x, step[:, None] / 50], 1))
        return rebuilt


def diffusion_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Noise of a random step."""
    x = batch["x"]
    step = torch.randint(0, 50, (x.shape[0],), device=x.device)
    noise = torch.randn_like(x)
    share = model.get_buffer("shares")[step][:, None]
    noisy = share.sqrt() * x + (1 - share).sqrt() * noise
    return F.mse_loss(model(noisy, step), noise)


class Adversaries(nn.Module):
    """A generator and a critic that one loss trains."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        fakes = self.generator(torch.randn(x.shape[0], 4, device=x.device))
        weights, bias = self.critic.weight, self.critic.bias
        fake_scores = F.linear(fakes, weights.detach(), bias.detach())
        critic_gap = self.critic(x) - self.critic(fakes.detach())
        return fake_scores, critic_gap


def adversarial_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Two losses, each of which reaches one of the two."""
    fake_scores, critic_gap = model(batch["x"])
    return F.softplus(-fake_scores).mean() + F.softplus(-critic_gap).mean()


def selected_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Only samples that a mask names."""
    is_chosen = batch["y"] != 2
    return F.cross_entropy(model(batch["x"])[is_chosen], batch["y"][is_chosen])


def decayed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """A penalty on every parameter."""
    penalty = sum((each.square().sum() for each in model.parameters()), torch.zeros(()))
    return F.cross_entropy(model(batch["x"]), batch["y"]) + 1e-2 * penalty
