"""Layouts that the planner makes: those of a search, and those of other software.

A search tries thousands of layouts whose values are legal by construction, so they are made without
validation. What other software does, and no run file can say, is a record of this file.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, Literal, get_args

from moefold.config.base import Record
from moefold.layers.config import (
    Context,
    Full,
    Offload,
    OffloadKind,
    OffloadToHost,
    Recompute,
    RecomputeKind,
    Selective,
)
from moefold.mesh.config import Sizes
from moefold.mesh.pipeline import Stages
from moefold.moe.dispatch.config import DISPATCH, Dispatch, FixedShape, ThirdParty, TwoLevel
from moefold.parallel.config import Layout, StatePlacement
from moefold.schedule.config import Schedule
from moefold.spec.layer import NOTHING, Module, Modules

PLANNED_DISPATCHERS = (
    "local", "allgather", "alltoall", "alltoall_once", "two_level", "padded", "spread",
    "deep_ep", "hybrid_ep", "nccl_ep",
)  # fmt: skip
"""Dispatchers with known traffic. ``deep_ep``, ``hybrid_ep`` and ``nccl_ep`` are libraries that
send rows as ``two_level`` does; ``nccl_ep`` allocates receive buffers for all rows of all ranks."""
THIRD_PARTY_DISPATCHERS = frozenset(
    name for name, record in DISPATCH.kinds.items() if issubclass(record, ThirdParty)
)
"""Dispatchers that need another package and have never been run with it."""
DEFAULTS = Layout()
DEVICE = StatePlacement()


class OtherRecompute(Recompute):
    """Recomputes kinds of module that only other software recomputes separately."""

    modules: tuple[Module, ...]

    @property
    def recomputed(self) -> frozenset[str]:
        """The kinds of ``modules``."""
        return frozenset(self.modules)


class OptimizerOnHost(StatePlacement):
    """Master weights and moments on the host, which updates them, as in other software: weights for
    products are not stored besides."""

    at: Literal["device", "host", "disk"] = "host"
    step: Literal["device", "host"] = "host"


class OtherDispatch(Dispatch):
    """A dispatcher of fixed shapes whose room is not published."""

    kind: str


@lru_cache(maxsize=1024)
def make_recompute(modules: Modules) -> Recompute | None:
    """Return the record that recomputes these kinds of module."""
    if not modules:
        return None
    if modules == {"block"}:
        return Full()
    names: Any = tuple(sorted(modules))
    if modules <= {*get_args(RecomputeKind)}:
        return Selective(modules=names)
    return OtherRecompute(modules=names)


@lru_cache(maxsize=1024)
def make_offload(modules: Modules) -> Offload | None:
    """Return the record that offloads the activations of these kinds of module to the host."""
    if not modules:
        return None
    # Unchecked, as other software offloads further kinds.
    host = OffloadToHost.model_construct(modules=tuple(sorted(modules)))
    return Offload(host=host)


@lru_cache(maxsize=256)
def make_dispatch(kind: str, node: int = 1) -> Dispatch:
    """Return a dispatcher's record by its kind.

    Args:
        kind: the kind; one that needs more than ``node`` has no stated room.
        node: neighbouring ranks of ep on one node, for ``two_level``; plans take nodes from the
            cluster.
    """
    record = DISPATCH.kinds[kind]
    if issubclass(record, TwoLevel):
        return record(node=node)
    if "max_rows" in record.model_fields:
        return OtherDispatch(kind=kind)
    return record()  # type: ignore[return-value]


def make_layout(
    sizes: Sizes,
    *,
    schedule: Schedule | None = None,
    stages: Stages | None = None,
    dispatch: Record | None = None,
    zero: int = 1,
    recompute: Modules = NOTHING,
    offload: Modules = NOTHING,
    state: StatePlacement = DEVICE,
) -> Layout:
    """Return a layout, unchecked, that states what is chosen: what has no effect is left out.

    Args:
        sizes: sizes of the axes.
        schedule: pipeline schedule; stated where there is a pipeline, or it overlaps passes.
        stages: contents of the stages; None is balanced.
        dispatch: dispatcher; stated where experts are on several ranks.
        zero: ZeRO stage.
        recompute: kinds of module that are recomputed.
        offload: kinds of module whose activations are on the host.
        state: where master weights and moments are.
    """
    stated: dict[str, Any] = {"sizes": sizes.text}
    if stages is not None:
        stated["stages"] = stages.text
    if schedule is not None and (sizes.pp > 1 or schedule.overlaps_passes):
        stated["schedule"] = schedule
    stated["zero"] = zero
    if dispatch is not None and sizes.ep * sizes.etp > 1:
        stated["dispatch"] = dispatch
    if recompute:
        stated["recompute"] = make_recompute(recompute)
    if state.is_offloaded:
        stated["state"] = state
    if offload:
        stated["offload"] = make_offload(offload)
    return DEFAULTS.model_copy(update=stated)


def require_plannable(layout: Layout) -> None:
    """Check that the planner knows every record of a layout.

    Raises:
        ValueError: it does not know one.
    """
    if not isinstance(layout.context, Context):
        raise ValueError(f"layout.context: {type(layout.context).__name__} cannot be planned")
    kind = type(layout.dispatch).model_fields["kind"].default
    if kind not in PLANNED_DISPATCHERS:
        raise ValueError(
            f"layout.dispatch {kind} cannot be planned, as its traffic is unknown; plan the run "
            f"with one of {', '.join(PLANNED_DISPATCHERS)}"
        )
    _ = layout.recomputed  # a record that does not state it is refused


def unsupported(layout: Layout) -> Iterator[str]:
    """Yield what training cannot execute yet, or only with other packages."""
    sizes = layout.split
    kind = dispatch_kind(layout)
    if sizes.ep * sizes.etp > 1 and kind in THIRD_PARTY_DISPATCHERS:
        yield f"dispatch {kind}"
    yield from _unknown("recompute", layout.recomputed, (*get_args(RecomputeKind), "block"))
    if layout.offload is not None:
        places = layout.offload.host, layout.offload.disk
        offloaded = {name for place in places if place is not None for name in place.modules}
        yield from _unknown("offload", offloaded, get_args(OffloadKind))
    if isinstance(layout.state, OptimizerOnHost):
        yield "optimizer on the host"


def _unknown(policy: str, names: Iterable[str], known: Iterable[str]) -> Iterator[str]:
    return (f"{policy} {name}" for name in sorted({*names} - {*known}))


def dispatch_kind(layout: Layout) -> str:
    """Return the kind of a layout's dispatcher."""
    assert isinstance(layout.dispatch, Dispatch)
    return layout.dispatch.kind


def has_fixed_rows(layout: Layout) -> bool:
    """Return whether experts get equally many rows in all passes."""
    record = DISPATCH.kinds[dispatch_kind(layout)]
    return issubclass(record, FixedShape) or layout.split.ep * layout.split.etp == 1
