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
from itertools import groupby
from typing import Literal, NamedTuple

KINDS = {
    "E": "embedding",
    "t": "layer",
    "d": "layer",
    "x": "layer",
    "m": "multi_token",
    "L": "loss",
}
LAYERS = "tdx"
LONGEST = 10_000
"""Most places and breaks; a longer text is refused as a typing error."""
SMALL_CHANGE = 64
"""Most layers that are moved one by one to correct a layout; beyond, it is balanced again."""

Way = Literal["round", "v"]
"""How virtual stages map to ranks: always from first to last, or there and back, as a V."""


class Place(NamedTuple):
    """One part of a stage: its kind, and its index among the parts of that kind."""

    kind: str
    index: int = 0


@dataclass(frozen=True)
class Stages:
    """A pipeline layout: the parts of each stage, in model order."""

    letters: tuple[str, ...]
    """For each stage the letters of its parts, with repeats expanded."""

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
                    what = "a number after" if levels[-1] else "a letter or group before"
                    raise _slip(text, f"'*' needs {what} it", token.start())
                if len(levels[-1][-1]) * int(token[1]) > LONGEST:
                    raise _slip(text, f"more than {LONGEST:,} letters and breaks", token.start())
                levels[-1][-1] *= int(token[1])
            elif word == "(":
                levels.append([])
            elif word == ")":
                if len(levels) == 1:
                    raise _slip(text, "')' has no '('", token.start())
                inner = "".join(levels.pop())
                levels[-1].append(inner)
            elif word in KINDS or word == "|":
                levels[-1].append(word)
            elif not re.fullmatch(r"[\s,]+", word):
                known = " ".join(KINDS)
                raise _slip(text, f"{word!r} is not one of {known} | ( ) *n", token.start())
        if len(levels) > 1:
            raise _slip(text, "'(' has no ')'", len(text))
        whole = "".join(levels[0])
        if len(whole) > LONGEST:
            raise _slip(text, f"more than {LONGEST:,} letters and breaks", len(text))
        return cls(tuple(whole.split("|")))

    @classmethod
    def balanced(
        cls,
        pp: int,
        vpp: int,
        layers: int,
        multi_token: int = 0,
        way: Way = "round",
        ends: tuple[float, float] = (0.0, 0.0),
    ) -> "Stages":
        """Spread layers evenly over virtual stages and over ranks, which differ by at most one.

        The stages with embedding and loss are the last to get one more. ``ends``, the time of
        embedding and loss in layers, balances the ranks' time instead of their number of layers.
        """
        count = pp * vpp
        rank = [home(k, pp, way) for k in range(count)]
        # With weighted ends stages may differ by any number, and their load puts the ends last.
        each, more = (0, layers) if any(ends) else divmod(layers, count)
        last = () if any(ends) else (0, count - 1)
        held, load = [each] * count, [float(each * vpp)] * pp
        load[rank[0]] += ends[0]
        load[rank[-1]] += ends[1]
        for _ in range(more):
            k = min(range(count), key=lambda k: (load[rank[k]], held[k], k in last, k))
            held[k] += 1
            load[rank[k]] += 1.0
        letters = ["t" * number for number in held]
        letters[0] = "E" + letters[0]
        letters[-1] += "m" * multi_token + "L"
        return cls(tuple(letters))

    @property
    def text(self) -> str:
        """The text form, with equal letters and equal stages written as repeats."""
        ended = [_folded(stage) + "|" for stage in self.letters[:-1]]
        parts = []
        for stage, same in groupby(ended):
            number = len(list(same))
            once = stage if len(stage) == 1 else f"({stage})"
            parts.append(stage * number if number == 1 else f"{once}*{number}")
        return "".join(parts) + _folded(self.letters[-1])

    @property
    def layers(self) -> int:
        """Number of layers, without multi-token prediction layers."""
        return sum(_layers(stage) for stage in self.letters)

    def places(self) -> tuple[tuple[Place, ...], ...]:
        """Return the parts of each stage, in model order."""
        counted: dict[str, int] = {}
        found = []
        for stage in self.letters:
            here = []
            for letter in stage:
                kind = KINDS[letter]
                here.append(Place(kind, counted.get(kind, 0)))
                counted[kind] = counted.get(kind, 0) + 1
            found.append(tuple(here))
        return tuple(found)

    def table(self, pp: int, way: Way = "round") -> tuple[tuple[tuple[Place, ...], ...], ...]:
        """Return the parts of each virtual stage of each of ``pp`` ranks: ``[rank][virtual]``.

        Raises:
            ValueError: if ``pp`` does not divide the number of stages.
        """
        if len(self.letters) % pp:
            raise ValueError(f"{len(self.letters)} stages cannot be divided evenly among pp{pp}")
        dealt: list[list[tuple[Place, ...]]] = [[] for _ in range(pp)]
        for k, stage in enumerate(self.places()):
            dealt[home(k, pp, way)].append(stage)
        return tuple(tuple(stages) for stages in dealt)

    def faults(self, count: int, mixtures: Sequence[bool], multi_token: int = 0) -> list[str]:
        """Return the rules that the layout breaks.

        Args:
            count: number of stages, ``pp * vpp``.
            mixtures: for each layer of the model, whether it has experts.
            multi_token: number of multi-token prediction layers.
        """
        found = []
        if len(self.letters) != count:
            found.append(f"must have pp * vpp ({count}) stages, not {len(self.letters)}")
        whole = "".join(self.letters)
        if not re.fullmatch(r"E[tdx]*m*L", whole):
            found.append("must be one E, then layers, then any m, then one L")
        elif not (self.letters[0].startswith("E") and self.letters[-1].endswith("L")):
            found.append("must have E in the first stage and L in the last")
        if self.layers != len(mixtures):
            found.append(f"must have the model's {len(mixtures)} layers, not {self.layers}")
        if whole.count("m") != multi_token:
            found.append(f"must have as many m as the model has multi-token layers ({multi_token})")
        named = [letter for letter in whole if letter in LAYERS]
        for i, (letter, mixture) in enumerate(zip(named, mixtures, strict=False)):
            if letter == ("d" if mixture else "x"):
                kind = "experts" if mixture else "no experts"
                found.append(f"layer {i} has {kind}, so its letter cannot be {letter!r}")
                break
        return found

    def nearest(self, count: int, mixtures: Sequence[bool], multi_token: int = 0) -> "Stages":
        """Return a legal layout near this one.

        Layers are removed from the fullest or added to the emptiest stages; if that does not
        suffice, the balanced layout is returned.
        """
        stages = [re.sub("m", "", re.sub("[dx]", "t", stage)) for stage in self.letters]
        stages[-1] = re.sub("(?=L$)", "m" * multi_token, stages[-1])
        tail = next((k for k, s in enumerate(stages) if "L" in s), len(stages) - 1)
        change = len(mixtures) - self.layers
        for _ in range(abs(change) if abs(change) <= SMALL_CHANGE else 0):
            if change > 0:
                k = min(range(tail + 1), key=lambda k: (_layers(stages[k]), k))
                stages[k] = re.sub(r"^(E?t*)", r"\1t", stages[k])
            else:
                k = max(range(len(stages)), key=lambda k: (_layers(stages[k]), k))
                stages[k] = stages[k].replace("t", "", 1)
        tried = Stages(tuple(stages))
        if not tried.faults(count, mixtures, multi_token):
            return tried
        return Stages.balanced(count, 1, len(mixtures), multi_token)


def home(stage: int, pp: int, way: Way) -> int:
    """Return the rank of a stage; with ``v`` every second turn goes from last rank to first."""
    turn, at = divmod(stage, pp)
    return pp - 1 - at if way == "v" and turn % 2 else at


def _layers(stage: str) -> int:
    return sum(letter in LAYERS for letter in stage)


def _folded(stage: str) -> str:
    """Write three or more equal letters as ``t*4``."""
    runs = [(letter, len(list(same))) for letter, same in groupby(stage)]
    return "".join(f"{letter}*{n}" if n > 2 else letter * n for letter, n in runs)


def _slip(text: str, what: str, at: int) -> ValueError:
    short = text if len(text) <= 60 else text[:59] + "…"
    return ValueError(f"{what} (character {at + 1} of {short!r})")
