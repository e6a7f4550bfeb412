"""Pairs of answers as documents: the chosen one's conversation, then the rejected one's.

Columns are named as TRL names them. Of each conversation the last answers are trained: what stands
in ``chosen`` and ``rejected``, of whole conversations the last message. N tokens of a pair.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moefold.data.conversations import ConversationReader, Written, encoded
from moefold.data.packing import REJECTED
from moefold.data.sources import BadDocument, Coded, Skipped
from moefold.data.template import ChatTemplate
from moefold.data.tokenizer import Tokenizer

SIDES = ("chosen", "rejected")


class PreferenceReader(ConversationReader):
    """Reads pairs; each is one document."""

    unit, shorten = "pair", "leave such out (long: skip)"

    def _texts(
        self, example: Mapping[str, Any], template: ChatTemplate, tokenizer: Tokenizer
    ) -> tuple[Written, ...]:
        """Return a pair's two texts."""
        if missing := [side for side in SIDES if side not in example]:
            raise BadDocument("no pair", f"it has {sorted(example)[:20]}, and no {missing}")
        shared = {name: value for name, value in example.items() if name not in SIDES}
        answer = "completion" if "prompt" in example else "messages"
        sides = [shared | {answer: example[side]} for side in SIDES]
        if sides[0] == sides[1]:
            raise BadDocument("pair without a difference", "chosen and rejected are the same")
        return tuple(self._written(side, template, tokenizer) for side in sides)

    def _encode(
        self,
        batch: Sequence[tuple[str, bytes, tuple[Written, ...]]],
        tokenizer: Tokenizer,
        seq: int,
        skipped: Skipped,
    ) -> list[Coded]:
        found = []
        coded = encoded([text for _, _, pair in batch for text in pair], tokenizer)
        for (name, said, _), chosen, rejected in zip(batch, coded, coded, strict=True):
            ids_N = np.concatenate([chosen[0], rejected[0]])
            if not all(trained_N[1:].any() for _, trained_N in (chosen, rejected)):
                self.refuse(name, "example without an answer", "no token of it is trained", skipped)
            elif np.array_equal(chosen[0], rejected[0]):
                said_so = "chosen and rejected are the same tokens"
                self.refuse(name, "pair without a difference", said_so, skipped)
            elif len(ids_N) <= seq or self._fits(name, len(ids_N), ids_N[:0], seq, skipped):
                marks_N = np.concatenate([chosen[1].astype(int), rejected[1] + REJECTED])
                found.append(Coded(name, said, ids_N, marks_N))
        return found
