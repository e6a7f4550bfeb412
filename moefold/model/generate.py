"""Text from a model: several prompts at once, as segments of one pass.

T rows, V vocabulary, P prompts.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

NextLogits = Callable[[Sequence[Sequence[int]]], Tensor]
"""From the tokens of each text to the logits [P, V] of what follows it."""


def generate(
    next_logits: NextLogits, prompts: Sequence[Sequence[int]], tokens: int, **how: Any
) -> list[list[int]]:
    """Return what the model writes after each prompt, without the prompt; see :func:`stream`."""
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
    """Yield each pass's new tokens, by the number of the prompt that they go on from.

    Args:
        next_logits: what gives the logits, such as :meth:`DecoderModel.next_logits`.
        prompts: token ids of each prompt; none is empty.
        tokens: at most so many tokens each.
        temperature: 0 takes the likeliest token each time.
        top_p: the smallest set of tokens with this probability is drawn from.
        top_k: of the likeliest so many tokens, with those as likely as the last of them.
        seed: the same seed draws the same text.
        ends: tokens after which a text is finished; they are not returned.
        vocab: ids from here on are never drawn (rows of the embedding without a token).
        window: the model sees at most so many of the newest tokens; of more, the newest half.

    Raises:
        ValueError: for an empty prompt, a temperature below 0, or a top_p outside (0, 1].
    """
    if any(not len(p) for p in prompts):
        raise ValueError("a prompt has no tokens; give at least one character to go on from")
    if not (temperature >= 0 and 0 < top_p <= 1):
        raise ValueError(
            f"temperature {temperature} and top_p {top_p}: the first is at least 0, the second "
            f"above 0 and at most 1"
        )
    # One stream a prompt: what one writes does not depend on the others beside it.
    draws = [torch.Generator().manual_seed(seed) for _ in prompts]
    texts, open_ = [list(p) for p in prompts], list(range(len(prompts)))
    starts = [max(len(p) - (window or len(p)), 0) for p in prompts]
    for _ in range(tokens):
        if not open_:
            break
        for i in open_:
            if window and len(texts[i]) - starts[i] > window:
                # Half goes at once: what stays is seen anew, which is then not due at each token.
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
    # Above 0 and at most 1, so that what has no probability is never found.
    drawn = [1 - torch.rand(1, generator=stream, dtype=torch.float64) for stream in draws]
    place_P1 = torch.searchsorted(sums_PV, torch.stack(drawn) * whole_P1)
    return (place_P1 if ids_PV is None else ids_PV.gather(-1, place_P1)).flatten().tolist()
