"""The next token of an answer, from the model's logits: a pure function of both and the call."""

from typing import NamedTuple

import torch

from hypergpu.serving.calls import Sampling
from hypergpu.serving.draws import uniform_draw


class TokenChoice(NamedTuple):
    """A token, and how likely the model took it and others, whatever was drawn from."""

    token: int
    log_probability: float | None
    """None: it was not asked for."""
    likely: tuple[tuple[int, float], ...]
    """The likeliest tokens with their log-probabilities, the likeliest first."""


def choose_token(
    logits: torch.Tensor, sampling: Sampling, position: int, top_tokens: int | None = None
) -> TokenChoice:
    """Choose the token at a position of an answer.

    Args:
        logits: float[vocabulary], on any device.
        sampling: How it is drawn.
        position: Of the token in the answer, from 0.
        top_tokens: How many of the likeliest are told; None: no log-probability is.
    """
    # Processors agree on float64 to more digits than a draw can tell apart; some GPUs have none.
    logits = logits.detach().to("cpu", torch.float64)
    token = _likeliest(logits) if sampling.temperature == 0 else _draw(logits, sampling, position)
    if top_tokens is None:
        return TokenChoice(token, None, ())
    log_probabilities = logits - torch.logsumexp(logits, dim=0)
    values, tokens = torch.topk(log_probabilities, min(top_tokens, logits.numel()))
    likely = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return TokenChoice(token, float(log_probabilities[token]), likely)


def _likeliest(logits: torch.Tensor) -> int:
    """The likeliest token, of equals the first."""
    return int(torch.nonzero(logits == logits.max())[0])


def _draw(logits: torch.Tensor, sampling: Sampling, position: int) -> int:
    ordered_logits, order = _likeliest_first(logits, sampling.top_k)
    probabilities = torch.softmax(ordered_logits / sampling.temperature, dim=0)
    totals = torch.cumsum(probabilities, dim=0)
    if sampling.top_p < 1:
        # The token that reaches top_p is the last one that may come.
        count = int((totals - probabilities < sampling.top_p).sum())
        totals = totals[: max(1, count)]
    point = uniform_draw(sampling.seed, position) * float(totals[-1])
    place = int(torch.searchsorted(totals, point, right=True))
    return int(order[min(place, totals.numel() - 1)])


def _likeliest_first(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and their tokens, the likeliest first and of equals the first; 0: of all tokens."""
    if not top_k or top_k >= logits.numel():
        ordered_logits, order = torch.sort(logits, descending=True, stable=True)
        return ordered_logits, order
    least = torch.topk(logits, top_k).values[-1]
    candidates = torch.nonzero(logits >= least).flatten()
    ordered_logits, order = torch.sort(logits[candidates], descending=True, stable=True)
    return ordered_logits[:top_k], candidates[order[:top_k]]
