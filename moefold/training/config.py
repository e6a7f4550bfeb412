"""Records of training steps: number, batch, precision, loss, adapters, non-finite steps."""

from collections.abc import Iterator
from math import gcd
from typing import Annotated, Any, Literal

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import MISSING, Violation
from moefold.config.fields import OnDisk
from moefold.config.slot import Slot
from moefold.data.config import BatchSizes
from moefold.kernels.quantise.config import QUANTISE
from moefold.layers.config import PrecisionSetting, Size
from moefold.spec.decoder import has_routing
from moefold.training.losses.config import LOSS, CrossEntropy, LossRecord

NONFINITE = Slot("policy on a non-finite step")
ADAPTER = Slot("adapter")
LAYER_TARGETS = ("attention", "ffn", "shared", "experts")
"""Names of groups of weights in ``adapter.targets`` that ``all`` includes."""
OTHER_TARGETS = ("router", "head")


@NONFINITE.register
class Stop(Record):
    """Stops the run before the update, with a report of what is not finite."""

    kind: Literal["stop"] = "stop"
    replay: bool = False
    """Whether to compute the step again, to distinguish faults of data from faults of hardware."""


@NONFINITE.register
class Skip(Record):
    """Skips the update and continues; more than ``limit`` consecutive skips stop the run."""

    kind: Literal["skip"] = "skip"
    replay: bool = False
    limit: Size = 5


@NONFINITE.register
class Rewind(Record):
    """Returns to the newest checkpoint and excludes the offending step's data."""

    kind: Literal["rewind"] = "rewind"
    replay: bool = False
    limit: Size = 3


class SkipNorm(Record):
    """Skips steps with a large gradient; more than ``limit`` consecutive ones stop the run."""

    above: Annotated[float, Field(gt=0)]
    """Largest global gradient norm, before clipping, of a step that is not skipped."""
    limit: Size = 20


@ADAPTER.register
class Lora(Record):
    """Low-rank adapters (arXiv 2106.09685) as the only trained weights; all others are frozen."""

    kind: Literal["lora"] = "lora"
    rank: Size | Literal["stored"] = 16
    """Inner size of each adapter; ``stored`` takes ranks, scales and targets from ``from``."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Each adapter's output is scaled by ``alpha`` over its rank."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("all",)
    """Groups of weights (``attention``, ``ffn`` for dense feed-forwards, ``shared``, ``experts``;
    ``all`` for these four; ``router``, ``head``) and patterns of weights' global names."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's input features that a training step drops; the others are scaled up."""
    start: Annotated[str, OnDisk()] | None = Field(default=None, alias="from")
    """Folder of an adapter in PEFT's format to start from; None starts with zero output."""
    divided: bool = False
    """Whether adapters of routed experts have rank / top_k; a token's sum to ``rank`` then."""

    def rank_of(self, top_k: int | None) -> int:
        """Return the rank of a weight's adapter; ``top_k`` is given for routed experts.

        Raises:
            ValueError: if it is that of the adapter in ``start``.
        """
        if self.rank == "stored":
            raise ValueError(f"ranks are those of {self.start}")
        return max(1, self.rank // top_k) if self.divided and top_k else self.rank

    def rules(self) -> Iterator[Violation]:
        """``stored`` needs a folder, and no other sizes beside it."""
        if self.rank != "stored":
            return
        if self.start is None:
            yield Violation(("rank",), "stored", "needs from, the adapter's folder", 16)
        if self.divided:
            rule = "must be false if rank is stored, as the folder has the rank of each weight"
            yield Violation(("divided",), True, rule, False)


class Routing(Record):
    """Recording or replay of routers' choices in a folder, by step, layer and token.

    A replayed recording may come from a run in any layout that read the same data (in reinforcement
    learning, from the sampler): experts are taken from it, scores and weights are computed from
    the current weights, so that routers learn.
    """

    record: Annotated[str, Field(min_length=1, examples=["./routing"]), OnDisk()] | None = None
    """Folder to which choices are written."""
    replay: Annotated[str, Field(min_length=1, examples=["./routing"]), OnDisk()] | None = None
    """Folder from which choices are read; routers then make none."""

    def rules(self) -> Iterator[Violation]:
        """Exactly one of ``record`` and ``replay`` is set."""
        if (self.record is None) == (self.replay is None):
            rule = "cannot be combined with record" if self.record else "must be set, or record"
            yield Violation(("replay",), self.replay, rule, None if self.record else "./routing")


class BatchRamp(Record):
    """A batch that grows from ``from`` to ``train.batch`` in equal increments.

    The increment is the greatest common divisor of both.
    """

    start: Size = Field(alias="from")
    """Sequences of the first step."""
    steps: Size | None = None
    """Steps until the batch is ``train.batch``."""
    tokens: Size | None = None
    """Tokens until then, of which each size gets an equal share, rounded up to whole steps."""

    def rules(self) -> Iterator[Violation]:
        """Exactly one of ``steps`` and ``tokens`` is set."""
        if (self.steps is None) == (self.tokens is None):
            rule = "cannot be combined with steps" if self.steps else "must be set, or steps"
            yield Violation(("tokens",), self.tokens, rule, None if self.steps else 1_000_000)


def batch_sizes(batch: int, seq: int, ramp: BatchRamp | None) -> BatchSizes:
    """Return the sizes of all steps' batches, with a ramp or always ``batch``."""
    if ramp is None or ramp.start >= batch:
        return BatchSizes(((0, batch),))
    sizes = range(ramp.start, batch + 1, gcd(ramp.start, batch))
    increments = len(sizes) - 1
    firsts = [0]
    sequences = 0
    for number, size in enumerate(sizes[:-1], 1):
        first = -(-number * (ramp.steps or 0) // increments)
        if ramp.tokens is not None:
            until = -(-number * ramp.tokens // (increments * seq))
            steps = max(-(-(until - sequences) // size), 0)
            first = firsts[-1] + steps
            sequences += steps * size
        firsts.append(first)
    # Where several sizes would begin at one step, the last of them does.
    return BatchSizes(tuple(dict(zip(firsts, sizes, strict=True)).items()))


class Train(Record):
    """Number and size of steps, number formats, loss, and what is trained."""

    steps: Annotated[int, Field(ge=1)]
    batch: Size
    """Sequences per optimizer step, over all data-parallel ranks."""
    ramp: BatchRamp | None = None
    """Smaller batches at the start of the run; None: all steps have ``batch`` sequences."""
    micro_batch: Size = 1
    """Sequences per forward and backward, on each data-parallel rank."""
    precision: PrecisionSetting = "auto"
    """Compute format of matrix products; ``auto`` is bf16 if faster than fp32 here, else fp32."""
    quantise: Annotated[Record, QUANTISE] | None = None
    """Weight products of blocks in FP8 or FP4: ``nvfp4``, ``mxfp8``, ``fp8_block``,
    ``fp8_tensor``; None: in ``precision``."""
    loss: Annotated[LossRecord, LOSS] = CrossEntropy()
    """The loss that is minimised."""
    loss_chunk: Annotated[int, Field(ge=16)] = 1024
    """Number of tokens whose logits exist at a time."""
    on_nonfinite: Annotated[Record, NONFINITE] = Stop()
    """Policy for a step whose loss or gradient is not finite."""
    skip_norm: SkipNorm | None = None
    """Whether a step whose gradient has a large norm is skipped; None: it is only clipped."""
    freeze: tuple[str, ...] = ()
    """Patterns of global names of parameters that are not trained, such as ``*.router.*``. They
    have no gradient, master or optimizer state, and are stored in the dtype in which they are
    read."""
    extend: Literal["decay", "constant", "rewarm"] | None = None
    """What happens to the learning rate when a begun run gets another number of steps: it falls
    from its present value to the end of the schedule, stays, or rises to the peak and follows the
    schedule again. None: such a change is refused if the rate would jump."""
    repeat: Literal["refuse", "allow"] = "refuse"
    """Whether a fork that changes the order of data (mixture, length of sequences, sources, seed)
    may train again what was trained once. ``refuse`` does not concern a source that the run repeats
    without the change."""
    routing: Routing | None = None
    """Recording or replay of routers' choices; None: neither."""

    def violations(self, run: Any) -> Iterator[Violation]:
        """Yield violations of the loss and of recorded or replayed routing against the run."""
        yield from self.loss.violations(run)
        if self.routing is not None and run.layout.graphs != "none":
            rule = "must be none with train.routing, which reads or writes choices on the host"
            yield Violation(("layout", "graphs"), run.layout.graphs, rule, "none")
        routes = any(has_routing(block.ffn) for block in run.decoder.blocks)
        if self.routing is not None and not routes:
            rule = "must be left out: no layer of the model has a router"
            yield Violation(("train", "routing"), self.routing, rule, None)

    def sizes(self, seq: int) -> BatchSizes:
        """Return the sizes of all steps' batches, for sequences of ``seq`` tokens."""
        return batch_sizes(self.batch, seq, self.ramp)

    def rules(self) -> Iterator[Violation]:
        """``micro_batch`` divides ``batch`` and the first batch of a ramp, which is smaller."""
        ramp = self.ramp
        if ramp is not None and (ramp.start >= self.batch or ramp.start % self.micro_batch):
            rule = f"must be below batch ({self.batch}), and a multiple of micro_batch"
            largest = (self.batch - 1) // self.micro_batch * self.micro_batch
            yield Violation(("ramp", "from"), ramp.start, rule, largest or MISSING)
        if self.batch % self.micro_batch:
            sizes = range(min(self.micro_batch, self.batch), 0, -1)
            nearest = next(size for size in sizes if self.batch % size == 0)
            rule = f"must divide batch ({self.batch})"
            yield Violation(("micro_batch",), self.micro_batch, rule, nearest)
