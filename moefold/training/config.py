"""Records of the training step: how long, how much at once, and what a non-finite one does."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.config.fields import OnDisk
from moefold.config.slot import Slot
from moefold.kernels.quantise.config import QUANTISE
from moefold.layers.config import Asked, Size
from moefold.spec.decoder import has_routing
from moefold.training.losses.config import LOSS, CrossEntropy, LossRecord

NONFINITE = Slot("policy on a non-finite step")
ADAPTER = Slot("adapter")
LAYER_TARGETS = ("attention", "ffn", "shared", "experts")
"""Words for the weights of layers that ``all`` names too."""
MORE_TARGETS = ("router", "head")


@NONFINITE.register
class Stop(Record):
    """Stops the run before the update, with a report."""

    kind: Literal["stop"] = "stop"
    replay: bool = False
    """Computes the step once more, to tell a fault of the data from one of a machine."""


@NONFINITE.register
class Skip(Record):
    """Leaves the update out and goes on; more than ``limit`` in a row stop the run."""

    kind: Literal["skip"] = "skip"
    replay: bool = False
    limit: Size = 5


@NONFINITE.register
class Rewind(Record):
    """Goes back to the newest checkpoint and leaves the offending step's data out."""

    kind: Literal["rewind"] = "rewind"
    replay: bool = False
    limit: Size = 3


@ADAPTER.register
class Lora(Record):
    """Low-rank adapters (arXiv 2106.09685), which alone are trained; all else is frozen."""

    kind: Literal["lora"] = "lora"
    rank: Size = 16
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Each adapter's output is scaled by ``alpha`` over its rank."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("all",)
    """Words (``attention``, ``ffn`` for dense feed-forwards, ``shared``, ``experts``; ``all`` for
    those four that are there; ``router``, ``head``) and patterns of weights' global names."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's input features that a training step drops; the others are scaled up."""
    start: Annotated[str, OnDisk()] | None = Field(default=None, alias="from")
    """Folder of an adapter in PEFT's format to start from; None starts at zero."""
    divided: bool = False
    """Whether adapters of routed experts have rank / top_k, so that a token meets the same rank."""

    def rank_of(self, top_k: int | None) -> int:
        """Return the rank of a weight's adapter; ``top_k`` of a routed expert's."""
        return max(1, self.rank // top_k) if self.divided and top_k else self.rank


class Routing(Record):
    """Recording or replay of routers' choices: a folder with those of each step, layer and token.

    A replayed recording may come from a run in any layout that read the same data (in reinforcement
    learning, from the sampler): experts are those recorded, scores and weights are computed from
    the current weights, so that routers learn.
    """

    record: Annotated[str, Field(min_length=1, examples=["./routing"]), OnDisk()] | None = None
    """Folder to which choices are written."""
    replay: Annotated[str, Field(min_length=1, examples=["./routing"]), OnDisk()] | None = None
    """Folder from which choices are read in place of choosing."""

    def rules(self) -> Iterator[Violation]:
        """One of both."""
        if (self.record is None) == (self.replay is None):
            rule = "must stand alone beside record" if self.record else "must be given, or record"
            yield Violation(("replay",), self.replay, rule, None if self.record else "./routing")


class Train(Record):
    """How long, how much per step, in which number format."""

    steps: Size
    batch: Size
    """Sequences per optimizer step, over all data-parallel ranks."""
    micro_batch: Size = 1
    """Sequences per forward and backward."""
    precision: Asked = "auto"
    """Format of products; ``auto`` is bf16 where that is faster than fp32, otherwise fp32."""
    quantise: Annotated[Record, QUANTISE] | None = None
    """Weight products of blocks in FP8 or FP4: ``nvfp4``, ``mxfp8``, ``fp8_block``,
    ``fp8_tensor``; None: in ``precision``."""
    loss: Annotated[LossRecord, LOSS] = CrossEntropy()
    """What a step minimises."""
    loss_chunk: Annotated[int, Field(ge=16)] = 1024
    """Tokens whose logits exist at once."""
    on_nonfinite: Annotated[Record, NONFINITE] = Stop()
    """What happens to a step whose loss or gradient is not finite."""
    freeze: tuple[str, ...] = ()
    """Patterns of global names of parameters that are not trained, such as ``*.router.*``. They
    have no gradient, master or optimizer state, and are stored in the type in which they are
    read."""
    routing: Routing | None = None
    """Whether routers' choices are recorded or replayed; None: neither."""

    def violations(self, run: Any) -> Iterator[Violation]:
        """Yield where the loss, or what becomes of routers' choices, does not fit the run."""
        yield from self.loss.violations(run)
        if self.routing is not None and run.layout.graphs != "none":
            rule = "must be none: the host sees no choice of a step that is a graph (train.routing)"
            yield Violation(("layout", "graphs"), run.layout.graphs, rule, "none")
        if self.routing is not None and not any(has_routing(b.ffn) for b in run.decoder().blocks):
            rule = "must be left out: no layer has experts to choose from"
            yield Violation(("train", "routing"), self.routing, rule, None)

    def rules(self) -> Iterator[Violation]:
        """Micro-batches make up the batch."""
        if self.batch % self.micro_batch:
            nearest = max(
                d for d in range(1, min(self.micro_batch, self.batch) + 1) if self.batch % d == 0
            )
            yield Violation(
                ("micro_batch",), self.micro_batch, f"must divide batch ({self.batch})", nearest
            )
