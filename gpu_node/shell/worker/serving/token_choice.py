"""The next token of an answer, from the model's logits: a pure function of both and the call. And
how far a token that somebody else claims is from it.
"""

from typing import NamedTuple

import torch

from hypergpu.serving.calls import Sampling
from hypergpu.serving.draws import uniform_draw

_LEAST_SLOPE = 1e-9


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
    logits = _exact(logits)
    is_greedy = sampling.temperature == 0
    token = _likeliest(logits) if is_greedy else _Draw(logits, sampling, position).token
    if top_tokens is None:
        return TokenChoice(token, None, ())
    log_probabilities = logits - torch.logsumexp(logits, dim=0)
    values, tokens = torch.topk(log_probabilities, min(top_tokens, logits.numel()))
    likely = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return TokenChoice(token, float(log_probabilities[token]), likely)


def token_margin(logits: torch.Tensor, sampling: Sampling, position: int, token: int) -> float:
    """How far a token is from the one that `choose_token` gives: about the least change of the
    logits that would have given it, in standard deviations of the logits; 0: it is that one.

    Rounding changes logits by hundredths of a deviation, so that an honest node's margins are
    small; other weights change them by more, and other sampling takes tokens that no small change
    explains. For a draw it is the smaller of two changes: one that puts the token in the place of
    the one drawn, and one that moves the point between tokens by so much probability.

    Args:
        logits: float[vocabulary], of whoever checks.
        sampling: As the call has it.
        position: Of the token in the answer, from 0.
        token: As it was claimed, of the vocabulary.

    References:
        Karvonen et al. 2025, arXiv:2511.20621 (margins of claimed tokens under a shared seed).
    """
    logits = _exact(logits)
    if sampling.temperature == 0:
        distance = float(logits.max() - logits[token])
    else:
        distance = _Draw(logits, sampling, position).distance(token)
    return distance / max(float(logits.std()), _LEAST_SLOPE)


def _exact(logits: torch.Tensor) -> torch.Tensor:
    # Processors agree on float64 to more digits than a draw can tell apart; some GPUs have none.
    return logits.detach().to("cpu", torch.float64)


def _likeliest(logits: torch.Tensor) -> int:
    """The likeliest token, of equals the first."""
    return int(torch.nonzero(logits == logits.max())[0])


class _Draw:
    """The draw of a token: a point in the totals of the tokens' probabilities, likeliest first."""

    def __init__(self, logits: torch.Tensor, sampling: Sampling, position: int) -> None:
        self._logits = logits
        self._temperature = sampling.temperature
        kept_logits, kept_order = _likeliest_first(logits, sampling.top_k)
        self._log_total = torch.logsumexp(kept_logits / sampling.temperature, dim=0)
        probabilities, totals = self._shares(kept_logits)
        if sampling.top_p < 1:
            # The token that reaches top_p is the last one that may come.
            count = int((totals - probabilities < sampling.top_p).sum())
            totals = totals[: max(1, count)]
        self._point = uniform_draw(sampling.seed, position) * float(totals[-1])
        place = int(torch.searchsorted(totals, self._point, right=True))
        self.token = int(kept_order[min(place, totals.numel() - 1)])
        """The token that is drawn."""

    def _shares(self, ordered_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities of tokens, of those that may come, and their totals."""
        probabilities = torch.exp(ordered_logits / self._temperature - self._log_total)
        return probabilities, torch.cumsum(probabilities, dim=0)

    def distance(self, token: int) -> float:
        """About the least change of the logits by which another token would have been drawn."""
        if token == self.token:
            return 0.0
        # Tokens that may not come are beyond the point, as far as they would be likely.
        ordered_logits, order = _likeliest_first(self._logits, 0)
        probabilities, totals = self._shares(ordered_logits)
        place, own_place = (int((order == each).nonzero()[0]) for each in (token, self.token))
        end = float(totals[place])
        edge = end if place < own_place else end - float(probabilities[place])
        gap = abs(self._point - edge)
        # A change of all logits on one side of the edge moves it by so much at most.
        slope = max(edge * (1 - edge), _LEAST_SLOPE)
        by_order = abs(float(self._logits[token] - self._logits[self.token]))
        return min(by_order, self._temperature * gap / slope)


def _likeliest_first(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and their tokens, the likeliest first and of equals the first; 0: of all tokens."""
    if not top_k or top_k >= logits.numel():
        ordered_logits, order = torch.sort(logits, descending=True, stable=True)
        return ordered_logits, order
    least = torch.topk(logits, top_k).values[-1]
    candidates = torch.nonzero(logits >= least).flatten()
    ordered_logits, order = torch.sort(logits[candidates], descending=True, stable=True)
    return ordered_logits[:top_k], candidates[order[:top_k]]
