"""Options of records: values that their literal fields and switches can have.

A new value of such a field is proved and planned by itself: the matrix has a model for each.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any, Literal, get_args, get_origin

from moefold.config.base import Record
from moefold.config.check import broken_rules
from moefold.model.config import Block, Decoder
from moefold.moe.config import Moe, Router

Option = tuple[type, str, Any]
"""A class that declares a field, the field, and one of its values."""


def choices(record: type[Record], field: str) -> tuple[Any, ...]:
    """Return the values of a field that is a literal or a switch; none of any other field."""
    annotation = record.model_fields[field].annotation
    if annotation is bool:
        return (False, True)
    parts = (annotation, *get_args(annotation))
    return tuple(value for part in parts if get_origin(part) is Literal for value in get_args(part))


def variants(record: Record) -> Iterator[tuple[str, Any, Any]]:
    """Yield field, value and copy for each legal copy of a record with another value in a field."""
    for field in type(record).model_fields:
        for value in choices(type(record), field):
            copy = record.model_copy(update={field: value})
            if field != "kind" and copy != record and not broken_rules(copy):
                yield field, value, copy


def scored_routers(**fields: Any) -> dict[str, Router]:
    """Return a router for each score, computed before or after the choice."""
    found: dict[str, Router] = {}
    for score, order in product(choices(Router, "score"), choices(Router, "order")):
        router = Router(score=score, order=order, **fields)
        if not broken_rules(router):
            found[f"{score}, {order}"] = router
    return found


def parts(decoder: Decoder) -> Iterator[Record]:
    """Yield a decoder's blocks, layers and routers."""
    for block in decoder.blocks:
        yield from (block, block.attention, block.ffn)
        if isinstance(block.ffn, Moe):
            yield block.ffn.router


def options_of(decoders: Iterable[Decoder]) -> set[Option]:
    """Return the options that the parts of decoders have."""
    options = set[Option]()
    for part in (part for decoder in decoders for part in parts(decoder)):
        record = type(part)
        for field in record.model_fields:
            if choices(record, field):
                options.add((_declaring(record, field), field, getattr(part, field)))
    return options


def missing_blocks(decoders: Iterable[Decoder], base: Block) -> Iterator[tuple[str, Block]]:
    """Yield name and copy of ``base`` for each option of its layers that no decoder has."""
    seen = options_of(decoders)
    moe = base.ffn
    assert isinstance(moe, Moe)
    changed = [("attention", *found) for found in variants(base.attention)]
    changed += [("ffn", *found) for found in variants(moe)]
    for field, value, router in variants(moe.router):
        changed.append(("router", field, value, moe.model_copy(update={"router": router})))
    of_part = {"attention": type(base.attention), "ffn": type(moe), "router": type(moe.router)}
    for part, field, value, layer in changed:
        if (_declaring(of_part[part], field), field, value) not in seen:
            update = {"ffn" if part == "router" else part: layer}
            yield f"{part} {field} {value}", base.model_copy(update=update)


def _declaring(record: type, field: str) -> type:
    """Return the first class that declares a field, so that its subclasses share the option."""
    return next(c for c in reversed(record.__mro__) if field in vars(c).get("__annotations__", {}))
