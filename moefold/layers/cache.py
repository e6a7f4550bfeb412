"""Key-value cache of generation: a new token costs one row instead of the whole text.

T rows, P texts, C columns (attention reads the newest L), H query heads, G key-value heads
with R = H / G query heads each, d query-key dims and v value dims per head.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moefold.data.batch import MicroBatch, pack, pack_last_tokens
from moefold.kernels.rows import upcast_dtype
from moefold.model.config import Decoder


class KeyValueCache:
    """Cached tensors of each text: rotated keys and values of this rank's heads; for latent
    attention latents and the shared rotated key; for other mixers a state and the last rows.

    If every text extends a text of the last pass by one token, a pass has one new row per text.
    Otherwise (first pass, moved window) all rows are recomputed.
    """

    def __init__(self) -> None:
        self._texts: list[list[int]] = []
        self.incremental = False
        """Whether this pass has one row per text, each extending a text of the last pass."""
        self._layers: dict[nn.Module, _LayerCache] = {}
        self.states: dict[tuple[nn.Module, str], Tensor] = {}
        """Tensors [P, ...] of fixed size, by layer and name; empty before the first pass."""

    @classmethod
    def of(cls, decoder: Decoder) -> Self | None:
        """Return an empty cache; None if any kind of layer does not declare that it caches."""
        mixers = [mixer for block in decoder.blocks for mixer in (block.attention, block.ffn)]
        # Not inherited: a plug-in's subclass may mix rows differently.
        caching = [vars(type(mixer)).get("caches") for mixer in mixers]
        return cls() if all(caching) else None

    def next_rows(self, texts: Sequence[Sequence[int]], pad_to: int = 1) -> MicroBatch:
        """Return the rows of the next pass: the last one of each text, or all."""
        indices = {tuple(text): i for i, text in enumerate(self._texts)}
        previous = [indices.get(tuple(text[:-1])) for text in texts]
        unchanged = list(range(len(self._texts)))
        self.incremental = None not in previous
        self._texts = [list(text) for text in texts]
        if not self.incremental:
            self._layers.clear()
            self.states.clear()
            return pack(texts, pad_to)
        if previous != unchanged:
            for layer in self._layers.values():
                layer.select(previous)  # type: ignore[arg-type]
            self.states = {key: _select(x, previous) for key, x in self.states.items()}  # type: ignore[arg-type]
        return pack_last_tokens(texts, pad_to)

    def text_slices(self) -> list[slice]:
        """Return the slice of rows of each text in this pass."""
        rows = [1 if self.incremental else len(text) for text in self._texts]
        ends = accumulate(rows, initial=0)
        return [slice(start, end) for start, end in pairwise(ends)]

    def has_rows(self, layer: nn.Module) -> bool:
        """Whether the layer has cached rows, so that this pass has one row per text."""
        return layer in self._layers

    def attend(
        self,
        layer: nn.Module,
        q_THd: Tensor,
        k_TGd: Tensor,
        v_TGv: Tensor | int,
        scale: float,
        window: int | None = None,
        sinks_H: Tensor | None = None,
        chunk: int | None = None,
    ) -> Tensor | None:
        """Cache a layer's keys and values of this pass, and return attention over all cached ones.

        An integer ``v_TGv`` is the number of leading key features that serve as values. Rows attend
        to the last ``window`` rows of a text, or to its last ``chunk``; ``sinks_H`` is a logit per
        head whose value is zero. Returns None in a pass of whole texts, which needs no cache.
        """
        lengths = [len(text) for text in self._texts]
        texts = len(self._texts)
        cached = self._layers.get(layer)
        new = [k_TGd] if isinstance(v_TGv, int) else [k_TGd, v_TGv]
        if cached is None:
            self._layers[layer] = _LayerCache(new, lengths)
            return None
        own = [x[:texts] for x in new]
        k_PGLd, *values = cached.append(own, chunk or window)
        if chunk is not None:
            lengths = [(length - 1) % chunk + 1 for length in lengths]
        v_PGLv = k_PGLd[..., :v_TGv] if isinstance(v_TGv, int) else values[0]
        heads = k_TGd.shape[1]
        q_PGRd = q_THd[:texts].unflatten(1, (heads, -1))
        mask = None
        columns = k_PGLd.shape[2]
        if min(lengths) < columns:  # columns before the start of a text
            ago_L = torch.arange(columns - 1, -1, -1, device=q_THd.device)
            length_P = torch.tensor(lengths).to(q_THd.device, non_blocking=True)
            mask_PL = ago_L < length_P[:, None]
            mask = mask_PL[:, None, None].expand(*q_PGRd.shape[:3], -1)
        if sinks_H is None:
            out_PGRv = F.scaled_dot_product_attention(q_PGRd, k_PGLd, v_PGLv, mask, scale=scale)
        else:
            logits_PGRL = (q_PGRd @ k_PGLd.transpose(2, 3)).mul_(scale)
            out_PGRv = _attend_with_sinks(sinks_H, logits_PGRL, mask, v_PGLv)
        out_PHv = out_PGRv.flatten(1, 2)
        padding = len(q_THd) - texts
        if not padding:
            return out_PHv
        # Padding rows, added for tensor ranks, attend to nothing.
        return F.pad(out_PHv, (0, 0, 0, 0, 0, padding))


def _attend_with_sinks(
    sinks_H: Tensor, logits_PGRL: Tensor, mask: Tensor | None, v_PGLv: Tensor
) -> Tensor:
    """Return the output of attention with a sink logit per head, whose value is zero."""
    if mask is not None:
        logits_PGRL.masked_fill_(~mask, -torch.inf)
    groups, ratio = logits_PGRL.shape[1:3]
    sinks_GR1 = sinks_H.to(logits_PGRL.dtype).view(groups, ratio, 1)
    sinks_PGR1 = sinks_GR1.expand(len(v_PGLv), -1, -1, -1)
    with_sinks = torch.cat([logits_PGRL, sinks_PGR1], -1)
    wide = upcast_dtype(logits_PGRL)
    weights_PGRL = with_sinks.softmax(-1, dtype=wide)[..., :-1]
    return weights_PGRL.to(v_PGLv.dtype) @ v_PGLv


class _LayerCache:
    """Cached keys and values of a layer, right-aligned: texts end in one column."""

    def __init__(self, tensors: Sequence[Tensor], lengths: Sequence[int]) -> None:
        """Store keys and values of whole texts, with zeros before shorter ones."""
        columns = self._columns = max(lengths)
        self._parts: list[Tensor] = []
        for x_TGd in tensors:
            groups, dim = x_TGd.shape[1:]
            x_PGCd = x_TGd.new_zeros(len(lengths), groups, 2 * columns, dim)
            valid = x_TGd[: sum(lengths)]
            for i, x_LGd in enumerate(valid.split(list(lengths))):
                first = columns - len(x_LGd)
                x_PGCd[i, :, first:columns] = x_LGd.transpose(0, 1)
            self._parts.append(x_PGCd)

    def select(self, texts: list[int]) -> None:
        """Keep only the texts with these indices, in this order."""
        self._parts = [_select(x, texts) for x in self._parts]

    def append(self, new: Sequence[Tensor], window: int | None) -> list[Tensor]:
        """Append a column, and return the columns that its rows attend to, [P, G, L, d]."""
        if self._columns == self._parts[0].shape[2]:
            # Drop columns before the window and double the rest.
            columns = min(self._columns, window or self._columns)
            oldest = self._columns - columns
            window_columns = (x[:, :, oldest:] for x in self._parts)
            self._parts = [F.pad(x_PGLd, (0, 0, 0, columns)) for x_PGLd in window_columns]
            self._columns = columns
        for x_PGCd, new_PGd in zip(self._parts, new, strict=True):
            x_PGCd[:, :, self._columns] = new_PGd
        self._columns += 1
        first = 0 if window is None else max(self._columns - window, 0)
        return [x[:, :, first : self._columns] for x in self._parts]


def _select(x: Tensor, texts: list[int]) -> Tensor:
    """Return the entries of the texts with these indices."""
    return x[torch.tensor(texts, device=x.device)]
