"""``experts.html``: held-out text, each token coloured by the expert that computed it.

T tokens, K experts per token, E experts.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moefold.data.batch import pack
from moefold.data.index import Corpus
from moefold.files import write_text
from moefold.layers.flow import Flow
from moefold.model.decoder import DecoderModel
from moefold.moe.router import Routed
from moefold.training.hooks.base import Hook, JobView
from moefold.training.hooks.config import ExpertsPage
from moefold.training.report import encode_base64, render_page

TEMPLATE = Path(__file__).with_suffix(".html")
PAGE_FILE = "experts.html"
STATISTICS_FACTOR = 12
"""Loads and preferred tokens are counted over this many times the tokens shown."""
MAX_PASS_TOKENS = 4096
"""Maximum number of tokens of one forward pass."""
MAX_PREFERRED = 8
"""Number of preferred tokens shown for an expert."""
MIN_LIFT = 1.25
"""Minimum ratio of a preferred token's count at an expert to the count expected by chance."""


class ExpertsPageHook(Hook):
    """Writes the page at the end of a run on one rank that has experts and held-out text."""

    def __init__(self, record: ExpertsPage) -> None:
        self._tokens = record.tokens

    def on_stop(self, job: JobView, error: BaseException | None) -> None:
        """Write the page, unless the run failed with a ``ValueError`` or by Ctrl-C."""
        failed = isinstance(error, ValueError | KeyboardInterrupt)
        # The page needs the whole model, which no rank of several has.
        if failed or job.world.size > 1 or not any(job.model.moe_layers()):
            return
        held_out = job.loader.prepared.valid
        if not held_out:
            return
        part = held_out[0]
        total = STATISTICS_FACTOR * self._tokens
        number, documents = choose_documents(part.corpus, self._tokens, total)
        # Pieces are no longer than in training: the model has not seen later positions.
        pieces = [
            ids_T[start : start + job.run.data.seq].tolist()
            for ids_T in documents
            for start in range(0, len(ids_T), job.run.data.seq)
        ]
        layers = record_routing(job.model, pieces)
        ids = [token for piece in pieces for token in piece]
        spelling = job.tokenizer.token_bytes
        # Special tokens for starts and ends of documents have no text to show.
        with_text = [i for i, token in enumerate(ids) if spelling[token]]
        texts = [spelling[ids[i]].decode("utf-8", "backslashreplace") for i in with_text]
        layers = [
            replace(r, ids_TK=r.ids_TK[with_text], weights_TK=r.weights_TK[with_text])
            for r in layers
        ]
        shown = sum(bool(spelling[token]) for token in documents[0][: self._tokens].tolist())
        where = f"held-out document {number} of {part.name}"
        title = job.folder.resolve().name
        subtitle = f"{title}, step {job.step_number} · {where}"
        page = render_experts(title, subtitle, texts, layers, shown=shown)
        write_text(job.folder / PAGE_FILE, page)


@dataclass(frozen=True)
class LayerRouting:
    """One layer's routing of the tokens of a text, best expert first."""

    name: str
    experts: int
    ids_TK: np.ndarray
    """Chosen experts; -1 where the choice was dropped."""
    weights_TK: np.ndarray
    """Routing weights of the choices, not negative."""

    @property
    def load_E(self) -> np.ndarray:
        """Share of the choices that fell on each expert."""
        chosen = self.ids_TK[self.ids_TK >= 0]
        return np.bincount(chosen, minlength=self.experts) / max(chosen.size, 1)


def preferred_tokens(routing: LayerRouting, texts: Sequence[str]) -> list[list[str]]:
    """Return for each expert the tokens it computes more often than by chance, strongest first.

    They are ranked by the G statistic of one cell, ``n * log(n / expected)``, which favours tokens
    that are frequent at the expert and rarer elsewhere.
    """
    load_E = routing.load_E
    everywhere: Counter[str] = Counter()
    by_expert = [Counter[str]() for _ in range(routing.experts)]
    for text, experts in zip(texts, routing.ids_TK.tolist(), strict=True):
        for expert in experts:
            if expert >= 0:
                by_expert[expert][text] += 1
                everywhere[text] += 1
    preferred = []
    for expert, counts in enumerate(by_expert):
        scored = []
        for text, count in counts.items():
            expected = everywhere[text] * load_E[expert]
            if count >= 2 and count > MIN_LIFT * expected:
                scored.append((count * np.log(count / expected), text))
        scored.sort(key=lambda pair: (-pair[0], pair[1]))
        preferred.append([text for _, text in scored[:MAX_PREFERRED]])
    return preferred


def render_experts(
    title: str, subtitle: str, texts: Sequence[str], layers: Sequence[LayerRouting], shown: int
) -> str:
    """Return the page: the first ``shown`` tokens, with loads and preferences over all tokens.

    ``texts`` has the text of each token; each of ``layers`` routes all of them.
    """
    page_layers = []
    for routing in layers:
        two_bytes = routing.experts > 255
        ids_TK = routing.ids_TK[:shown]
        kept_TK = np.where(ids_TK < 0, -np.inf, routing.weights_TK[:shown])
        order_TK = np.argsort(-kept_TK, axis=1, kind="stable")  # largest weight first
        # A dropped choice stays, with weight 0, so that every token has K choices.
        ids_TK = np.take_along_axis(ids_TK.clip(0), order_TK, axis=1)
        weights_TK = np.take_along_axis(kept_TK.clip(0), order_TK, axis=1)
        share_TK = weights_TK / np.maximum(weights_TK.sum(axis=1, keepdims=True), 1e-12)
        layer = {
            "name": routing.name,
            "experts": routing.experts,
            "top_k": routing.ids_TK.shape[1],
            "load": [round(float(share), 5) for share in routing.load_E],
            "likes": preferred_tokens(routing, texts),
            "wide": two_bytes,
            "ids": encode_base64(ids_TK.astype("<u2" if two_bytes else "u1")),
            "weights": encode_base64(np.rint(255 * share_TK).astype("u1")),
        }
        page_layers.append(layer)
    data = {"tokens": list(texts[:shown]), "layers": page_layers}
    return render_page(TEMPLATE, f"Experts of {title}", subtitle, data)


def choose_documents(corpus: Corpus, tokens: int, total: int) -> tuple[int, list[np.ndarray]]:
    """Return the number of the first document of at least ``tokens`` tokens, else the longest one.

    Also returns the ids of that document and of others, at most about ``total`` tokens in all.
    """
    longest = np.zeros(0, np.int64)
    number = 0
    for i in range(corpus.n_documents):
        ids_T = corpus.document(i)
        if len(ids_T) > len(longest):
            number = i
            longest = ids_T
        if len(ids_T) >= tokens:
            break
    documents = [longest]
    num_tokens = len(longest)
    for i in range(corpus.n_documents):
        if num_tokens >= total:
            break
        if i != number:
            documents.append(corpus.document(i)[: total - num_tokens])
            num_tokens += len(documents[-1])
    return number, documents


@torch.no_grad()
def record_routing(model: DecoderModel, pieces: Sequence[Sequence[int]]) -> list[LayerRouting]:
    """Return each MoE layer's routing of the pieces' tokens; each piece is its own segment."""
    device = model.head_weight.device
    recorded = {i: list[tuple[np.ndarray, np.ndarray]]() for i, _ in model.moe_layers()}

    def record(routings: list[Any], module: Any, inputs: Any, routed: Routed) -> None:
        ids_TK = routed.decision.experts_TK
        kept_TK = routed.decision.kept_TK
        ids_TK = ids_TK if kept_TK is None else torch.where(kept_TK, ids_TK, -1)
        routings.append((ids_TK.cpu().numpy(), routed.weights_TK.float().cpu().numpy()))

    with ExitStack() as hooks:
        for i, mixture in model.moe_layers():
            hook = mixture.router.register_forward_hook(partial(record, recorded[i]))
            hooks.enter_context(hook)
        pieces_per_pass = max(1, MAX_PASS_TOKENS // max(map(len, pieces)))
        for start in range(0, len(pieces), pieces_per_pass):
            rows = pack(pieces[start : start + pieces_per_pass]).to(device)
            model(Flow(rows, model.precision_policy, training=False))
    layers = []
    for i, mixture in model.moe_layers():
        if not recorded[i]:  # multi-token blocks run only in training
            continue
        ids_TK, weights_TK = (np.concatenate(arrays) for arrays in zip(*recorded[i], strict=True))
        layers.append(LayerRouting(str(i), mixture.record.router.experts, ids_TK, weights_TK))
    return layers
