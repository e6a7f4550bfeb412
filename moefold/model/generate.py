"""Sampling from a model: several prompts at once, as segments of one forward pass.

T rows, V vocabulary, P prompts.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefold.model.logits import LogitRules
from moefold.model.truncation import Truncation

NextLogits = Callable[[Sequence[Sequence[int]]], Tensor]
"""A function from the token ids of P texts to the logits [P, V] of their next tokens."""


def generate(
    next_logits: NextLogits, prompts: Sequence[Sequence[int]], tokens: int, **sampling: Any
) -> list[list[int]]:
    """Return the generated token ids of each prompt; arguments as for :func:`stream_tokens`."""
    texts: list[list[int]] = [[] for _ in prompts]
    for new in stream_tokens(next_logits, prompts, tokens, **sampling):
        for i, token in new.items():
            texts[i].append(token)
    return texts


@torch.no_grad()
def stream_tokens(
    next_logits: NextLogits,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    min_p: float = 0.0,
    truncation: Truncation | None = None,
    rules: LogitRules | None = None,
    seed: int = 0,
    stop_ids: Collection[int] = (),
    vocab: int | None = None,
    window: int | None = None,
) -> Iterator[dict[int, int]]:
    """Yield the new token of each unfinished prompt, by prompt index, once per forward pass.

    Args:
        next_logits: computes the logits, such as :meth:`DecoderModel.next_logits`.
        prompts: token ids of each prompt; none may be empty.
        tokens: maximum number of new tokens per prompt.
        temperature: 0 is greedy decoding.
        top_p: nucleus sampling: sample from the smallest set of tokens with this probability.
        top_k: sample from the ``top_k`` likeliest tokens, and any as likely as the last of them.
        min_p: sample from tokens with at least this share of the likeliest one's probability.
        truncation: what else decides which tokens are sampled from.
        rules: changes of the logits before a token is chosen.
        seed: seed of each prompt's generator.
        stop_ids: ids of end tokens, which finish a text and are not returned.
        vocab: ids from ``vocab`` on are never sampled (padding rows of the embedding).
        window: most tokens in context; a longer text continues from the window's newest half.

    Raises:
        ValueError: for an empty prompt, a temperature below 0, a top_p outside (0, 1], or a min_p
            outside [0, 1].
    """
    if any(not len(p) for p in prompts):
        raise ValueError("a prompt is empty; give at least one character")
    if not (temperature >= 0 and 0 < top_p <= 1):
        raise ValueError(
            f"temperature {temperature} must be at least 0, and top_p {top_p} above 0 and at most 1"
        )
    if not 0 <= min_p <= 1:
        raise ValueError(f"min_p {min_p} must be at least 0 and at most 1")
    # A generator for each prompt: its text does not depend on the other prompts of the batch.
    generators = [torch.Generator().manual_seed(seed) for _ in prompts]
    texts = [list(p) for p in prompts]
    active = list(range(len(prompts)))
    starts = [max(len(p) - (window or len(p)), 0) for p in prompts]
    for _ in range(tokens):
        if not active:
            break
        for i in active:
            if window and len(texts[i]) - starts[i] > window:
                # Drop half at once, as the rest must be recomputed whenever the window moves.
                starts[i] = len(texts[i]) - (window + 1) // 2
        logits_PV = next_logits([texts[i][starts[i] :] for i in active])
        logits_PV = logits_PV[:, :vocab].double().cpu()
        if rules is not None:
            rows = zip(active, logits_PV, strict=True)
            logits_PV = torch.stack(
                [
                    rules.apply(row_V, texts[i], len(texts[i]) - len(prompts[i]), tokens, stop_ids)
                    for i, row_V in rows
                ]
            )
        if temperature == 0:
            sampled = logits_PV.argmax(-1).tolist()
        else:
            candidates = candidates_of(
                logits_PV / temperature, top_k, top_p, min_p, truncation or Truncation()
            )
            sampled = _sample(candidates, [generators[i] for i in active])
        new = {i: t for i, t in zip(active, sampled, strict=True) if t not in stop_ids}
        for i, token in new.items():
            texts[i].append(token)
        active = list(new)
        if new:
            yield new


class Candidates(NamedTuple):
    """The tokens that are sampled from, by row."""

    probability_PV: Tensor
    """Not negative; the sums over V need not be 1."""
    ids_PV: Tensor | None
    """The tokens of these probabilities; None if they are in the order of the vocabulary."""


def candidates_of(
    logits_PV: Tensor, top_k: int | None, top_p: float, min_p: float, truncation: Truncation
) -> Candidates:
    """Return what is sampled from, given logits [P, V] that are divided by the temperature."""
    logits_PV = truncation.first(logits_PV)
    if top_k:
        least_P1 = logits_PV.topk(min(top_k, logits_PV.shape[1])).values[:, -1:]
        logits_PV = logits_PV.masked_fill(logits_PV < least_P1, -torch.inf)
    probability_PV = logits_PV.softmax(-1)
    ids_PV = None
    if top_p < 1 or min_p > 0:
        probability_PV, ids_PV = torch.sort(probability_PV, dim=-1, descending=True, stable=True)
        places_V = torch.arange(probability_PV.shape[1])
        kept_P1 = count_kept(probability_PV, top_p, min_p)
        probability_PV = probability_PV.masked_fill(places_V >= kept_P1, 0)
    return Candidates(truncation.last(probability_PV), ids_PV)


def _sample(candidates: Candidates, generators: Sequence[torch.Generator]) -> list[int]:
    """Draw a token of each row."""
    probability_PV, ids_PV = candidates
    sums_PV = probability_PV.cumsum(-1)
    # Uniform in (0, 1], so that a token of probability 0 is never sampled.
    uniform = [1 - torch.rand(1, generator=g, dtype=torch.float64) for g in generators]
    index_P1 = torch.searchsorted(sums_PV, torch.stack(uniform) * sums_PV[:, -1:])
    return (index_P1 if ids_PV is None else ids_PV.gather(-1, index_P1)).flatten().tolist()


def count_kept(probability_PV: Tensor, top_p: float, min_p: float) -> Tensor:
    """Return int64 [P, 1]: how many tokens are sampled from, at least 1.

    ``probability_PV`` is in descending order. The nucleus of ``top_p`` is found first.
    """
    n_tokens = probability_PV.shape[1]
    last_P1 = torch.full_like(probability_PV[:, :1], n_tokens - 1, dtype=torch.int64)
    if top_p < 1:
        sums_PV = probability_PV.cumsum(-1)
        last_P1 = torch.searchsorted(sums_PV, torch.full_like(sums_PV[:, :1], top_p))
        last_P1.clamp_(max=n_tokens - 1)
    likely_P1 = (probability_PV >= min_p * probability_PV[:, :1]).sum(-1, keepdim=True)
    return torch.minimum(last_P1 + 1, likely_P1)
