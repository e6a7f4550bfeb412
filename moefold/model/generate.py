"""Sampling from a model: several prompts at once, as segments of one forward pass.

T rows, V vocabulary, P prompts.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

NextLogits = Callable[[Sequence[Sequence[int]]], Tensor]
"""A function from the token ids of P texts to the logits [P, V] of their next tokens."""


def generate(
    next_logits: NextLogits, prompts: Sequence[Sequence[int]], tokens: int, **how: Any
) -> list[list[int]]:
    """Return the generated token ids of each prompt; arguments as for :func:`stream`."""
    texts: list[list[int]] = [[] for _ in prompts]
    for written in stream(next_logits, prompts, tokens, **how):
        for i, token in written.items():
            texts[i].append(token)
    return texts


@torch.no_grad()
def stream(
    next_logits: NextLogits,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    ends: Collection[int] = (),
    vocab: int | None = None,
    window: int | None = None,
) -> Iterator[dict[int, int]]:
    """Yield the new token of each unfinished prompt, by prompt index, once per forward pass.

    Args:
        next_logits: computes the logits, such as :meth:`DecoderModel.next_logits`.
        prompts: token ids of each prompt; none may be empty.
        tokens: maximum number of new tokens per prompt.
        temperature: 0 is greedy decoding.
        top_p: nucleus sampling: draw from the smallest set of tokens with this probability.
        top_k: draw from the ``top_k`` likeliest tokens, and any as likely as the last of them.
        seed: seed of each prompt's generator.
        ends: ids of end tokens, which finish a text and are not returned.
        vocab: ids from ``vocab`` on are never drawn (padding rows of the embedding).
        window: most tokens in context; a text that outgrows it continues from its newest half.

    Raises:
        ValueError: for an empty prompt, a temperature below 0, or a top_p outside (0, 1].
    """
    if any(not len(p) for p in prompts):
        raise ValueError("a prompt is empty; give at least one character")
    if not (temperature >= 0 and 0 < top_p <= 1):
        raise ValueError(
            f"temperature {temperature} must be at least 0, and top_p {top_p} above 0 and at most 1"
        )
    # A generator for each prompt: its text does not depend on the other prompts of the batch.
    draws = [torch.Generator().manual_seed(seed) for _ in prompts]
    texts, open_ = [list(p) for p in prompts], list(range(len(prompts)))
    starts = [max(len(p) - (window or len(p)), 0) for p in prompts]
    for _ in range(tokens):
        if not open_:
            break
        for i in open_:
            if window and len(texts[i]) - starts[i] > window:
                # Half at once: the rest has to be recomputed, and should not be at each token.
                starts[i] = len(texts[i]) - (window + 1) // 2
        logits_PV = next_logits([texts[i][starts[i] :] for i in open_])
        streams = [draws[i] for i in open_]
        logits_PV = logits_PV[:, :vocab].double().cpu()
        if top_k:
            least_P1 = logits_PV.topk(min(top_k, logits_PV.shape[1])).values[:, -1:]
            logits_PV = logits_PV.masked_fill(logits_PV < least_P1, -torch.inf)
        drawn = zip(open_, _draw(logits_PV, temperature, top_p, streams), strict=True)
        written = {i: token for i, token in drawn if token not in ends}
        for i, token in written.items():
            texts[i].append(token)
        open_ = list(written)
        if written:
            yield written


def _draw(
    logits_PV: Tensor, temperature: float, top_p: float, draws: Sequence[torch.Generator]
) -> list[int]:
    if temperature == 0:
        return logits_PV.argmax(-1).tolist()
    probability_PV, ids_PV = (logits_PV / temperature).softmax(-1), None
    if top_p < 1:
        probability_PV, ids_PV = torch.sort(probability_PV, dim=-1, descending=True, stable=True)
    sums_PV = probability_PV.cumsum(-1)
    whole_P1 = sums_PV[:, -1:]
    if top_p < 1:
        last_P1 = torch.searchsorted(sums_PV, torch.full_like(whole_P1, top_p))
        whole_P1 = sums_PV.gather(-1, last_P1.clamp_(max=sums_PV.shape[1] - 1))
    # In (0, 1], so that a token of probability 0 is never found.
    drawn = [1 - torch.rand(1, generator=stream, dtype=torch.float64) for stream in draws]
    place_P1 = torch.searchsorted(sums_PV, torch.stack(drawn) * whole_P1)
    return (place_P1 if ids_PV is None else ids_PV.gather(-1, place_P1)).flatten().tolist()
