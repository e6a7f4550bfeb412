"""Finds operators of a step's forward and backward that no CUDA graph can capture.

The step runs on fake tensors, without values, on one rank of each stage of a layout; nothing is
received from other ranks. If an operator needs values, because the host reads one or its output
shape depends on them, its line is recorded and it gets zeros, so the pass continues; if zeros fail,
the pass ends there. Operators are those of a CPU; copies between host and device are not detected.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import RLock, local
from traceback import walk_stack, walk_tb
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from moefold.comm.lone import lone_world
from moefold.comm.world import World
from moefold.data.batch import ROW_TENSORS, MicroBatch
from moefold.layers.flow import Flow
from moefold.model.config import Decoder
from moefold.parallel.apply import ModelParts, build_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline.executor import Factors, ScaledLoss, run_step
from moefold.proof.case import ProofCase
from moefold.proof.rank_run import LOSS_CHUNK, micro_batches
from moefold.spec.layer import as_layer_spec
from moefold.training.step import gradients

PACKAGE = Path(__file__).parents[1]
ALIGNED = 8
"""Rows of 16-bit elements must be a multiple of this for torch's grouped product."""


class HostRead(NamedTuple):
    """An operator that needs values."""

    operator: str
    at: str
    """``file:line`` of the innermost frame in the package or a plug-in."""


class RecordingFakeMode(FakeTensorMode):
    """Fake tensors; records operators that need values, and runs these on zeros.

    The mode belongs to its tensors, so it also sees operators on a pass's second thread.
    """

    def __init__(self) -> None:
        self._thread = local()
        self._lock = RLock()
        super().__init__(allow_non_fake_inputs=True)
        self.reads = Counter[HostRead]()

    @property
    def in_kernel_invocation(self) -> bool:
        """Whether a kernel is running, a flag that torch reads; tracked per thread here."""
        return getattr(self._thread, "inside", False)

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, inside: bool) -> None:
        """Set the flag of this thread."""
        self._thread.inside = inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; if it needs values, record it and run it on zeros."""
        try:
            with self._lock:
                return super().__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            self.reads[HostRead(func.name().partition("::")[2], _caller_line())] += 1
        with _disable_current_modes():
            args, kwargs = tree_map_only(FakeTensor, _zeros, (args, kwargs or {}))
            result = func(*args, **kwargs)
        return tree_map_only(Tensor, self.from_tensor, result)


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _caller_line() -> str:
    """Return the innermost current line outside libraries and this file."""
    frames = ((frame.f_code.co_filename, line) for frame, line in walk_stack(None))
    return next(filter(None, (_line(*frame) for frame in frames)), "?")


def _line(path: str, line: int) -> str:
    libraries = (sys.prefix, sys.base_prefix, str(Path(torch.__file__).parent), __file__, "<")
    if path.startswith(libraries):
        return ""
    file = Path(path)
    inside = PACKAGE in file.parents
    return f"{file.relative_to(PACKAGE.parent) if inside else file}:{line}"


class CaptureBlockers(NamedTuple):
    """Operators of a step that no graph can capture."""

    reads: dict[HostRead, int]
    """Operators that need values, with the number of their runs in a step over all stages."""
    failed_at: str = ""
    """The line where zeros made a pass fail; empty if none failed."""


def find_capture_blockers(case: ProofCase) -> CaptureBlockers:
    """Run a step of a case without values; return the operators that need some."""
    all_reads = Counter[HostRead]()
    failed_at = ""
    for stage in range(case.layout.split.pp):
        with lone_world(case.folding, case.folding.rank_on_stage(0, stage)) as world:
            reads, line = _find_host_reads(case, world)
            all_reads = all_reads + reads
            failed_at = failed_at or line
    return CaptureBlockers(dict(all_reads), failed_at)


class _StepEnded(Exception):
    """Ends a step after its passes; the message is the line where they failed, or empty."""


def _gpu_layout(decoder: Decoder, layout: Layout) -> Layout:
    """Return the layout with a grouped product for experts, as on a GPU, instead of a loop."""
    sizes = layout.split
    axis_sizes = sizes.tp, sizes.ep, sizes.etp
    specs = (as_layer_spec(block.ffn) for block in decoder.blocks)
    weights = [
        w for spec in specs for w in spec.weights(decoder.hidden) if w.is_expert and w.product
    ]
    if layout.experts != "auto" or any(w.local_matrix(*axis_sizes)[1] % ALIGNED for w in weights):
        return layout
    return layout.model_copy(update={"experts": "grouped"})


def _find_host_reads(case: ProofCase, world: World) -> tuple[Counter[HostRead], str]:
    """Return a rank's operators that need values, and the line where a pass failed."""
    mode = RecordingFakeMode()
    subject = case.subject
    # bf16, as graphs are for GPUs, and torch has no grouped product in fp32 without values.
    parts = build_parts(subject.decoder, "bf16", _gpu_layout(subject.decoder, case.layout), world)
    for module in parts.model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, Parameter(mode.from_tensor(p.detach()), p.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, mode.from_tensor(buffer))
    with mode:
        state = ShardedState(parts)

    def without_values(rows: MicroBatch) -> MicroBatch:
        names = (name for name in (*ROW_TENSORS, "row_T") if getattr(rows, name) is not None)
        return replace(rows, **{n: mode.from_tensor(getattr(rows, n)) for n in names})

    def run(
        parts: ModelParts, flows: Sequence[Flow], factors: Factors, loss: ScaledLoss
    ) -> NoReturn:
        flows = [flow.with_rows(without_values) for flow in flows]
        factors = Factors(*map(mode.from_tensor, factors))
        failed_at = ""
        try:
            with mode:
                run_step(parts, flows, factors, loss)
        except Exception as error:  # any failure that zeros may cause
            if not mode.reads:
                raise
            stack = walk_tb(error.__traceback__)
            lines = [_line(frame.f_code.co_filename, line) for frame, line in stack]
            failed_at = [line for line in lines if line][-1]
        raise _StepEnded(failed_at)

    position = world.attention
    dp = world.folding.dp
    try:
        gradients(state, micro_batches(subject)[position.dp :: dp], LOSS_CHUNK, executor=run)
    except _StepEnded as ended:
        return mode.reads, str(ended)
    raise AssertionError("a step runs its passes")
