"""The layers of each pipeline stage, with a text notation: ``Et*3|(tt|)*29m|L``.

``E`` is the embedding, ``t`` a layer (``d`` one that must be dense, ``x`` one that must have
experts), ``m`` a multi-token prediction layer, ``L`` head and loss; ``|`` ends a stage; ``*n``
repeats the letter or parenthesised part before it. A stage may be empty. Blanks and commas are
ignored. Stages are in model order: with p ranks and v virtual stages each, there are p * v (the
notation of Megatron-LM's uneven pipelines, arXiv 2603.07685, §7.5).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Literal, NamedTuple

from moefold.mesh.loads import leveled_split, lightest_split, rank_loads

KINDS = {
    "E": "embedding",
    "t": "layer",
    "d": "layer",
    "x": "layer",
    "m": "multi_token",
    "L": "loss",
}
LAYERS = "tdx"
MAX_PARTS = 10_000
"""Most letters and breaks; a longer text is refused as a typing error."""
MAX_MOVES = 64
"""Most layers moved one by one to correct a layout; beyond, it is balanced anew."""

MIN_GAIN = 0.01
"""Least relative gain, of the heaviest rank, for which the even split is left."""

StageMapping = Literal["round", "v"]
"""How virtual stages map to ranks: always from first to last, or back and forth as a V."""


class StagePart(NamedTuple):
    """Part of a stage: its kind, and its index among parts of that kind."""

    kind: str
    index: int = 0


class StageWeights(NamedTuple):
    """Work of the parts of a model, in any one unit."""

    layers: tuple[float, ...]
    """Of each layer, without those of multi-token prediction."""
    first: float = 0.0
    """Of the embedding."""
    last: float = 0.0
    """Of the multi-token layers, head and loss, which are in the last stage."""


@dataclass(frozen=True)
class Stages:
    """Pipeline layout: the parts of each stage, in model order."""

    letters: tuple[str, ...]
    """Letters of each stage's parts, with repeats expanded."""

    @classmethod
    def parse(cls, text: str) -> "Stages":
        """Parse the text form.

        Raises:
            ValueError: with the position in the text, if a letter is unknown, a parenthesis
                unmatched, or a ``*`` without number.
        """
        levels: list[list[str]] = [[]]
        for token in re.finditer(r"\*\s*(\d*)|[\s,]+|.", text, re.DOTALL):
            word = token[0]
            if word.startswith("*"):
                if not token[1] or not levels[-1]:
                    missing = "a number after" if levels[-1] else "a letter or group before"
                    raise _error(text, f"'*' needs {missing} it", token.start())
                if len(levels[-1][-1]) * int(token[1]) > MAX_PARTS:
                    raise _error(text, f"more than {MAX_PARTS:,} letters and breaks", token.start())
                levels[-1][-1] *= int(token[1])
            elif word == "(":
                levels.append([])
            elif word == ")":
                if len(levels) == 1:
                    raise _error(text, "')' has no '('", token.start())
                inner = "".join(levels.pop())
                levels[-1].append(inner)
            elif word in KINDS or word == "|":
                levels[-1].append(word)
            elif not re.fullmatch(r"[\s,]+", word):
                kinds = " ".join(KINDS)
                raise _error(text, f"{word!r} is not one of {kinds} | ( ) *n", token.start())
        if len(levels) > 1:
            raise _error(text, "'(' has no ')'", len(text))
        letters = "".join(levels[0])
        if len(letters) > MAX_PARTS:
            raise _error(text, f"more than {MAX_PARTS:,} letters and breaks", len(text))
        return cls(tuple(letters.split("|")))

    @classmethod
    def balanced(
        cls,
        pp: int,
        vpp: int,
        layers: int,
        multi_token: int = 0,
        mapping: StageMapping = "round",
        ends: tuple[float, float] = (0.0, 0.0),
    ) -> "Stages":
        """Distribute layers evenly over virtual stages and ranks, which differ by at most one.

        The stages with embedding and loss are the last to get one more. ``ends``, the time of
        embedding and loss in layers, balances the time of ranks instead of their layers.
        """
        count = pp * vpp
        rank = [rank_of_stage(k, pp, mapping) for k in range(count)]
        # With weighted ends stages may differ by any number, and load alone decides.
        each, more = (0, layers) if any(ends) else divmod(layers, count)
        last = () if any(ends) else (0, count - 1)
        layers_of = [each] * count
        load = [float(each * vpp)] * pp
        load[rank[0]] += ends[0]
        load[rank[-1]] += ends[1]
        for _ in range(more):
            k = min(range(count), key=lambda k: (load[rank[k]], layers_of[k], k in last, k))
            layers_of[k] += 1
            load[rank[k]] += 1.0
        return cls._of_counts(layers_of, multi_token)

    @classmethod
    def weighted(
        cls,
        pp: int,
        vpp: int,
        weights: StageWeights,
        multi_token: int = 0,
        mapping: StageMapping = "round",
    ) -> "Stages":
        """Distribute layers so that the rank with most work has least.

        Without virtual stages that is the exact minimum; with them it is near. The even split is
        kept where its heaviest rank has at most 1 % more.
        """
        layers, first, last = weights
        even = cls.balanced(pp, vpp, len(layers), multi_token, mapping)
        rank = [rank_of_stage(k, pp, mapping) for k in range(pp * vpp)]
        if not layers:
            return even
        if vpp == 1:
            counts = lightest_split(layers, pp, first, last)
        else:
            mean = sum(layers) / len(layers) or 1.0
            ends = first / mean, last / mean
            near = cls.balanced(pp, vpp, len(layers), multi_token, mapping, ends)
            counts = leveled_split(layers, near.layer_counts, rank, first, last)
        heaviest = max(rank_loads(layers, counts, rank, first, last))
        of_even = max(rank_loads(layers, even.layer_counts, rank, first, last))
        if of_even <= heaviest * (1 + MIN_GAIN):
            return even
        return cls._of_counts(counts, multi_token)

    @classmethod
    def _of_counts(cls, counts: Sequence[int], multi_token: int) -> "Stages":
        """Return stages of so many layers, with multi-token layers beside the loss."""
        letters = ["t" * number for number in counts]
        letters[0] = "E" + letters[0]
        letters[-1] += "m" * multi_token + "L"
        return cls(tuple(letters))

    @property
    def text(self) -> str:
        """The text form, with equal letters and equal stages written as repeats."""
        stages = [_compress(stage) + "|" for stage in self.letters[:-1]]
        texts = []
        for stage, same in groupby(stages):
            number = len(list(same))
            unit = stage if len(stage) == 1 else f"({stage})"
            texts.append(stage * number if number == 1 else f"{unit}*{number}")
        return "".join(texts) + _compress(self.letters[-1])

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Number of layers of each stage, without multi-token prediction layers."""
        return tuple(_count_layers(stage) for stage in self.letters)

    @property
    def layers(self) -> int:
        """Number of layers, without multi-token prediction layers."""
        return sum(self.layer_counts)

    @property
    def sent_rows(self) -> tuple[int, ...]:
        """For each stage, how many tensors of rows [T, D] its passes of training send on as one:
        the rows of the next token and, after multi-token layers, of each further token.
        """
        return tuple(1 + ahead for ahead in accumulate(s.count("m") for s in self.letters))

    def parts(self) -> tuple[tuple[StagePart, ...], ...]:
        """Return the parts of each stage, in model order."""
        counts: dict[str, int] = {}
        stages = []
        for stage in self.letters:
            parts = []
            for letter in stage:
                kind = KINDS[letter]
                parts.append(StagePart(kind, counts.get(kind, 0)))
                counts[kind] = counts.get(kind, 0) + 1
            stages.append(tuple(parts))
        return tuple(stages)

    def table(
        self, pp: int, mapping: StageMapping = "round"
    ) -> tuple[tuple[tuple[StagePart, ...], ...], ...]:
        """Return the parts of each virtual stage of each of ``pp`` ranks: ``[rank][virtual]``.

        Raises:
            ValueError: if ``pp`` does not divide the number of stages.
        """
        if len(self.letters) % pp:
            raise ValueError(f"{len(self.letters)} stages cannot be divided evenly among pp{pp}")
        by_rank: list[list[tuple[StagePart, ...]]] = [[] for _ in range(pp)]
        for k, stage in enumerate(self.parts()):
            by_rank[rank_of_stage(k, pp, mapping)].append(stage)
        return tuple(tuple(stages) for stages in by_rank)

    def broken_rules(self, count: int, is_moe: Sequence[bool], multi_token: int = 0) -> list[str]:
        """Return the rules that the layout breaks.

        Args:
            count: number of stages, ``pp * vpp``.
            is_moe: whether each layer of the model has experts.
            multi_token: number of multi-token prediction layers.
        """
        rules = []
        if len(self.letters) != count:
            rules.append(f"must have pp * vpp ({count}) stages, not {len(self.letters)}")
        letters = "".join(self.letters)
        if not re.fullmatch(r"E[tdx]*m*L", letters):
            rules.append("must be one E, then layers, then any m, then one L")
        elif not (self.letters[0].startswith("E") and self.letters[-1].endswith("L")):
            rules.append("must have E in the first stage and L in the last")
        if self.layers != len(is_moe):
            rules.append(f"must have the model's {len(is_moe)} layers, not {self.layers}")
        if letters.count("m") != multi_token:
            rules.append(f"must have as many m as the model has multi-token layers ({multi_token})")
        named = [letter for letter in letters if letter in LAYERS]
        for i, (letter, routed) in enumerate(zip(named, is_moe, strict=False)):
            if letter == ("d" if routed else "x"):
                kind = "experts" if routed else "no experts"
                rules.append(f"layer {i} has {kind}, so its letter cannot be {letter!r}")
                break
        return rules

    def nearest(self, count: int, is_moe: Sequence[bool], multi_token: int = 0) -> "Stages":
        """Return a legal layout near this one.

        Layers are removed from the fullest or added to the emptiest stages; if the result is not
        legal, the balanced layout is returned.
        """
        stages = [re.sub("m", "", re.sub("[dx]", "t", stage)) for stage in self.letters]
        stages[-1] = re.sub("(?=L$)", "m" * multi_token, stages[-1])
        tail = next((k for k, s in enumerate(stages) if "L" in s), len(stages) - 1)
        change = len(is_moe) - self.layers
        for _ in range(abs(change) if abs(change) <= MAX_MOVES else 0):
            if change > 0:
                k = min(range(tail + 1), key=lambda k: (_count_layers(stages[k]), k))
                stages[k] = re.sub(r"^(E?t*)", r"\1t", stages[k])
            else:
                k = max(range(len(stages)), key=lambda k: (_count_layers(stages[k]), k))
                stages[k] = stages[k].replace("t", "", 1)
        changed = Stages(tuple(stages))
        if not changed.broken_rules(count, is_moe, multi_token):
            return changed
        return Stages.balanced(count, 1, len(is_moe), multi_token)


def rank_of_stage(stage: int, pp: int, mapping: StageMapping) -> int:
    """Return the rank of a stage; with ``v`` every second round goes from last rank to first."""
    round_, index = divmod(stage, pp)
    returns = mapping == "v" and round_ % 2
    return pp - 1 - index if returns else index


def _count_layers(stage: str) -> int:
    return sum(letter in LAYERS for letter in stage)


def _compress(stage: str) -> str:
    """Write three or more equal letters as ``t*4``."""
    runs = [(letter, len(list(same))) for letter, same in groupby(stage)]
    words = [f"{letter}*{n}" if n > 2 else letter * n for letter, n in runs]
    return "".join(words)


def _error(text: str, problem: str, position: int) -> ValueError:
    short = text if len(text) <= 60 else text[:59] + "…"
    return ValueError(f"{problem} (character {position + 1} of {short!r})")
