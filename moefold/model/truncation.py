"""Truncations by the shape of a distribution: which tokens are sampled from, and which are not.

Names and values are those of the logits processors of ``transformers``, by which
``generation_config.json`` is defined; papers are named there. P prompts, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_MOST_BY_ENTROPY = 100
"""Most tokens among which ``top_h`` chooses."""


@dataclass(frozen=True)
class Truncation:
    """Further truncations of a distribution, in the order of their fields; 0 and 1 change nothing.

    The likeliest token, and any as likely, is never removed, except by ``typical_p``.
    """

    top_h: float = 0.0
    """Keep the likeliest tokens whose share of the entropy, of the likeliest 100, is at most this.
    Comes before top-k, the nucleus and min-p."""
    typical_p: float = 1.0
    """Keep the tokens of this probability whose information is closest to the entropy."""
    epsilon_cutoff: float = 0.0
    """Keep the tokens of at least this probability."""
    eta_cutoff: float = 0.0
    """Keep the tokens of at least this probability, or less where the entropy is high."""

    def first(self, logits_PV: Tensor) -> Tensor:
        """Return logits, divided by the temperature, after what comes before other truncations."""
        return _keep_entropy(logits_PV, self.top_h) if self.top_h else logits_PV

    def last(self, probability_PV: Tensor) -> Tensor:
        """Return probabilities, whose sum need not be 1, after what follows other truncations."""
        if self.typical_p < 1:
            probability_PV = _keep_typical(_normalised(probability_PV), self.typical_p)
        if self.epsilon_cutoff:
            probability_PV = _normalised(probability_PV)
            probability_PV = _keep_likely(probability_PV, self.epsilon_cutoff)
        if self.eta_cutoff:
            probability_PV = _normalised(probability_PV)
            by_entropy_P1 = self.eta_cutoff**0.5 * (-_entropy(probability_PV)).exp()
            probability_PV = _keep_likely(probability_PV, by_entropy_P1.clamp(max=self.eta_cutoff))
        return probability_PV


def _normalised(probability_PV: Tensor) -> Tensor:
    return probability_PV / probability_PV.sum(-1, keepdim=True)


def _entropy(probability_PV: Tensor) -> Tensor:
    """Return the entropy [P, 1] in nats."""
    return -torch.xlogy(probability_PV, probability_PV).sum(-1, keepdim=True)


def _keep_entropy(logits_PV: Tensor, share: float) -> Tensor:
    n_tokens = min(_MOST_BY_ENTROPY, logits_PV.shape[1])
    likeliest_PT, ids_PT = logits_PV.topk(n_tokens)
    probability_PT = likeliest_PT.softmax(-1)
    sums_PT = -torch.xlogy(probability_PT, probability_PT).cumsum(-1)
    kept_PT = sums_PT <= share * _entropy(probability_PT)
    kept_PT[:, 0] = True
    kept_PV = torch.zeros_like(logits_PV, dtype=torch.bool).scatter(1, ids_PT, kept_PT)
    return logits_PV.masked_fill(~kept_PV, -torch.inf)


def _keep_typical(probability_PV: Tensor, mass: float) -> Tensor:
    far_PV = (-probability_PV.log() - _entropy(probability_PV)).abs()
    far_sorted_PV, ids_PV = far_PV.sort(dim=-1)
    sums_PV = probability_PV.gather(-1, ids_PV).cumsum(-1)
    last_P1 = (sums_PV < mass).sum(-1, keepdim=True).clamp(max=sums_PV.shape[1] - 1)
    return probability_PV.masked_fill(far_PV > far_sorted_PV.gather(-1, last_P1), 0)


def _keep_likely(probability_PV: Tensor, least: Tensor | float) -> Tensor:
    most_P1 = probability_PV.amax(-1, keepdim=True)
    removed_PV = (probability_PV < least) & (probability_PV < most_P1)
    return probability_PV.masked_fill(removed_PV, 0)
