"""Keys and values of texts that are being written, so that a token costs one row and not a text.

T rows, P texts, L tokens of a text so far, H query heads, G key-value heads with R = H / G query
heads each, d query-key dims and v value dims per head.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn

from moefold.data.batch import MicroBatch, pack
from moefold.model.config import Decoder


class KeyValueCache:
    """What attention layers keep of each text's rows: turned keys, and values of all heads here.

    A text that goes on one of the last pass by one token has one new row in the next. Where any
    text does not (the first pass, a window that moved on), all rows are computed anew.
    """

    def __init__(self) -> None:
        self._texts: list[list[int]] = []
        self._kept: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    @classmethod
    def of(cls, decoder: Decoder) -> Self | None:
        """Return an empty one; None where a layer is not known to keep all that later rows see."""
        parts = [part for block in decoder.blocks for part in (block.attention, block.ffn)]
        # What a class says of itself: one from outside that inherits may mix rows in another way.
        return cls() if all(vars(type(part)).get("caches") for part in parts) else None

    def rows(self, texts: Sequence[Sequence[int]], pad_to: int = 1) -> MicroBatch:
        """Return the rows that the next pass has to compute: of each text the last, or all."""
        places = {tuple(text): i for i, text in enumerate(self._texts)}
        found = [places.get(tuple(text[:-1])) for text in texts]
        self._texts = [list(text) for text in texts]
        if None in found:
            self._kept.clear()
            return pack(texts, pad_to)
        self._kept = {layer: [kept[i] for i in found] for layer, kept in self._kept.items()}  # type: ignore[index]
        rows = pack([text[-1:] for text in texts], pad_to)
        positions_T = rows.positions_T.clone()
        positions_T[: len(texts)] = torch.tensor([len(text) - 1 for text in texts])
        return replace(rows, positions_T=positions_T)

    def attend(
        self,
        layer: nn.Module,
        q_THd: Tensor,
        k_TGd: Tensor,
        v_TGv: Tensor,
        scale: float,
        window: int | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor | None:
        """Keep a layer's keys and values of this pass, and return what its rows see of all.

        Rows see the last ``window`` of a text; ``sinks_H`` is a logit of each head whose value is
        zero. Returns None in a pass of whole texts, whose rows see no others.
        """
        kept = self._kept.get(layer)
        lengths = [len(text) if kept is None else 1 for text in self._texts]
        parts = [x[: sum(lengths)].split(lengths) for x in (k_TGd, v_TGv)]
        new = list(zip(*parts, strict=True))
        if kept is None:
            self._kept[layer] = new
            return None
        self._kept[layer] = [
            (_joined(k, k_1, window), _joined(v, v_1, window))
            for (k, v), (k_1, v_1) in zip(kept, new, strict=True)
        ]
        out_THv = q_THd.new_zeros(*q_THd.shape[:2], v_TGv.shape[2])
        for row, (k_LGd, v_LGv) in enumerate(self._kept[layer]):
            q_GRd = q_THd[row].unflatten(0, (k_LGd.shape[1], -1))
            logits_GRL = torch.einsum("grd,lgd->grl", q_GRd, k_LGd) * scale
            if sinks_H is not None:
                sinks_GR1 = sinks_H.to(logits_GRL.dtype).view(*logits_GRL.shape[:2], 1)
                logits_GRL = torch.cat([logits_GRL, sinks_GR1], -1)
            wide = torch.promote_types(logits_GRL.dtype, torch.float32)
            weights_GRL = logits_GRL.softmax(-1, dtype=wide).to(v_LGv.dtype)
            seen_GRL = weights_GRL[..., : len(v_LGv)]
            out_THv[row] = torch.einsum("grl,lgv->grv", seen_GRL, v_LGv).flatten(0, 1)
        return out_THv


def _joined(old_LGd: Tensor, new_LGd: Tensor, window: int | None) -> Tensor:
    """Return a text's keys or values with those of its new row, of a window the last ones."""
    joined = torch.cat([old_LGd, new_LGd])
    return joined if window is None else joined[-window:]
