"""``experts.html``: held-out text, each token coloured by the expert that took it.

Shape suffixes: T tokens, K experts per token, E experts.
"""

import base64
import html
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TEMPLATE = Path(__file__).with_suffix(".html")
PREFERRED = 8
"""Tokens shown beside an expert."""
LIFT = 1.25
"""How much more often than by chance an expert takes a token that is shown beside it."""


@dataclass(frozen=True)
class LayerRouting:
    """Where one layer sent the tokens of a text, best expert first."""

    name: str
    experts: int
    ids_TK: np.ndarray
    """Expert of each choice; -1 where the choice was dropped."""
    weights_TK: np.ndarray
    """Weights of the choices, not negative."""

    def sorted(self) -> "LayerRouting":
        """The same choices, each token's heaviest first."""
        kept_TK = np.where(self.ids_TK < 0, -np.inf, self.weights_TK)
        order_TK = np.argsort(-kept_TK, axis=1, kind="stable")
        ids_TK = np.take_along_axis(self.ids_TK, order_TK, axis=1)
        weights_TK = np.take_along_axis(self.weights_TK, order_TK, axis=1)
        return LayerRouting(self.name, self.experts, ids_TK, weights_TK)

    @property
    def load_E(self) -> np.ndarray:
        """Share of the choices that each expert got."""
        kept = self.ids_TK[self.ids_TK >= 0]
        return np.bincount(kept, minlength=self.experts) / max(kept.size, 1)


def preferred(routing: LayerRouting, texts: Sequence[str]) -> list[list[str]]:
    """Return for each expert the tokens it takes more often than chance, most telling first.

    The measure is the G statistic of one cell, ``n * log(n / expected)``: it wants a token to be
    both frequent here and rarer elsewhere.
    """
    load_E = routing.load_E
    everywhere: Counter[str] = Counter()
    here = [Counter[str]() for _ in range(routing.experts)]
    for text, experts in zip(texts, routing.ids_TK.tolist(), strict=True):
        for expert in experts:
            if expert >= 0:
                here[expert][text] += 1
                everywhere[text] += 1
    out = []
    for expert, counts in enumerate(here):
        scored = []
        for text, n in counts.items():
            expected = everywhere[text] * load_E[expert]
            if n >= 2 and n > LIFT * expected:
                scored.append((n * np.log(n / expected), text))
        scored.sort(key=lambda pair: (-pair[0], pair[1]))
        out.append([text for _, text in scored[:PREFERRED]])
    return out


def render(title: str, subtitle: str, texts: Sequence[str], layers: Sequence[LayerRouting], *,
           shown: int) -> str:  # fmt: skip
    """Write the page: the first ``shown`` tokens, with loads and preferences of all of them.

    ``texts`` are the tokens' own pieces of text; each layer routes all of them.
    """
    data = {
        "tokens": list(texts[:shown]),
        "layers": [_layer(layer.sorted(), texts, shown) for layer in layers],
    }
    # Inside a script element nothing may look like the end of it, nor open a comment.
    packed = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = TEMPLATE.read_text(encoding="utf-8")
    page = page.replace("__TITLE__", html.escape(f"Experts of {title}"))
    page = page.replace("__SUBTITLE__", html.escape(subtitle))
    return page.replace("__DATA__", packed)


def _layer(routing: LayerRouting, texts: Sequence[str], shown: int) -> dict[str, Any]:
    wide = routing.experts > 255
    # A dropped choice keeps its place with weight 0, so that every token has K of them.
    ids_TK = np.where(routing.ids_TK < 0, 0, routing.ids_TK)[:shown]
    weights_TK = np.where(routing.ids_TK < 0, 0.0, routing.weights_TK)[:shown]
    share_TK = weights_TK / np.maximum(weights_TK.sum(axis=1, keepdims=True), 1e-12)
    return {
        "name": routing.name,
        "experts": routing.experts,
        "top_k": routing.ids_TK.shape[1],
        "load": [round(float(share), 5) for share in routing.load_E],
        "likes": preferred(routing, texts),
        "wide": wide,
        "ids": _base64(ids_TK.astype("<u2" if wide else "u1")),
        "weights": _base64(np.rint(255 * share_TK).astype("u1")),
    }


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")
