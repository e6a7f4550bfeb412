"""Records of low-precision number formats (FP8, FP4) of weight products."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.config.slot import Slot

QUANTISE = Slot("number format of weight products")
HIDDEN_BLOCK = 128
"""Elements of a block of pre-activations."""


class Quantise(Record):
    """Weight products of blocks in FP8 or FP4; all else stays in ``train.precision``."""

    block_length: ClassVar[int | None]
    """Elements of a scaling block along the summed dim; None if a matrix is one block."""
    has_matrix_scale: ClassVar[bool] = False
    """Whether each full matrix has a scale."""
    libraries: ClassVar[tuple[str, ...]] = ("scaled_mm",)
    """Back ends that support the format."""

    kind: str
    keep_first: Annotated[int, Field(ge=0)] = 0
    """Number of first blocks that stay in ``train.precision``."""
    keep_last: Annotated[int, Field(ge=0)] = 0
    """Number of last blocks that stay in ``train.precision``."""
    keep: tuple[str, ...] = ()
    """Patterns of global names of weights that stay in ``train.precision``, such as
    ``*.attention.*``."""
    wgrad: Literal["narrow", "wide"] = "narrow"
    """Whether the product of a weight's gradient reads low-precision codes too."""
    rows: Literal["micro_batch", "rank"] = "micro_batch"
    """Which rows share scaling blocks along rows, and a matrix's scale: rows of a micro-batch (and
    of one expert), equal in every layout; or rows of a rank, as in grouped kernels."""
    wire: Literal["wide", "codes"] = "wide"
    """Format in which rows are sent to experts, and gradients of their results; a single rank
    rounds them too."""
    hidden: Literal["wide", "codes"] = "wide"
    """Format in which SwiGLU's pre-activation is saved: unchanged, or FP8 in blocks of 1 x 128."""
    block: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    """Elements of a scaling block along the summed dim; None is the published number."""
    scaling: Literal["current", "delayed"] = "current"
    """Whether the scale of a matrix follows from its own largest magnitude, or from those of
    earlier steps."""
    backend: Literal["auto", "emulated", "scaled_mm", "scaled_grouped_mm", "deep_gemm"] = "auto"
    """Library that multiplies codes; ``auto`` is a library on a GPU, plain torch elsewhere. What a
    library does not support is emulated."""

    def rules(self) -> Iterator[Violation]:
        """The back end supports the format and its blocks."""
        backend = self.backend
        if backend in ("auto", "emulated"):
            return
        if backend not in self.libraries:
            names = ", ".join(("auto", "emulated", *self.libraries))
            rule = f"must be one of {names} for kind {self.kind}"
            yield Violation(("backend",), backend, rule, "auto")
        elif self.block not in (None, self.block_length):
            rule = f"does not support block: {self.block}; must be auto or emulated"
            yield Violation(("backend",), backend, rule, "emulated")

    @property
    def scales_per_run(self) -> bool:
        """Whether rows of one micro-batch and expert share blocks and scales, in every layout."""
        return self.rows == "micro_batch" and self.scaling == "current"

    @property
    def hidden_block(self) -> int:
        """Elements of a scaling block of saved pre-activations; 0 if they are saved unchanged."""
        return (self.block or HIDDEN_BLOCK) if self.hidden == "codes" else 0

    @property
    def scale_rule(self) -> str | None:
        """The rule for scales if the kind has a choice of ``scales``, else None."""
        return getattr(self, "scales", None)


@QUANTISE.register
class Fp8Tensor(Quantise):
    """FP8 with one scale per matrix (of each expert): E4M3, and E5M2 for gradients of rows."""

    block_length = None
    has_matrix_scale = True
    libraries = ("scaled_mm", "scaled_grouped_mm")
    kind: Literal["fp8_tensor"] = "fp8_tensor"
    history: Annotated[int, Field(ge=1)] = 1024
    """Number of steps in the history of delayed scaling."""
    amax: Literal["max", "most_recent"] = "max"
    """Entry of the history that scales the next step: the largest one, or that of the last step."""


@QUANTISE.register
class Fp8Block(Quantise):
    """E4M3 in blocks of 1 x 128; weights in blocks of 128 x 128."""

    block_length = 128
    libraries = ("scaled_mm", "deep_gemm")
    kind: Literal["fp8_block"] = "fp8_block"
    scales: Literal["power", "fp32"] = "power"
    """Whether scales are rounded down to powers of two, or stay in fp32."""


@QUANTISE.register
class Mxfp8(Quantise):
    """E4M3 in blocks of 1 x 32 with scales of E8M0."""

    block_length = 32
    libraries = ("scaled_mm", "scaled_grouped_mm")
    kind: Literal["mxfp8"] = "mxfp8"
    scales: Literal["up", "floor"] = "up"
    """How a scale becomes a power of two: rounded up, or by OCP's rule."""


@QUANTISE.register
class Nvfp4(Quantise):
    """E2M1 in blocks of 1 x 16, weights 16 x 16; stochastic rounding of gradients of rows."""

    block_length = 16
    has_matrix_scale = True
    kind: Literal["nvfp4"] = "nvfp4"
