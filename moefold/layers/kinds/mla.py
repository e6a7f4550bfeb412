"""Multi-head latent attention: record and description."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import Field

from moefold.config.errors import Violation
from moefold.layers.config import ATTENTION, Positive, Rope, Size
from moefold.mesh.config import Sizes
from moefold.spec.layer import (
    GATHER,
    NOTHING,
    SMALL_HEAD,
    UP,
    Attention,
    LayerSpec,
    LogitRows,
    Matmul,
    Operation,
    Saved,
    Shape,
    Traffic,
    Units,
    Weight,
    norm,
    small_heads,
)
from moefold.spec.parts import saved_attention, saved_norm


@ATTENTION.register
class Mla(LayerSpec):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    kind: Literal["mla"] = "mla"
    heads: Size
    q_rank: Size | None = None
    """Rank of the query latent; None projects queries directly."""
    kv_rank: Size = 512
    nope_dim: Size = 128
    """Dims per head without position."""
    rope_dim: Annotated[int, Field(ge=2)] = 64
    """Dims per head with rotary position; all heads share those of the key."""
    v_dim: Size = 128
    latent_epsilon: Positive = 1e-6
    """Epsilon of the latents' norms, independent of the decoder's ``norm_epsilon``."""
    rope: Rope | None = Rope(layout="interleaved")
    """Rotary positions; None is a layer without positions (NoPE)."""
    gate: bool = False
    """Whether a learned sigmoid gate of the row scales each head's output."""

    widths = ("q_rank", "kv_rank", "nope_dim", "rope_dim", "v_dim")
    owner = "moefold.layers.attention:LatentAttention"
    caches = True

    def rules(self) -> Iterator[Violation]:
        """Require an even ``rope_dim``, all of it rotated."""
        if self.rope_dim % 2:
            rule = "must be even, for rotary pairs"
            yield Violation(("rope_dim",), self.rope_dim, rule, self.rope_dim + 1)
        if self.rope is not None and self.rope.fraction != 1:
            rule = "must be 1: rope_dim states how many dims are rotated"
            yield Violation(("rope", "fraction"), self.rope.fraction, rule, 1.0)

    @property
    def core(self) -> Attention:
        """Description of the attention core, with as many key and value heads as query heads."""
        return Attention(self.heads, self.heads, self.nope_dim + self.rope_dim, self.v_dim)

    @property
    def logits(self) -> tuple[LogitRows, ...]:
        """Query and key up-projections; rotary query rows alone scale logits of the shared key."""
        query = "q.weight" if self.q_rank is None else "q_up.weight"
        nope = self.nope_dim
        queries = LogitRows(query, self.heads, ((nope, "query"), (self.rope_dim, "alone")))
        keys = LogitRows("kv_up.weight", self.heads, ((nope, "key"), (self.v_dim, None)))
        return queries, keys

    def _heads(self) -> Units:
        return Units("tp", self.heads, "the number of attention heads", heads=True)

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield down-projections, whole on each rank, and up-projections, cut by heads."""
        heads = ((0, self._heads()),)
        rank = self.q_rank
        queries = self.heads * (self.nope_dim + self.rope_dim)
        if rank is None:
            yield Weight("q.weight", (queries, hidden), heads)
        else:
            yield Weight("q_down.weight", (rank, hidden))
            yield norm("q_norm.weight", rank, latent=True)
            yield Weight("q_up.weight", (queries, rank), heads)
        yield Weight("kv_down.weight", (self.kv_rank + self.rope_dim, hidden))
        yield norm("kv_norm.weight", self.kv_rank, latent=True)
        expanded = self.heads * (self.nope_dim + self.v_dim)
        yield Weight("kv_up.weight", (expanded, self.kv_rank), heads)
        shape = (hidden, self.heads * self.v_dim)
        yield Weight("o.weight", shape, ((1, self._heads()),), added=True)
        if self.gate:
            yield Weight("out_gate.weight", (self.heads, hidden), heads)

    def operations(self, hidden: int) -> Iterator[Operation]:
        """Yield down-projections and output projection, up-projections, and the core."""
        products = [Matmul(("kv_down.weight",), "own"), Matmul(("o.weight",))]
        up = [Matmul(("kv_up.weight",))]
        latents = self.kv_rank + self.rope_dim
        if self.q_rank is None:
            products.append(Matmul(("q.weight",)))
        else:
            products.append(Matmul(("q_down.weight",), "own"))
            up.append(Matmul(("q_up.weight",)))
            latents += self.q_rank
        core = self.core
        expanded = self.heads * (2 * core.qk_dim + core.v_dim)
        traffic = [Traffic(latents, 4, 6, "own")]
        rotation = Traffic(expanded, 2, 2, units=self._heads())
        if self.gate:
            products.append(Matmul(("out_gate.weight",)))
            gated = self.heads * self.v_dim
            traffic.append(Traffic(gated, 2, 4, units=self._heads()))
        yield Operation("attention", tuple(products), traffic=tuple(traffic), launches=16)
        yield Operation("mla_up", tuple(up), traffic=(rotation,), launches=8)
        yield Operation("core", core=core, launches=1)

    def saved(self, shape: Shape) -> Iterator[Saved]:
        """Yield normed rows, latents before and after their norms, and the core's tensors."""
        down = ["kv_down.weight"]
        needed_by = NOTHING
        if self.q_rank is not None:
            down.append("q_down.weight")
        elif shape.tp == 1:
            down.append("q.weight")
            needed_by = UP
        if self.gate and shape.tp == 1:
            down.append("out_gate.weight")
        yield from saved_norm(
            "attention_norm", shape.hidden, shape, (*down,), also_needed_by=needed_by
        )
        latents = {"kv_down": self.kv_rank + self.rope_dim, "q_down": self.q_rank}
        for name, rank in latents.items():
            if rank is not None:
                size = shape.rows * rank * shape.width
                yield Saved(name, size, module="attention")
        yield from self._saved_latents(shape)
        for tensor in saved_attention(self.core, shape, UP):
            yield replace(tensor, operand_of=() if self.gate else tensor.operand_of)
        if self.gate:
            size = shape.piece * self.heads // shape.tp * shape.width
            yield Saved("out_gate", size, module="attention")
            yield Saved("gated", size * self.v_dim, module="attention", operand_of=("o.weight",))

    def _saved_latents(self, shape: Shape) -> Iterator[Saved]:
        """Yield the normed latents that up-projections read, gathered under tp."""
        only = GATHER if shape.tp > 1 else NOTHING
        for name, rank in (("q", self.q_rank), ("kv", self.kv_rank)):
            if rank is not None:
                up = (f"{name}_up.weight",)
                yield from saved_norm(f"{name}_norm", rank, shape, up, only, UP, inner=True)
        if shape.tp > 1:
            gate = ("out_gate.weight",) if self.gate else ()
            read = list[tuple[int, tuple[str, ...]]]()
            read.append((self.kv_rank + self.rope_dim, ("kv_up.weight",)))
            if self.q_rank is None:
                read.append((shape.hidden, ("q.weight", *gate)))
            else:
                read.append((self.q_rank, ("q_up.weight",)))
                read += [(shape.hidden, gate)] if gate else []
            for latent, weights in read:
                size = shape.piece * latent * shape.width
                gathered = Saved("latents.gathered", size, GATHER, module="attention")
                also_saved = None if weights == gate else replace(gathered, needed_by=UP)
                yield replace(gathered, operand_of=weights, also_saved=also_saved)

    def shrink(self, by: Sizes) -> Self:
        """Return a record with few heads of four dims, values of six, and latents of rank eight."""
        changed = {
            "heads": small_heads(self.heads, by),
            "kv_rank": 8,
            "nope_dim": SMALL_HEAD,
            "rope_dim": SMALL_HEAD,
            "v_dim": 6,
        }
        if self.q_rank is not None:
            changed["q_rank"] = 8
        return self.model_copy(update=changed)
