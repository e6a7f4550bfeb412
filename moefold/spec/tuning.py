"""Which parameters of a decoder are trained, without torch.

Patterns are those of a shell, of global names: ``layers.*.moe.router.*``, ``embed.weight``.
"""

from collections.abc import Iterator, Sequence

from moefold.config.errors import Violation
from moefold.config.suggest import closest
from moefold.model.config import Block, Decoder, patterns
from moefold.optim.config import matches
from moefold.spec.decoder import model_weights


def freeze(decoder: Decoder, frozen: Sequence[str]) -> Decoder:
    """Return a decoder whose parameters of these names are not trained.

    Raises:
        ValueError: where a layer from outside describes nothing, so that it has no names.
    """
    if not frozen:
        return decoder
    names = [w.name for w in model_weights(decoder) if matches(w.name, frozen)]

    def tuned(number: int, block: Block) -> Block:
        at = f"layers.{number}."
        held = tuple(name.removeprefix(at) for name in names if name.startswith(at))
        return block.model_copy(update={"frozen": held})

    blocks = (tuned(number, block) for number, block in enumerate(decoder.blocks))
    outside = tuple(name for name in names if not name.startswith("layers."))
    return decoder.model_copy(update={"stacks": patterns(blocks), "frozen": outside})


def trainable(decoder: Decoder) -> Decoder:
    """Return a decoder of which nothing is frozen, and no product quantised."""
    decoder = decoder.model_copy(update={"quantise": None}) if decoder.quantise else decoder
    if not decoder.frozen and not any(block.frozen for block in decoder.blocks):
        return decoder
    blocks = (block.model_copy(update={"frozen": ()}) for block in decoder.blocks)
    return decoder.model_copy(update={"stacks": patterns(blocks), "frozen": ()})


def freeze_misfits(decoder: Decoder, frozen: Sequence[str]) -> Iterator[Violation]:
    """Yield patterns that match no parameter of a decoder, and a list that leaves none to train."""
    if not frozen:
        return
    names = [weight.name for weight in model_weights(decoder)]
    for place, pattern in enumerate(frozen):
        if not any(matches(name, (pattern,)) for name in names):
            rule = "must match a parameter of the model"
            yield Violation((place,), pattern, rule, nearest_name(pattern, names))
    if all(matches(name, frozen) for name in names):
        yield Violation((), list(frozen), "must leave a parameter to train", list(frozen[:-1]))


def nearest_name(pattern: str, names: Sequence[str]) -> str:
    """Return what is most like a pattern that matches none: a name, or one with ``*`` before it."""
    found: dict[str, None] = {}
    for words in dict.fromkeys(tuple(name.split(".")) for name in names):
        if words[0] == "layers":
            words = "layers", "*", *words[2:]
        ends = (words[start:] for start in range(2, len(words) - 1)) if len(words) > 2 else ()
        found |= dict.fromkeys([".".join(words), *(".".join(("*", *end)) for end in ends)])
    return closest(pattern, found, 0.0) or names[0]
