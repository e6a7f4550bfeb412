"""Makes ``experts.html`` when a run ends: routes held-out text once and writes the page.

Shape suffixes: T tokens, K experts per token.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from moefold.data.batch import pack
from moefold.data.tokens import Corpus
from moefold.files import write_text
from moefold.layers.flow import Flow
from moefold.model.decoder import DecoderModel
from moefold.moe.router import Routed
from moefold.training.hooks.base import Hook, JobView
from moefold.training.hooks.config import ExpertsPage
from moefold.training.hooks.experts_page import LayerRouting, render

PAGE_FILE = "experts.html"
MORE = 12
"""Loads and preferences are counted on so many times the tokens that are shown."""
ROWS = 4096
"""Tokens of one pass."""


class ExpertsPageHook(Hook):
    """Writes the page at the end; a model without experts, or a run without held-out text, none."""

    def __init__(self, record: ExpertsPage) -> None:
        self._tokens = record.tokens

    def on_stop(self, job: JobView, error: BaseException | None) -> None:
        """Write the page, unless the run failed or somebody waits for its end."""
        if isinstance(error, ValueError | KeyboardInterrupt) or not any(job.model.mixtures()):
            return
        if job.world.size > 1:
            # The page follows single tokens through a whole model, which no rank has here.
            return
        held_out = job.loader.prepared.valid
        if not held_out:
            return
        part = held_out[0]
        number, documents = choose(part.corpus, self._tokens, MORE * self._tokens)
        # Pieces no longer than in training: further positions would be new to the model.
        pieces = [
            ids_T[at : at + job.run.data.seq].tolist()
            for ids_T in documents
            for at in range(0, len(ids_T), job.run.data.seq)
        ]
        layers = route(job.model, pieces)
        ids = [token for piece in pieces for token in piece]
        spelling = job.tokenizer.token_bytes
        # Starts and ends of documents have no text; who takes them is nobody's concern.
        kept = [place for place, token in enumerate(ids) if spelling[token]]
        texts = [spelling[ids[place]].decode("utf-8", "backslashreplace") for place in kept]
        layers = [
            LayerRouting(r.name, r.experts, r.ids_TK[kept], r.weights_TK[kept]) for r in layers
        ]
        shown = sum(bool(spelling[token]) for token in documents[0][: self._tokens].tolist())
        subtitle = (
            f"{job.run.name}, step {job.step_number} · held-out document {number} of {part.name}"
        )
        page = render(job.run.name, subtitle, texts, layers, shown=shown)
        write_text(job.folder / PAGE_FILE, page)


def choose(corpus: Corpus, tokens: int, total: int) -> tuple[int, list[np.ndarray]]:
    """Return the number of the first document of ``tokens`` tokens, else of the longest one.

    With it come that document's ids and those of others, about ``total`` tokens in all.
    """
    longest = np.zeros(0, np.int64)
    number = 0
    for i in range(corpus.documents):
        ids_T = corpus.document(i)
        if len(ids_T) > len(longest):
            number, longest = i, ids_T
        if len(ids_T) >= tokens:
            break
    found, taken = [longest], len(longest)
    for i in range(corpus.documents):
        if taken >= total:
            break
        if i != number:
            found.append(corpus.document(i)[: total - taken])
            taken += len(found[-1])
    return number, found


@torch.no_grad()
def route(model: DecoderModel, pieces: Sequence[Sequence[int]]) -> list[LayerRouting]:
    """Return where each mixture sends the tokens of the pieces, each piece on its own."""
    device = model.head_weight.device
    with _listening(model) as heard:
        for group in _groups(pieces):
            model(Flow(pack(group).to(device), model.recipe, training=False))
    layers = []
    for i, mixture in model.mixtures():
        ids_TK, weights_TK = (np.concatenate(arrays) for arrays in zip(*heard[i], strict=True))
        layers.append(LayerRouting(str(i), mixture.record.router.experts, ids_TK, weights_TK))
    return layers


@contextmanager
def _listening(model: DecoderModel) -> Iterator[dict[int, list[tuple[np.ndarray, np.ndarray]]]]:
    """While open, note what each router decides, by the number of its layer."""
    heard: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    handles = []
    for i, mixture in model.mixtures():
        heard[i] = []

        def note(module: Any, given: Any, routed: Routed, into: list = heard[i]) -> None:
            routing = routed.routing
            ids_TK = routing.experts_TK
            if routing.kept_TK is not None:
                ids_TK = torch.where(routing.kept_TK, ids_TK, -1)
            into.append((ids_TK.cpu().numpy(), routing.weights_TK.float().cpu().numpy()))

        handles.append(mixture.router.register_forward_hook(note))
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def _groups(pieces: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    group: list[Sequence[int]] = []
    for piece in pieces:
        if group and sum(map(len, group)) + len(piece) > ROWS:
            yield group
            group = []
        group.append(piece)
    if group:
        yield group
