"""Rules that change the logits of a next token before it is chosen.

Names and values are those of the logits processors of ``transformers``, by which
``generation_config.json`` is defined. V vocabulary.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Bias = tuple[tuple[int, ...], float]
"""Tokens in a row, and what is added to the last one's logit after the others."""


@dataclass(frozen=True)
class LogitRules:
    """Rules for the next token of a text, in the order of their fields."""

    biases: tuple[Bias, ...] = ()
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of all tokens of the text."""
    no_repeat_ngram_size: int = 0
    """No sequence of so many tokens is written twice; 0 for no limit."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that are not written."""
    min_length: int = 0
    """Fewest tokens of prompt and text before the text may end."""
    min_new_tokens: int = 0
    """Fewest new tokens before the text may end."""
    forced_first: int | None = None
    """The token after a prompt of one token."""
    forced_last: tuple[int, ...] = ()
    """The tokens one of which is the last where a text reaches its maximum length."""
    growing_end: tuple[int, float] | None = None
    """After so many new tokens, the logits of end tokens grow: by their size times this factor to
    the power of the further tokens, less 1."""
    suppressed: tuple[int, ...] = ()
    """Tokens that are never written."""
    suppressed_first: tuple[int, ...] = ()
    """Tokens that are not the first of a text."""

    def apply(
        self,
        logits_V: Tensor,
        text: Sequence[int],
        new: int,
        tokens: int,
        stop_ids: Collection[int],
    ) -> Tensor:
        """Return the logits [V] of a text's next token after all rules.

        Args:
            logits_V: the model's logits.
            text: token ids of the prompt and what follows it so far.
            new: how many of the ids follow the prompt.
            tokens: maximum number of new tokens.
            stop_ids: ids of the tokens that end a text.
        """
        changed_V = logits_V.clone()
        _add_biases(changed_V, text, self.biases)
        if self.repetition_penalty != 1:
            _penalise(changed_V, text, self.repetition_penalty)
        if self.no_repeat_ngram_size:
            _forbid(changed_V, _ngram_ends(text, self.no_repeat_ngram_size))
        _add_biases(changed_V, text, [(word, -torch.inf) for word in self.bad_words])
        if len(text) < self.min_length or new < self.min_new_tokens:
            _forbid(changed_V, stop_ids)
        if self.forced_first is not None and len(text) == 1:
            _force(changed_V, (self.forced_first,))
        if self.forced_last and new == tokens - 1:
            _force(changed_V, self.forced_last)
        if self.growing_end is not None and new > self.growing_end[0]:
            start, factor = self.growing_end
            _raise(changed_V, stop_ids, factor ** (new - start) - 1)
        _forbid(changed_V, self.suppressed)
        # After a forced first token, the next one counts as the first.
        first = 1 if self.forced_first is not None and len(text) - new == 1 else 0
        if new == first:
            _forbid(changed_V, self.suppressed_first)
        return changed_V


def _known(logits_V: Tensor, ids: Collection[int]) -> list[int]:
    return [i for i in set(ids) if 0 <= i < len(logits_V)]


def _forbid(logits_V: Tensor, ids: Collection[int]) -> None:
    logits_V[_known(logits_V, ids)] = -torch.inf


def _force(logits_V: Tensor, ids: Collection[int]) -> None:
    chosen = _known(logits_V, ids)
    if chosen:
        logits_V.fill_(-torch.inf)
        logits_V[chosen] = 0


def _raise(logits_V: Tensor, ids: Collection[int], by: float) -> None:
    """Add a share of the logits' sizes to those of some tokens; -inf stays."""
    chosen = _known(logits_V, ids)
    found = logits_V[chosen]
    logits_V[chosen] = torch.where(found.isfinite(), found + found.abs() * by, found)


def _penalise(logits_V: Tensor, text: Sequence[int], penalty: float) -> None:
    ids = _known(logits_V, text)
    found = logits_V[ids]
    logits_V[ids] = torch.where(found < 0, found * penalty, found / penalty)


def _add_biases(logits_V: Tensor, text: Sequence[int], biases: Sequence[Bias]) -> None:
    for (*before, last), bias in biases:
        if last < len(logits_V) and list(text[len(text) - len(before) :]) == before:
            logits_V[last] += bias


def _ngram_ends(text: Sequence[int], size: int) -> set[int]:
    """Return the tokens with which the text's end would repeat ``size`` tokens."""
    if len(text) < size:
        return set()
    end = list(text[len(text) - size + 1 :])
    starts = range(len(text) - size + 1)
    return {text[i + size - 1] for i in starts if list(text[i : i + size - 1]) == end}
