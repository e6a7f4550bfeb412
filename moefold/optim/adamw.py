"""AdamW with decoupled weight decay (arXiv 1711.05101).

The update is a function over lists of tensors of any shape, for whole parameters and shards alike.
All arithmetic is elementwise.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from moefold.optim.base import Optimizer, state_dtype, zeros_for
from moefold.optim.config import (
    AdamW,
    AdamWRule,
    ParameterGroup,
    UpdateSettings,
    update_settings,
)
from moefold.optim.moments import (
    Bf16Moment,
    ElementRun,
    Fp8Moment,
    MomentGroups,
    MomentPosition,
    encode_shared_groups,
)

FUSED_DEVICES = ("cpu", "cuda")
TensorGroup = tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]
"""Parameters with equal settings, their gradients, and both moments."""


class AdamWUpdate(NamedTuple):
    """One update of tensors with equal settings; the gradient is ``grads * scale``."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    rule: AdamWRule
    step: int
    """Number of updates, including this one."""
    lr: float
    weight_decay: float
    scale: float


def adamw_reference_(update: AdamWUpdate) -> None:
    """Update parameters and both moments in place, one tensor at a time, in the moments' dtype."""
    rule = update.rule
    lr = update.lr
    beta1, beta2 = rule.betas
    rate = lr / (1 - beta1**update.step)
    correction2 = math.sqrt(1 - beta2**update.step)
    for param, grad, exp_avg, exp_avg_sq in zip(*update[:4], strict=True):
        grad = grad * update.scale if update.scale != 1 else grad
        wide = param if param.dtype == exp_avg.dtype else param.to(exp_avg.dtype)
        wide.mul_(1 - lr * update.weight_decay)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        wide.addcdiv_(exp_avg, (exp_avg_sq.sqrt() / correction2).add_(rule.eps), value=-rate)
        if wide is not param:
            param.copy_(wide)


def adamw_fused_(update: AdamWUpdate) -> None:
    """Fused form of :func:`adamw_reference_`, for :func:`fusible` tensors only.

    Overwrites the gradients when ``scale`` is not 1.
    """
    params, grads, exp_avgs, exp_avg_sqs = update[:4]
    device = params[0].device
    scale = update.scale
    # The kernel divides by its scale, and assumes that every tensor has the parameter's layout.
    # Filled on the device: copying a number from the host would synchronise.
    divisor = None if scale == 1 else torch.full((), 1 / scale, device=device)
    count = torch.full((), float(update.step), device=device)
    torch.ops.aten._fused_adamw_(
        params,
        [grad.contiguous() for grad in grads],
        exp_avgs,
        exp_avg_sqs,
        [],
        [count] * len(params),
        lr=update.lr,
        beta1=update.rule.betas[0],
        beta2=update.rule.betas[1],
        weight_decay=update.weight_decay,
        eps=update.rule.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=divisor,
    )
    # The kernel does not bump versions (torch 2.13): caches keyed by version would go stale.
    increment_version([*params, *exp_avgs, *exp_avg_sqs])


def fusible(param: Tensor) -> bool:
    """Return whether the fused kernel supports the parameter.

    float32 only: the kernel's gradient scale is float32, too coarse for float64. Contiguous only:
    it silently reads other layouts wrongly.
    """
    return (
        param.device.type in (*FUSED_DEVICES, "meta")
        and param.dtype == torch.float32
        and param.is_contiguous()
    )


class AdamWOptimizer(Optimizer):
    """AdamW over named parameters. State: ``exp_avg``, ``exp_avg_sq`` and ``step`` (int64) each.

    FP8 moments also have ``exp_avg_groups`` and ``exp_avg_sq_groups``. ``groups`` has the
    positions of this rank's elements, for low-precision moments; without it parameters are full.
    ``parameter_groups`` are those of the run, if ``rule`` is the rest of another optimizer.
    """

    def __init__(
        self,
        rule: AdamWRule,
        params: Mapping[str, Tensor],
        groups: MomentGroups | None = None,
        parameter_groups: Sequence[ParameterGroup] = (),
    ) -> None:
        super().__init__(params)
        self.rule = rule
        own = rule.groups if isinstance(rule, AdamW) else parameter_groups
        self._settings = {
            n: update_settings(own, n, rule.lr, rule.decay_of(n, p.shape))
            for n, p in self.params.items()
        }
        self._groups = groups
        self.group = rule.group if isinstance(rule, AdamW) else 0
        unfit = [name for name, p in self.params.items() if not fusible(p)]
        if rule.backend == "fused" and unfit:
            raise ValueError(
                "backend fused needs contiguous float32 parameters on "
                f"{' or '.join(FUSED_DEVICES)}; set backend to auto, or change: {', '.join(unfit)}"
            )
        self._fused: set[str] = set()
        if rule.backend != "reference":
            self._fused = {name for name, param in self.params.items() if fusible(param)}
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}
        self.low_precision: dict[
            str, tuple[Bf16Moment, Bf16Moment] | tuple[Fp8Moment, Fp8Moment]
        ] = {}
        """Low-precision moments, by parameter."""
        self._steps: dict[str, Tensor] = {}
        for name, p in self.params.items():
            states = rule.state_names(name, p.shape)
            if isinstance(rule, AdamW) and rule.stores_low_precision(p.shape):
                self._add_low_precision(name, p, states)
            else:
                first, second = (self._add_state(name, what, zeros_for(p)) for what in states)
                self._moments[name] = first, second
            self._steps[name] = self._add_state(name, "step", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def step(self, scale: float = 1.0, lr_factor: float = 1.0) -> None:
        """Update every parameter by AdamW."""
        grads = self._gradients(scale)
        for count in self._steps.values():
            count += 1

        def update(tensors: TensorGroup, fused: bool, settings: UpdateSettings, step: int) -> None:
            rate = settings.lr * lr_factor
            decay = settings.weight_decay
            arguments = AdamWUpdate(*tensors, self.rule, step, rate, decay, scale)
            (adamw_fused_ if fused else adamw_reference_)(arguments)

        groups: dict[tuple, list[str]] = defaultdict(list)
        for name in self._moments:
            key = self.params[name].device, *self._update_key(name)
            groups[key].append(name)
        for (_, *key), group in groups.items():
            params = [self.params[name] for name in group]
            group_grads = [grads[name] for name in group]
            first = [self._moments[name][0] for name in group]
            second = [self._moments[name][1] for name in group]
            update((params, group_grads, first, second), *key)
        for name, moments in self.low_precision.items():
            flat = self.params[name].view(-1)
            grad = grads[name].reshape(-1)
            key = self._update_key(name)
            run = self._element_run(name)
            for start, stop in run.chunks():  # bounds the moments in full precision
                wide = [m.read(start, stop).to(state_dtype(flat)) for m in moments]
                tensors = [flat[start:stop]], [grad[start:stop]], wide[:1], wide[1:]
                update(tensors, *key)
                part = run.subrun(start, stop)
                drawn = self._position(name).uniform(part, flat.device, key[-1])
                for moment, values, random in zip(moments, wide, drawn, strict=True):
                    moment.write(start, stop, values, random)
        if self._groups is not None and self.group:
            narrow = self.low_precision.items()
            fp8 = {name: [m for m in both if isinstance(m, Fp8Moment)] for name, both in narrow}
            encode_shared_groups(fp8, self._groups)

    def _update_key(self, name: str) -> tuple[bool, UpdateSettings, int]:
        """Return (fused, settings, step): parameters with equal keys can be updated together."""
        return name in self._fused, self._settings[name], int(self._steps[name])

    def _element_run(self, name: str) -> ElementRun:
        """Return this rank's elements of a parameter as a run of its shard."""
        position = self._position(name)
        elements = self.params[name].numel()
        return ElementRun(position.first, elements, position.row, self.group or position.row)

    def _position(self, name: str) -> MomentPosition:
        """Return the position of this rank's elements in a parameter."""
        if self._groups is not None:
            return self._groups.position(name)
        shape = tuple(self.params[name].shape)
        return MomentPosition(name, 0, tuple((0, size) for size in shape), shape)

    def _add_low_precision(self, name: str, p: Tensor, states: Sequence[str]) -> None:
        """Create low-precision moments of a parameter."""
        if self.group:
            run = self._element_run(name)
            moments = self.low_precision[name] = Fp8Moment(p, run), Fp8Moment(p, run)
        else:
            moments = self.low_precision[name] = Bf16Moment(p), Bf16Moment(p)
        for what, moment in zip(states, moments, strict=True):
            for state_name, tensor in moment.states(what).items():
                self._add_state(name, state_name, tensor)

    def lr(self, lr_factor: float = 1.0) -> dict[str, float]:
        """Return the learning rates of this step."""
        rule = self.rule
        others = rule.group_rates(lr_factor) if isinstance(rule, AdamW) else {}
        return {rule.kind: rule.lr * lr_factor, **others}

    def describe(self) -> dict[str, str]:
        """Return a description of how the update is computed."""
        plain = len(self.params) - len(self._fused)
        parts = [f"{len(self._fused)} tensors fused"] if self._fused else []
        parts += [f"{plain} tensors unfused"] if plain or not self._fused else []
        if self.low_precision:
            kind = "fp8" if self.group else "bf16"
            parts.append(f"moments of {len(self.low_precision)} tensors in {kind}, in plain torch")
        return {self.rule.kind: ", ".join(parts)}
