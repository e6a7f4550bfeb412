"""Generation that records the experts of each token, so that a training step can replay them.

A token's choice depends on the tokens up to it alone, so choices are kept by node of a tree of
texts: texts of one prompt share its nodes, and whatever passes computed a text, cached or whole,
each of its tokens has one node.

T rows, K places for experts in a row, N rows of this rank in a pass.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moefold.data.batch import MicroBatch
from moefold.layers.saved_tensors import RoutingDecisions
from moefold.model.generate import generate
from moefold.moe.router import Decision
from moefold.parallel.apply import ModelParts
from moefold.parallel.pipeline.score import incremental_logits, next_logits
from moefold.training.routing import write_choices


def generate_texts(
    parts: ModelParts,
    prompts: Sequence[list[int]],
    step: int,
    routing: str | Path | None = None,
    **options: Any,
) -> list[list[int]]:
    """Return the token ids generated after each prompt; all ranks call it.

    Args:
        parts: the model.
        prompts: token ids of each prompt.
        step: the training step, counted from 0, under which routing is recorded.
        routing: folder to which the experts of all tokens of the texts are written, as
            ``train.routing.replay`` reads them. A prompt and its new tokens are a text, and texts
            are numbered as ``pack([*prompt, *new], ...)`` numbers them.
        options: those of :func:`moefold.model.generate.generate`.
    """
    if routing is None:
        return generate(incremental_logits(parts), prompts, **options)
    recorder = TextRecorder(parts)
    texts = generate(incremental_logits(parts, recorder.begin), prompts, **options)
    recorder.write(Path(routing), step, [[*p, *t] for p, t in zip(prompts, texts, strict=True)])
    return texts


class TextRecorder:
    """The choices of this rank's routers in passes through texts."""

    def __init__(self, parts: ModelParts) -> None:
        self._parts = parts
        self._children: dict[tuple[int, int], int] = {}
        """Nodes by the node of the text without its last token, and that token."""
        self._recorded: set[int] = set()
        """Nodes of which some rank has the choices."""
        self._nodes_N: list[Tensor] = []
        """Nodes of this rank's rows, by pass."""
        self._chosen_NK: dict[str, list[Tensor]] = {}
        """Their choices, by layer and pass."""

    def begin(self, texts: Sequence[Sequence[int]], rows: MicroBatch) -> RoutingDecisions:
        """Return the decisions of a pass through the last tokens of texts, which are recorded."""
        ends = zip(map(self._path, texts), rows.lengths, strict=True)
        nodes = list(chain.from_iterable(path[len(path) - length :] for path, length in ends))
        self._recorded.update(nodes)
        local_N = rows.full_row_T[: rows.n_valid].cpu()
        self._nodes_N.append(torch.tensor(nodes)[local_N])
        return RoutingDecisions(on_new=partial(self._record, rows.n_valid))

    def _record(self, n_valid: int, key: str, decision: Any) -> None:
        if isinstance(decision, Decision):
            chosen_NK = decision.experts_TK[:n_valid].to("cpu", torch.int32)
            self._chosen_NK.setdefault(key, []).append(chosen_NK)

    def write(self, folder: Path, step: int, texts: Sequence[Sequence[int]]) -> None:
        """Write the choices for all tokens of texts, and compute those that no pass has computed.

        These are each text's last token, and what a moved window has left out.
        """
        paths = [self._path(text) for text in texts]
        if missing := [t for t, p in zip(texts, paths, strict=True) if not self._recorded >= {*p}]:
            next_logits(self._parts, missing, record=self.begin)
        # The first pass through a node is the one that generated from it.
        row_of = {n: row for row, n in reversed([*enumerate(torch.cat(self._nodes_N).tolist())])}
        nodes = list(chain.from_iterable(paths))
        ids = list(chain.from_iterable(texts))
        tokens = [token for token, node in enumerate(nodes) if node in row_of]
        rows = [row_of[nodes[token]] for token in tokens]
        chosen = {key: torch.cat(parts)[rows] for key, parts in self._chosen_NK.items()}
        own_ids = torch.tensor([ids[token] for token in tokens], dtype=torch.int64)
        numbers = torch.tensor(tokens, dtype=torch.int64)
        write_choices(folder, step, self._parts, (numbers, own_ids), chosen)

    def _path(self, text: Sequence[int]) -> list[int]:
        """Return the nodes of a text's tokens."""
        path = list[int]()
        node = -1
        for token in text:
            node = self._children.setdefault((node, int(token)), len(self._children))
            path.append(node)
        return path
