"""Records of optimizers and learning-rate schedules.

Rules that need only a parameter's global name and shape (what decays, what is a matrix, which state
exists) are here too, so that memory can be planned without torch.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.config.slot import Slot

OPTIMIZER = Slot("optimizer")
LR_SCHEDULE = Slot("learning-rate schedule")

Span = int | float
"""Part of the run: an integer counts steps, a float below 1 is a fraction of the run."""

Rate = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Average = Annotated[float, Field(ge=0, lt=1)]
"""Weight of the past in an exponential moving average."""


def span_steps(span: Span, total_steps: int) -> int:
    """Return ``span`` in steps of a run of ``total_steps``."""
    return span if isinstance(span, int) else round(span * total_steps)


def span_rules(name: str, span: Span) -> Iterator[Violation]:
    """Yield violations of a span that do not depend on the run's length."""
    if span < 0:
        yield Violation((name,), span, "must not be negative", 0)
    elif isinstance(span, float) and span >= 1:
        rule = "must be a whole number of steps, or a fraction of the run below 1"
        yield Violation((name,), span, rule, round(span))


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a parameter's global name matches one of the shell-style patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


class LrSchedule(Record):
    """Learning-rate curve: a linear warm-up, then the peak, or the subclass's curve.

    It is evaluated at steps 0 .. total_steps - 1. Warm-up of w steps rises from 1/(w+1) at step 0
    to the peak, 1, at step w; the end value is at step ``total_steps``, the first step not taken.
    So no step at either end of the run has rate zero.
    """

    warmup: Span = 0
    """Steps (whole number) or fraction of the run over which the rate rises linearly. Recipes use
    fractions, so that ``train.steps`` can be changed alone before the first step."""

    def factor(self, step: int, total_steps: int) -> float:
        """Return the factor on the peak rate at ``step`` (updates done before it, from 0)."""
        warmup = span_steps(self.warmup, total_steps)
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return self.after_warmup(min(step, total_steps) - warmup, total_steps - warmup)

    def after_warmup(self, step: int, steps: int) -> float:
        """Return the factor ``step`` steps after warm-up, 0 <= step <= steps."""
        return 1.0

    def resolved(self, warmup: int, total_steps: int) -> Self:
        """Return the schedule with spans in steps that fit a run of ``total_steps``."""
        return self.model_copy(update={"warmup": warmup})

    def rules(self) -> Iterator[Violation]:
        """Require a valid span for ``warmup``."""
        yield from span_rules("warmup", self.warmup)

    def violations(self, total_steps: int) -> Iterator[Violation]:
        """Yield settings that do not fit ``total_steps``; paths are relative to the record."""
        if span_steps(self.warmup, total_steps) >= total_steps:
            rule = f"must be shorter than the run ({total_steps} steps)"
            yield Violation(("warmup",), self.warmup, rule, total_steps - 1)


@LR_SCHEDULE.register
class Constant(LrSchedule):
    """The peak rate until the end."""

    kind: Literal["constant"] = "constant"


@LR_SCHEDULE.register
class LinearDecay(LrSchedule):
    """A straight line from the peak to ``final`` times the peak."""

    kind: Literal["linear"] = "linear"
    final: Fraction = 0.0

    curve: ClassVar[str] = "linear"

    def after_warmup(self, step: int, steps: int) -> float:
        """Return the factor, falling from 1 to ``final``."""
        return _decay_value(self.curve, self.final, step, steps)


@LR_SCHEDULE.register
class Cosine(LinearDecay):
    """Half a cosine from the peak to ``final`` times the peak (arXiv 1608.03983)."""

    kind: Literal["cosine"] = "cosine"
    final: Fraction = 0.1

    curve = "cosine"


@LR_SCHEDULE.register
class Wsd(LrSchedule):
    """Warm-up, stable, decay: the peak until the last ``decay`` steps (arXiv 2404.06395)."""

    kind: Literal["wsd"] = "wsd"
    decay: Span = 0.2
    """Steps (whole number) or fraction of the run over which the rate falls at the end."""
    final: Fraction = 0.0
    shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """Curve of the fall; ``sqrt`` is 1 - sqrt(progress) (arXiv 2405.18392)."""

    def factor(self, step: int, total_steps: int) -> float:
        """Return the factor on the peak rate at ``step`` (updates done before it, from 0)."""
        decay = span_steps(self.decay, total_steps)
        decayed = min(step, total_steps) - (total_steps - decay)
        if step < span_steps(self.warmup, total_steps) or decayed <= 0:
            return super().factor(step, total_steps)
        return _decay_value(self.shape, self.final, decayed, decay)

    def resolved(self, warmup: int, total_steps: int) -> Self:
        """Return the schedule with spans in steps that fit a run of ``total_steps``."""
        decay = min(span_steps(self.decay, total_steps), total_steps - warmup)
        return self.model_copy(update={"warmup": warmup, "decay": decay})

    def rules(self) -> Iterator[Violation]:
        """Require valid spans for ``warmup`` and ``decay``."""
        yield from super().rules()
        yield from span_rules("decay", self.decay)

    def violations(self, total_steps: int) -> Iterator[Violation]:
        """Yield settings that do not fit; warm-up and decay must not overlap."""
        yield from super().violations(total_steps)
        warmup = min(span_steps(self.warmup, total_steps), total_steps - 1)
        room = total_steps - warmup
        if span_steps(self.decay, total_steps) > room:
            rule = f"must fit between warm-up and end ({total_steps} - {warmup} steps)"
            yield Violation(("decay",), self.decay, rule, room)


def _decay_value(shape: str, final: float, step: int, steps: int) -> float:
    """Return the value after ``step`` of ``steps`` on a curve from 1 down to ``final``."""
    progress = step / steps if steps > 0 else 1.0
    if shape == "cosine":
        remaining = 0.5 * (1 + math.cos(math.pi * progress))
    elif shape == "sqrt":
        remaining = 1 - math.sqrt(progress)
    else:
        remaining = 1 - progress
    return final + (1 - final) * remaining


class QkClip(Record):
    """After an update, scales down query and key weights of heads whose largest logit exceeded a
    bound (MuonClip, arXiv 2507.20534).

    The largest logit is over the step's rows; attention computes its scores a second time for it.
    """

    bound: Annotated[float, Field(gt=0)] = 100.0
    alpha: Fraction = 0.5
    """Exponent of the scaling factor for queries; keys have the exponent 1 - ``alpha``."""


GROUP_NAMES: Mapping[str, tuple[str, ...]] = {
    "embedding": ("embed.*",),
    "head": ("head.*",),
    "router": ("*.router.*",),
}
"""Words for parameters in ``optim.groups``, and the patterns of global names that they mean."""


class ParameterGroup(Record):
    """Parameters with a learning rate or a weight decay of their own."""

    names: Annotated[tuple[str, ...], Field(min_length=1, examples=[["embedding", "head"]])]
    """Patterns of global names; ``embedding``, ``head`` and ``router`` for these modules."""
    lr: Rate | None = None
    """Peak learning rate, which follows the schedule of all others; None: the optimizer's."""
    weight_decay: Rate | None = None
    """None: the optimizer's. Parameters that ``no_decay`` names still have none."""

    @property
    def label(self) -> str:
        """Name of the group in figures."""
        return "+".join(self.names)

    def matches(self, name: str) -> bool:
        """Return whether a parameter is of the group."""
        return any(matches(name, GROUP_NAMES.get(each, (each,))) for each in self.names)

    def rules(self) -> Iterator[Violation]:
        """Something is set."""
        if self.lr is None and self.weight_decay is None:
            yield Violation(("lr",), None, "must be set, or weight_decay", 1e-4)


class UpdateSettings(NamedTuple):
    """What the update of a parameter takes from the run file."""

    lr: float
    """Peak learning rate."""
    weight_decay: float


def update_settings(
    groups: Sequence[ParameterGroup], name: str, lr: float, weight_decay: float | None
) -> UpdateSettings:
    """Return a parameter's settings: those of the first group that matches, if it states them.

    Args:
        groups: ``optim.groups``.
        name: the parameter's global name.
        lr: the optimizer's peak rate.
        weight_decay: the optimizer's; None for a parameter that never decays.
    """
    group = next((group for group in groups if group.matches(name)), None)
    if group is not None and group.lr is not None:
        lr = group.lr
    if group is not None and group.weight_decay is not None and weight_decay is not None:
        weight_decay = group.weight_decay
    return UpdateSettings(lr, weight_decay or 0.0)


class Optim(Record):
    """Settings of every optimizer: learning rates, their schedule, and gradient clipping."""

    kind: str
    lr: Rate
    """Peak learning rate."""
    groups: tuple[ParameterGroup, ...] = ()
    """Parameters with settings of their own; one that several groups match is of the first."""
    schedule_lr: Annotated[LrSchedule, LR_SCHEDULE] = Constant()
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global gradient norm that is not scaled down; None never clips."""
    qk_clip: QkClip | None = None

    elementwise: ClassVar[bool] = False
    """Whether an element's update depends only on its gradient and state, so that parts can be
    updated one after another, and on the host (``layout.state``)."""

    @abstractmethod
    def state_names(self, name: str, shape: Sequence[int]) -> tuple[str, ...]:
        """Return the names of the state tensors, each of the parameter's own shape."""

    def group_rates(self, lr_factor: float = 1.0) -> dict[str, float]:
        """Return the learning rate of each group that has its own, by the group's label."""
        rated = [(group.label, group.lr) for group in self.groups]
        return {label: lr * lr_factor for label, lr in rated if lr is not None}

    @property
    def group(self) -> int:
        """Elements of a parameter's last dim whose state shares a scale; 0 if none does."""
        return 0

    @property
    def rounds(self) -> bool:
        """Whether state is rounded stochastically, depending on the positions of elements.

        Such an optimizer is built with a further argument, ``groups``
        (:class:`moefold.optim.moments.MomentGroups`).
        """
        return self.group > 0

    def split(self, shape: Sequence[int], heads: int) -> tuple[int, ...]:
        """Return the shape in which a parameter is updated; ``heads`` divide its rows."""
        return tuple(shape)

    def moment_bytes(self, shape: Sequence[int], wide: float) -> float:
        """Return the bytes per element of each state tensor; ``wide``: those of the arithmetic."""
        return wide

    def needs_whole(self, name: str, shape: Sequence[int]) -> bool:
        """Return whether a parameter's update needs full matrices.

        Otherwise any run of elements can be updated by itself. If some parameter needs them, the
        optimizer is built with ``wholes`` (:class:`moefold.optim.base.FullMatrices`) too.
        """
        return False

    def violations(self, total_steps: int) -> Iterator[Violation]:
        """Yield settings that do not fit ``total_steps``; paths are relative to the record."""
        for violation in self.schedule_lr.violations(total_steps):
            yield violation.under("schedule_lr")


class DecayRule(Record):
    """Settings of weight decay."""

    weight_decay: Rate = 0.1
    """Decoupled: each step subtracts ``lr * weight_decay`` of the weight."""
    no_decay: tuple[str, ...] = ("*norm*", "*bias*")
    """Patterns of global names without weight decay. Parameters of fewer than two dims never decay;
    embeddings and the head do, unless listed here."""

    def decays(self, name: str, shape: Sequence[int]) -> bool:
        """Return whether weight decay applies to the parameter."""
        return len(shape) >= 2 and not matches(name, self.no_decay)

    def decay_of(self, name: str, shape: Sequence[int]) -> float | None:
        """Return the parameter's weight decay unless a group states another; None: never any."""
        return self.weight_decay if self.decays(name, shape) else None


class AdamWRule(DecayRule):
    """Settings of AdamW (arXiv 1711.05101), for all parameters or as the ``rest`` of Muon."""

    kind: Literal["adamw"] = "adamw"
    lr: Rate = 3e-4
    """Peak learning rate."""
    betas: tuple[Average, Average] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    backend: Literal["auto", "fused", "reference"] = "auto"

    def state_names(self, name: str, shape: Sequence[int]) -> tuple[str, ...]:
        """Return the first and the second moment."""
        return ("exp_avg", "exp_avg_sq")


@OPTIMIZER.register
class AdamW(AdamWRule, Optim):
    """AdamW for all parameters."""

    moments: Literal["fp32", "bf16", "fp8"] = "fp32"
    """Storage of both moments, for parameters of two or more dims, rounded stochastically; updates
    are in fp32. ``fp8``: E4M3 with an expanded range (COAT, arXiv 2410.19313)."""
    moment_group: Annotated[int, Field(ge=1)] = 128
    """Elements of a parameter's last dim that share a scale under ``fp8``; fewer for small ones."""

    owner = "moefold.optim.adamw:AdamWOptimizer"
    elementwise = True

    def stores_low_precision(self, shape: Sequence[int]) -> bool:
        """Return whether a parameter's moments are stored in low precision."""
        return self.rounds and len(shape) >= 2

    @property
    def group(self) -> int:
        """Elements that share a scale under ``fp8``."""
        return self.moment_group if self.moments == "fp8" else 0

    @property
    def rounds(self) -> bool:
        """Whether moments are stored in low precision."""
        return self.moments != "fp32"

    def moment_bytes(self, shape: Sequence[int], wide: float) -> float:
        """Return 2 for bf16 moments, or 1 plus 12 bytes per group for fp8."""
        if not self.stores_low_precision(shape):
            return wide
        if not self.group:
            return 2
        groups = -(-shape[-1] // self.group)
        return 1 + 12 * groups / shape[-1]


@OPTIMIZER.register
class Muon(Optim):
    """Muon: momentum orthogonalised by Newton-Schulz, for matrices; ``rest`` for the others.

    A matrix is a parameter ``[m, n]``, both sides above 1, whose name matches none of
    ``rest_names``; leading dims (experts, gate and up) make a stack of matrices.
    """

    kind: Literal["muon"] = "muon"
    lr: Rate = 0.01
    """Peak learning rate of the matrices."""
    momentum: Average = 0.95
    nesterov: bool = True
    ns_steps: Annotated[int, Field(ge=1, le=20)] = 5
    """Newton-Schulz iterations."""
    scale: Literal["match_rms", "shape", "none"] = "match_rms"
    """Factor on the update of an ``[m, n]`` matrix. ``match_rms``: 0.2 * sqrt(max(m, n)), the RMS
    of an AdamW update, so that both use similar rates (arXiv 2502.16982); ``shape``:
    sqrt(max(1, m / n)), as in the original Muon."""
    weight_decay: Rate = 0.1
    """Decoupled: each step subtracts ``lr * weight_decay`` of the weight."""
    by_heads: bool = False
    """Whether the rows of each head's queries, keys or values are a separate matrix."""
    arithmetic: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of Newton-Schulz; ``auto`` is bfloat16 where the device multiplies it natively and the
    matrix is not tiny. float64 parameters always use float64."""
    rest: AdamWRule = AdamWRule()
    rest_names: tuple[str, ...] = (
        "*embed*",
        "head.*",
        "*.head.*",
        "*lm_head*",
        "*router*",
        "*norm*",
        "*bias*",
    )
    """Patterns of global names that ``rest`` updates whatever their shape. Embedding and head:
    their rows belong to tokens, with gradients of very different size and frequency. Router: an
    orthogonal update keeps its size however small the gradient, so choices would never settle."""

    owner = "moefold.optim.muon:MuonOptimizer"

    def orthogonalises(self, name: str, shape: Sequence[int]) -> bool:
        """Return whether Muon, not ``rest``, updates the parameter."""
        is_matrix = len(shape) >= 2 and min(shape[-2:]) > 1
        return is_matrix and not matches(name, self.rest_names)

    def needs_whole(self, name: str, shape: Sequence[int]) -> bool:
        """Return whether Muon updates the parameter."""
        return self.orthogonalises(name, shape)

    def split(self, shape: Sequence[int], heads: int) -> tuple[int, ...]:
        """Return a parameter's shape as a stack of matrices; ``heads`` is 0 without heads."""
        if not (self.by_heads and heads and len(shape) == 2 and shape[0] > heads):
            return tuple(shape)
        return (heads, shape[0] // heads, shape[1])

    def state_names(self, name: str, shape: Sequence[int]) -> tuple[str, ...]:
        """Return the momentum, or the state of ``rest``."""
        if self.orthogonalises(name, shape):
            return ("momentum",)
        return self.rest.state_names(name, shape)


class MomentumRule(DecayRule, Optim):
    """Settings of an elementwise optimizer whose only state is a momentum, for all parameters."""

    elementwise = True

    def state_names(self, name: str, shape: Sequence[int]) -> tuple[str, ...]:
        """Return the momentum."""
        return ("momentum",)


@OPTIMIZER.register
class Sgd(MomentumRule):
    """Stochastic gradient descent, with the rules of ``torch.optim.SGD``."""

    kind: Literal["sgd"] = "sgd"
    lr: Rate = 0.1
    """Peak learning rate."""
    momentum: Average = 0.9
    """Weight of the past in the sum of gradients; 0 has no state."""
    nesterov: bool = False
    """Whether the update is the gradient plus ``momentum`` times the new sum."""
    weight_decay: Rate = 0.0
    """Not decoupled: ``weight_decay`` times the weight is added to the gradient."""

    owner = "moefold.optim.sgd:SgdOptimizer"

    def rules(self) -> Iterator[Violation]:
        """Nesterov's momentum needs a momentum."""
        if self.nesterov and not self.momentum:
            yield Violation(("nesterov",), True, "needs a momentum above 0", False)

    def state_names(self, name: str, shape: Sequence[int]) -> tuple[str, ...]:
        """Return the momentum, if there is one."""
        return ("momentum",) if self.momentum else ()


@OPTIMIZER.register
class Lion(MomentumRule):
    """Lion: the sign of a momentum as the update (arXiv 2302.06675).

    As each element moves by ``lr``, rates are 3 to 10 times smaller than AdamW's, and weight decay
    is larger by the same factor.
    """

    kind: Literal["lion"] = "lion"
    lr: Rate = 1e-4
    """Peak learning rate."""
    betas: tuple[Average, Average] = (0.9, 0.99)
    """Weight of the momentum in the update, and in the next momentum."""
    weight_decay: Rate = 1.0
    """Decoupled: each step subtracts ``lr * weight_decay`` of the weight."""

    owner = "moefold.optim.lion:LionOptimizer"
