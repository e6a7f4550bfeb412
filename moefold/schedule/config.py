"""Records of the pipeline schedules, with the sizes for which each is defined.

A new schedule is one file with its table and one record here. p pipeline ranks, v stage chunks per
rank, m micro-batches per step and data rank.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import RunError, Violation
from moefold.config.slot import Slot, build
from moefold.mesh.pipeline import StageMapping
from moefold.schedule.table import Table

SCHEDULE = Slot("pipeline schedule")


class Schedule(Record):
    """A pipeline schedule; its owner is a function ``(record, p, v, m) -> Table``."""

    stage_mapping: ClassVar[StageMapping] = "round"
    """How stages map to ranks."""
    overlaps_passes: ClassVar[bool] = False
    """Whether it overlaps one micro-batch's exchanges with another's compute."""

    @property
    def name(self) -> str:
        """Its name in a run file."""
        return type(self).model_fields["kind"].default

    def violations(self, p: int, v: int, m: int) -> Iterator[Violation]:
        """Yield violations of the schedule's domain: ``vpp``, ``micro_batches`` or ``group``.

        The nearest values are legal together. Sizes are at least 1.
        """
        yield from ()


class GroupedSchedule(Schedule):
    """A schedule in which groups of micro-batches pass through a rank's chunks in turn."""

    group: Annotated[int, Field(ge=1)] | None = None
    """Micro-batches per group when a rank has several chunks; None: the number of ranks."""

    def group_size(self, p: int, m: int) -> int:
        """Return the micro-batches of a full group, at most ``m``."""
        return min(self.group or p, m)

    def violations(self, p: int, v: int, m: int) -> Iterator[Violation]:
        """Every group, a shorter last one too, has at least as many micro-batches as ranks."""
        if v == 1:
            return
        group = max(p, self.group or p)
        if self.group is not None and self.group < p:
            rule = f"must be at least the number of pipeline ranks ({p})"
            yield Violation(("group",), self.group, rule, group)

        rest = m % group
        if 0 < rest < p:
            rule = f"vpp{v} needs micro-batches in groups of {group}"
            if group > p:
                rule += f", of which the last may have as few as {p}"
            fewer = m - rest
            more = m - rest + p
            nearest = fewer if fewer > 0 and rest < more - m else more  # the larger in a tie
            yield Violation(("micro_batches",), m, rule, nearest)


class VShapedSchedule(Schedule):
    """A schedule whose stages form a V: from the first rank to the last and back."""

    stage_mapping = "v"

    def violations(self, p: int, v: int, m: int) -> Iterator[Violation]:
        """There are two chunks, and enough micro-batches to fill both directions."""
        if v != 2:
            yield Violation(("vpp",), v, f"{self.name} needs vpp2: two chunks on each rank", 2)
        if m < 2 * p:
            rule = f"{self.name} needs two micro-batches or more for each of the {p} pipeline ranks"
            yield Violation(("micro_batches",), m, rule, 2 * p)


@SCHEDULE.register
class GPipe(Schedule):
    """All forwards, then all backwards. Any p, v and m."""

    kind: Literal["gpipe"] = "gpipe"
    owner = "moefold.schedule.one_f_one_b:gpipe"


@SCHEDULE.register
class OneFOneB(Schedule):
    """One forward, one backward. v = 1, any p and m."""

    kind: Literal["1f1b"] = "1f1b"
    owner = "moefold.schedule.one_f_one_b:one_f_one_b"

    def violations(self, p: int, v: int, m: int) -> Iterator[Violation]:
        """One chunk per rank."""
        if v != 1:
            rule = "1f1b needs one chunk on each rank; for several, choose schedule interleaved"
            yield Violation(("vpp",), v, rule, 1)


@SCHEDULE.register
class Interleaved(GroupedSchedule):
    """1F1B over v chunks per rank; with v > 1, m fills groups."""

    kind: Literal["interleaved"] = "interleaved"
    owner = "moefold.schedule.one_f_one_b:interleaved"


@SCHEDULE.register
class ZeroBubbleH1(GroupedSchedule):
    """1F1B with weight gradients in the bubbles; with v > 1, m fills groups."""

    kind: Literal["zb_h1"] = "zb_h1"
    owner = "moefold.schedule.one_f_one_b:zb_h1"


@SCHEDULE.register
class ZeroBubbleV(VShapedSchedule):
    """Two chunks in a V, with weight gradients in the bubbles. v = 2, m >= 2 p."""

    kind: Literal["zb_v"] = "zb_v"
    owner = "moefold.schedule.v_shape:zb_v"


@SCHEDULE.register
class DualPipeV(VShapedSchedule):
    """Two chunks in a V, with forwards overlapping backwards. v = 2, m >= 2 p."""

    kind: Literal["dualpipe_v"] = "dualpipe_v"
    overlaps_passes = True
    owner = "moefold.schedule.v_shape:dualpipe_v"


@SCHEDULE.register
class Merged(GroupedSchedule):
    """1F1B with forwards overlapping backwards; with v > 1, m fills groups. Any p, 1 too."""

    kind: Literal["merged"] = "merged"
    overlaps_passes = True
    owner = "moefold.schedule.one_f_one_b:merged"


def build_table(schedule: Schedule, p: int, v: int, m: int) -> Table:
    """Return the table of ``schedule`` for p ranks, v chunks per rank and m micro-batches.

    Raises:
        RunError: outside its domain, with the nearest legal values.
    """
    sizes = {"pp": p, "vpp": v, "micro_batches": m}
    violations = [Violation((n,), s, "must be at least 1", 1) for n, s in sizes.items() if s < 1]
    if violations := violations or list(schedule.violations(p, v, m)):
        source = f"schedule {schedule.name} with pp{p} vpp{v}, {m} micro-batches"
        raise RunError(violations, source=source)
    return build(schedule, p, v, m)
