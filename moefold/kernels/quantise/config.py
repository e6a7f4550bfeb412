"""Records of number formats of few bits, in which products of weights run."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.config.slot import Slot

QUANTISE = Slot("number format of weight products")
HIDDEN = 128
"""Elements of a block of pre-activations."""


class Quantise(Record):
    """Weight products of blocks in FP8 or FP4; all else stays in ``train.precision``."""

    length: ClassVar[int | None]
    """Elements of a block along what a product sums; None where a matrix is one block."""
    of_matrices: ClassVar[bool] = False
    """Whether a whole matrix has a scale."""
    libraries: ClassVar[tuple[str, ...]] = ("scaled_mm",)
    """Back ends that multiply it."""

    kind: str
    keep_first: Annotated[int, Field(ge=0)] = 0
    """First blocks that stay in ``train.precision``."""
    keep_last: Annotated[int, Field(ge=0)] = 0
    """Last blocks that stay in ``train.precision``."""
    keep: tuple[str, ...] = ()
    """Patterns of global names of weights that stay in ``train.precision``, such as
    ``*.attention.*``."""
    wgrad: Literal["narrow", "wide"] = "narrow"
    """Whether the product of a weight's gradient reads codes too."""
    rows: Literal["micro_batch", "rank"] = "micro_batch"
    """Which rows share blocks along rows and a matrix's scale: those of a micro-batch, of one
    expert among experts', in every layout; or those that a rank has, as grouped kernels do it."""
    wire: Literal["wide", "codes"] = "wide"
    """Format in which rows go to experts, and gradients of their results; one rank computes
    alike."""
    hidden: Literal["wide", "codes"] = "wide"
    """What backward reads of SwiGLU's pre-activation: itself, or FP8 codes in blocks of 1 x 128."""
    block: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    """Elements of a block along the summed dim; None is the published number."""
    scaling: Literal["current", "delayed"] = "current"
    """Whether the scale of a matrix follows from its own largest number, or from those of steps
    before."""
    backend: Literal["auto", "emulated", "scaled_mm", "scaled_grouped_mm", "deep_gemm"] = "auto"
    """What multiplies codes; ``auto`` is a library on a GPU, plain torch elsewhere. What a library
    does not support is emulated."""

    def rules(self) -> Iterator[Violation]:
        """A back end multiplies the kind."""
        asked = self.backend
        if asked in ("auto", "emulated"):
            return
        if asked not in self.libraries:
            known = ", ".join(("auto", "emulated", *self.libraries))
            rule = f"must be one of {known}, which multiply {self.kind}"
            yield Violation(("backend",), asked, rule, "auto")
        elif self.block not in (None, self.length):
            rule = f"multiplies published blocks alone, and block is {self.block}"
            yield Violation(("backend",), asked, rule, "emulated")

    @property
    def by_run(self) -> bool:
        """Whether the rows of a micro-batch, and expert, share what the layout does not cut."""
        return self.rows == "micro_batch" and self.scaling == "current"

    @property
    def hidden_block(self) -> int:
        """Elements of a block of the codes of pre-activations; 0 of those that stay wide."""
        return (self.block or HIDDEN) if self.hidden == "codes" else 0

    @property
    def rule(self) -> str | None:
        """The rule for scales, where a kind has ``scales`` to choose from; else None."""
        return getattr(self, "scales", None)


@QUANTISE.register
class Fp8Tensor(Quantise):
    """FP8 with a scale of each matrix, and of each expert's: E4M3, gradients of rows E5M2."""

    length = None
    of_matrices = True
    libraries = ("scaled_mm", "scaled_grouped_mm")
    kind: Literal["fp8_tensor"] = "fp8_tensor"
    history: Annotated[int, Field(ge=1)] = 1024
    """Steps whose largest numbers count where scaling is delayed."""
    amax: Literal["max", "most_recent"] = "max"
    """What of the history scales the next step: its largest number, or that of the last step."""


@QUANTISE.register
class Fp8Block(Quantise):
    """E4M3 in blocks of 1 x 128, and 128 x 128 of weights."""

    length = 128
    libraries = ("scaled_mm", "deep_gemm")
    kind: Literal["fp8_block"] = "fp8_block"
    scales: Literal["power", "fp32"] = "power"
    """Whether scales are rounded down to powers of two, or kept in fp32."""


@QUANTISE.register
class Mxfp8(Quantise):
    """E4M3 in blocks of 1 x 32 with scales of E8M0."""

    length = 32
    libraries = ("scaled_mm", "scaled_grouped_mm")
    kind: Literal["mxfp8"] = "mxfp8"
    scales: Literal["up", "floor"] = "up"
    """How a scale becomes a power of two: rounded up, or by OCP's rule."""


@QUANTISE.register
class Nvfp4(Quantise):
    """E2M1 in blocks of 1 x 16, and 16 x 16 of weights; gradients of rows rounded by chance."""

    length = 16
    of_matrices = True
    kind: Literal["nvfp4"] = "nvfp4"
