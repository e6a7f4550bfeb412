"""Which layers each stage of a pipeline holds, written as text: ``Et*3|(tt|)*29m|L``.

``E`` is the embedding, ``t`` a layer (``d`` one that must be dense, ``x`` one that must have
experts), ``m`` a multi-token prediction layer, ``L`` head and loss; ``|`` ends a stage; ``*n``
repeats what stands before it, one letter or a part in parentheses. A stage may be empty. Blanks and
commas mean nothing. Stages are counted in the order of the model: with p ranks and v virtual stages
each, p * v of them (the notation of Megatron-LM's uneven pipelines, arXiv 2603.07685, §7.5).
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
"""Places and breaks in all, beyond which a text is taken for a slip of the pen."""
SMALL_CHANGE = 64
"""Layers that are moved one by one to mend a layout; beyond, it is balanced anew."""

Way = Literal["round", "v"]
"""How virtual stages go over ranks: always from first to last, or there and back, as a V."""


class Place(NamedTuple):
    """One thing a stage computes: its kind, and its number among those of the kind."""

    kind: str
    index: int = 0


@dataclass(frozen=True)
class Stages:
    """A pipeline layout: what each stage computes, in the order of the model."""

    letters: tuple[str, ...]
    """For each stage its places, by their letters and written out."""

    @classmethod
    def parse(cls, text: str) -> "Stages":
        """Read the text form.

        Raises:
            ValueError: where a letter is unknown, a parenthesis has no partner, or a ``*`` no
                number; with the place in the text.
        """
        return cls(tuple(_written_out(text).split("|")))

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
        """Spread layers evenly: over virtual stages and over ranks, none has two more than another.

        The stages with the embedding and with the loss are the last to get one more. ``ends`` says
        how many layers' time those two take besides theirs, where ranks are to take equally long.
        """
        count = pp * vpp
        rank = [home(k, pp, way) for k in range(count)]
        # Where the ends weigh, no stage need have as many as others, and they come last by that.
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
        """The text form, with runs of equal letters and of equal stages folded."""
        ended = [_folded(stage) + "|" for stage in self.letters[:-1]]
        parts = []
        for stage, same in groupby(ended):
            number = len(list(same))
            once = stage if len(stage) == 1 else f"({stage})"
            parts.append(stage * number if number == 1 else f"{once}*{number}")
        return "".join(parts) + _folded(self.letters[-1])

    @property
    def layers(self) -> int:
        """Number of layers, those of multi-token prediction not among them."""
        return sum(_layers(stage) for stage in self.letters)

    def places(self) -> tuple[tuple[Place, ...], ...]:
        """Return what each stage computes, in the order of the model."""
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
        """Return what each virtual stage of each of ``pp`` ranks computes: ``[rank][virtual]``.

        Raises:
            ValueError: where ``pp`` does not divide the number of stages.
        """
        if len(self.letters) % pp:
            raise ValueError(f"{len(self.letters)} stages cannot be dealt out to pp{pp} evenly")
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
            found.append(f"pp * vpp stages ({count}), and these are {len(self.letters)}")
        whole = "".join(self.letters)
        if not re.fullmatch(r"E[tdx]*m*L", whole):
            found.append("one E, then layers, then any m, then one L")
        elif not (self.letters[0].startswith("E") and self.letters[-1].endswith("L")):
            found.append("E stands in the first stage and L in the last")
        if self.layers != len(mixtures):
            found.append(
                f"as many layers as the model ({len(mixtures)}), and these are {self.layers}"
            )
        if whole.count("m") != multi_token:
            found.append(f"as many m as the model has ({multi_token})")
        named = [letter for letter in whole if letter in LAYERS]
        for i, (letter, mixture) in enumerate(zip(named, mixtures, strict=False)):
            if letter == ("d" if mixture else "x"):
                kind = "experts" if mixture else "no experts"
                found.append(f"layer {i} has {kind}, and here it is {letter!r}")
                break
        return found

    def nearest(self, count: int, mixtures: Sequence[bool], multi_token: int = 0) -> "Stages":
        """Return a legal layout like this one: a layer more or less where that is enough.

        Layers are taken from the fullest stages and given to the emptiest; where that does not
        help, the answer is the balanced layout.
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
    """Return the rank that holds a stage; on the way back, ranks come from last to first."""
    turn, at = divmod(stage, pp)
    return pp - 1 - at if way == "v" and turn % 2 else at


def _layers(stage: str) -> int:
    return sum(letter in LAYERS for letter in stage)


def _folded(stage: str) -> str:
    """Write runs of a letter as ``t*4``; two stay ``tt``."""
    runs = [(letter, len(list(same))) for letter, same in groupby(stage)]
    return "".join(f"{letter}*{n}" if n > 2 else letter * n for letter, n in runs)


def _written_out(text: str) -> str:
    """Return the text with every repeat written out: letters and breaks alone."""
    levels: list[list[str]] = [[]]
    for token in re.finditer(r"\*\s*(\d*)|[\s,]+|.", text, re.DOTALL):
        word = token[0]
        if word.startswith("*"):
            if not token[1] or not levels[-1]:
                what = "a number follows" if levels[-1] else "something to repeat stands before"
                raise _slip(text, f"{what} '*'", token.start())
            if len(levels[-1][-1]) * int(token[1]) > LONGEST:
                raise _slip(text, f"more than {LONGEST:,} places", token.start())
            levels[-1][-1] *= int(token[1])
        elif word == "(":
            levels.append([])
        elif word == ")":
            if len(levels) == 1:
                raise _slip(text, "')' closes nothing", token.start())
            inner = "".join(levels.pop())
            levels[-1].append(inner)
        elif word in KINDS or word == "|":
            levels[-1].append(word)
        elif not re.fullmatch(r"[\s,]+", word):
            raise _slip(text, f"{word!r} is none of {' '.join(KINDS)} | ( ) *n", token.start())
    if len(levels) > 1:
        raise _slip(text, "'(' is never closed", len(text))
    whole = "".join(levels[0])
    if len(whole) > LONGEST:
        raise _slip(text, f"more than {LONGEST:,} places", len(text))
    return whole


def _slip(text: str, what: str, at: int) -> ValueError:
    short = text if len(text) <= 60 else text[:59] + "…"
    return ValueError(f"{what} (character {at + 1} of {short!r})")
