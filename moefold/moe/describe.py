"""Weights, operations and saved tensors of an MoE feed-forward, described without torch.

T rows, D hidden features, E experts of width F, K experts per row.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING, Any, ClassVar, Self

from moefold.mesh.config import Sizes
from moefold.spec.layer import (
    COPIES,
    INDEX,
    NOTHING,
    SMALL_WIDTH,
    STATISTIC,
    LayerSpec,
    Matmul,
    Operation,
    RoutingSpec,
    Saved,
    SavedKind,
    Shape,
    Traffic,
    Units,
    Weight,
    round_up,
)
from moefold.spec.parts import gated_traffic, saved_feed_forward, saved_norm

ROUTER_PASSES = 25
"""Reads and writes of a row of scores: scores, top-k, map, counts, balance."""
SCORE_INPUTS = {"sqrt_softplus": 2}
"""Tensors of the logits' shape that a score saves beside its result, which every score's backward
is assumed to read: the logits, and their softplus before the root."""
SMALL_EXPERTS = 8
SMALL_TOP_K = 4
SMALL_GROUPS = 4
"""Experts, experts per token and groups of experts in the small models of ``verify``."""


class MoeSpec(LayerSpec):
    """Base of :class:`moefold.moe.config.Moe`; declares its fields for type checking."""

    if TYPE_CHECKING:
        width: Any
        router: Any
        shared: Any
        latent: Any
        expert_bias: Any
        has_expert_variant: ClassVar[Any]
        populations: ClassVar[Any]
        keeps_logits: ClassVar[Any]

    gates: ClassVar[int] = 2
    """Matrices into the experts' width: two (gate and up), or one."""
    prefix = "moe"

    @property
    def routing(self) -> RoutingSpec:
        """The router's sizes, for planner and dispatchers."""
        router = self.router
        groups = self.router.groups
        limits = (groups.count, groups.keep) if groups else (1, None)
        return RoutingSpec(router.experts, router.top_k, self.latent, *limits, router.places)

    def _expert_units(self) -> tuple[Units, Units]:
        return (
            Units("ep", self.router.experts, "the number of experts"),
            Units("etp", self.width, "the expert width"),
        )

    def _shared_units(self) -> Units:
        return Units("tp", self.shared.width, "the shared expert width")

    def weights(self, hidden: int) -> Iterator[Weight]:
        """Yield the weights of router, experts, latent projections, shared and idle experts."""
        number = self.router.experts
        width = self.width
        experts, columns = self._expert_units()
        inner = self.latent or hidden
        gates = (self.gates,) if self.gates > 1 else ()
        choices = self.router.choices
        idle = self.router.idle_experts
        yield Weight("router.weight", (choices, hidden), (), "router", product=False)
        if self.router.bias:
            yield Weight("router.bias", (choices,), (), "router", product=False)
        for weight in self.router.weights(hidden):
            yield replace(weight, name=f"router.{weight.name}", category="router")
        part = "experts"
        shape = (number, *gates, width, inner)
        cuts_in = ((0, experts), (len(gates) + 1, columns))
        cuts_out = ((0, experts), (2, columns))
        yield Weight("experts.w_in", shape, cuts_in, part)
        yield Weight("experts.w_out", (number, inner, width), cuts_out, part, start="output")
        if self.expert_bias:
            shape = (number, *gates, width)
            small: dict[str, Any] = {"product": False, "summed": True, "start": "zeros"}
            yield Weight("experts.in_bias", shape, cuts_in, part, **small)
            yield Weight("experts.out_bias", (number, inner), ((0, experts),), part, **small)
        if self.latent is not None:
            yield Weight("down.weight", (inner, hidden), (), "experts")
            yield Weight("up.weight", (hidden, inner), (), "experts", start="normal", added=True)
        if self.shared is not None:
            shared = self.shared.width
            units = self._shared_units()
            shape = (*gates, shared, hidden)
            cut = ((len(gates), units),)
            yield Weight("shared.w_in", shape, cut, "shared")
            shape = (hidden, shared)
            cut = ((1, units),)
            gated = self.shared.gate
            yield Weight("shared.w_out", shape, cut, "shared", start="output", added=not gated)
            if gated:
                yield Weight("shared.gate.weight", (1, hidden), (), "shared")
        if idle is not None and idle.constant:
            shape = (hidden, idle.constant)
            yield Weight("idle.constant_bias", shape, (), "router", product=False, start="zeros")

    def operations(self, hidden: int) -> Iterator[Operation]:
        """Yield the router, the experts' products and activation, and optional parts."""
        router = self.router
        columns = self._expert_units()[1]
        # Scores are fp32: each pass moves twice the bytes of a bf16 feature.
        passes = 2 * ROUTER_PASSES
        scores = Traffic(router.choices, passes, passes, "own")
        read = [weight for weight in router.weights(hidden) if weight.product]
        names = ["router.weight", *(f"router.{weight.name}" for weight in read)]
        matmuls = tuple(Matmul((name,), "own") for name in names)
        yield Operation("router", matmuls, traffic=(scores,), launches=15, wide=True)
        products = (Matmul(("experts.w_in",), "routed"), Matmul(("experts.w_out",), "routed"))
        yield Operation("experts", products)
        activation = gated_traffic(self.width, "routed", columns, self.gates)
        extra = self._unfused_traffic(hidden)
        yield Operation("moe_act", traffic=(activation, *extra), launches=2)
        if router.idle_experts is not None:
            learned = router.idle_experts.constant > 0
            constants = (Matmul(("idle.constant_bias",), "own"),) * learned
            traffic = (Traffic(hidden, 3, 5, "own"),)
            yield Operation("idle", constants, traffic=traffic, launches=8, wide=True)
        if self.latent is not None:
            narrow = (Matmul(("down.weight",), "own"), Matmul(("up.weight",), "own"))
            yield Operation("latent", narrow, launches=4)
        if self.shared is not None:
            products = (Matmul(("shared.w_in",)), Matmul(("shared.w_out",)))
            activation = gated_traffic(
                self.shared.width, units=self._shared_units(), gates=self.gates
            )
            yield Operation("shared", products, traffic=(activation,), launches=4)
            if self.shared.gate:
                gate = (Matmul(("shared.gate.weight",), "own"),) * (1 + self.shared.two_way)
                yield Operation("gate", gate, launches=0, wide=True)

    def _unfused_traffic(self, hidden: int) -> tuple[Traffic, ...]:
        """Return the traffic of separate torch kernels for biases and other activations."""
        if not self.has_expert_variant:
            return ()
        columns = self._expert_units()[1]
        activation = Traffic(self.width, 24, 40, "routed", columns)
        weighting = Traffic(hidden, 5, 5, "routed")
        return activation, weighting

    def saved(self, shape: Shape) -> Iterator[Saved]:
        """Yield residual and normed rows, routing, experts' inputs and pre-activations."""
        received = shape.received_rows(self.routing)
        yield Saved("residual", shape.hidden_bytes, kind=SavedKind.RESIDUAL)
        read = ["router.weight", *(["down.weight"] if self.latent is not None else [])]
        if self.shared is not None:
            read += ["shared.w_in"] if shape.tp == 1 else []
            read += ["shared.gate.weight"] if self.shared.gate else []
        yield from saved_norm("ffn_norm", shape.hidden, shape, tuple(read))
        yield from self._saved_routing(shape)
        inner = self.latent or shape.hidden
        rows_in = received * inner * shape.width
        # With ep or etp the copies are of received rows, which nothing else saves.
        dropped = COPIES if shape.ep * shape.etp == 1 else NOTHING
        room = 0 if shape.room is None else received
        received_kind = SavedKind.RECEIVED
        part = Saved(
            "experts.input", rows_in, dropped, module="experts", rows=room, kind=received_kind
        )
        beside = replace(part, needed_by=frozenset(("experts",)))
        yield replace(part, operand_of=("experts.w_in",), also_saved=beside)
        yield Saved("experts.weights", received * STATISTIC, module="experts", kind=received_kind)
        if self.latent is not None:
            size = shape.rows * inner * shape.width
            if dropped:
                rows = Saved("latent.rows", size, needed_by=dropped, module="moe")
                yield replace(rows, kind=SavedKind.LATENT_ROWS)
            yield Saved("latent.combined", size, module="moe", operand_of=("up.weight",))
        yield from saved_feed_forward("experts", self.width // shape.etp, shape, received)
        if self.shared is not None:
            yield from saved_feed_forward("shared", self.shared.width // shape.tp, shape)
            if self.shared.gate:
                dropped = frozenset(("shared",))
                size = shape.rows * (shape.hidden + 1) * shape.width
                yield Saved("shared.gated", size, dropped, module="shared")
        # As a block's last segment combine is not recomputed, and saves the rows' destinations.
        runs_once = shape.separate_exchanges and self.latent is None
        places = shape.rows * self.router.places + shape.places
        back = received
        if shape.room is None and shape.ep * shape.etp > 1:
            # Copies are sorted twice: before they are sent, and after they are received.
            places += received
            back += shape.rows * self.router.top_k
        tokens = Saved("combine.tokens", back * INDEX, saved=not runs_once, module="moe")
        yield replace(tokens, kind=received_kind)
        yield Saved("dispatch.rows", places * INDEX, module="moe", kind=received_kind)

    def _saved_routing(self, shape: Shape) -> Iterator[Saved]:
        """Yield scores, weights and choices of the router, and the inputs of its loss terms."""
        router = self.router
        chosen = shape.rows * router.places
        scores = shape.rows * router.choices * STATISTIC
        yield Saved("router.scores", scores, module="moe")
        # With topk_first these are logits, and only those of the chosen experts have a score.
        late = router.order == "topk_first"
        if inputs := SCORE_INPUTS.get(router.score):
            size = chosen * STATISTIC if late else scores
            yield Saved("router.score_inputs", inputs * size, module="moe")
        yield Saved("router.chosen", chosen * INDEX, module="moe")
        divided = router.renormalise and not router.softmax_over_chosen
        if divided:
            yield Saved("router.total", shape.rows * STATISTIC, module="moe")
        if divided or late:
            yield Saved("router.weights", chosen * STATISTIC, module="moe")
        if router.partial:
            yield Saved("router.kept", chosen, module="moe")
        if self.shared is not None and self.shared.two_way:
            size = shape.rows * (shape.width + STATISTIC)
            if divided or not late or router.scale != 1:
                size += chosen * STATISTIC
            yield Saved("router.two_way", size, module="moe")
        yield Saved("decision", chosen * INDEX, saved=False, module="moe")
        if (idle := router.idle_experts) is not None:  # masks and weights
            yield Saved("idle.sent", chosen, module="moe")
            if idle.identity:
                yield Saved("idle.identities", chosen + shape.rows * shape.width, module="moe")
            if idle.constant:
                yield Saved("idle.constants", chosen * INDEX, module="moe")
                share = shape.rows * (idle.constant + 1) * STATISTIC
                yield Saved("idle.shares", share, module="moe", operand_of=("idle.constant_bias",))
        if shape.clones:
            indices = chosen + shape.ep * shape.clones
            # Plus a stand-in for the master of each weight.
            weights = 4 if self.expert_bias else 2
            size = indices * INDEX + weights * STATISTIC
            yield Saved("clones", size, saved=False, module="moe")
        local = router.experts // shape.ep + shape.clones
        part = Saved("offsets", local * 4, saved=shape.separate_exchanges, module="moe")
        yield replace(
            part, kind=SavedKind.EXPERT_ENDS, operand_of=("experts.w_in", "experts.w_out")
        )
        if self.populations:
            yield from self._saved_balance(shape)
        if self.keeps_logits:
            yield Saved("balance.logits", scores + shape.rows * STATISTIC, module="moe")

    def _saved_balance(self, shape: Shape) -> Iterator[Saved]:
        """Yield tensors saved by auxiliary losses, for one sequence per population."""
        router = self.router
        populations = self.populations
        if router.selection_bias or router.groups or router.kind not in ("topk", "idle"):
            plain = shape.rows * router.top_k * INDEX
            yield Saved("decision.plain", plain, saved=False, module="moe")
        counts = router.choices * INDEX * (1 + ("global_batch" in populations))
        yield Saved("balance.counts", counts, saved=False, module="moe")
        yield Saved("balance.share", router.choices * 8 * len(populations), module="moe")
        if router.score != "softmax":
            yield Saved("balance.total", 2 * shape.rows * STATISTIC, module="moe")
        if router.order == "topk_first":
            # Their scores are computed for the distribution alone; the logits are there already.
            tensors = max(1, SCORE_INPUTS.get(router.score, 0))
            scores = shape.rows * router.choices * STATISTIC
            yield Saved("balance.probability", tensors * scores, module="moe")

    def shrink(self, by: Sizes) -> Self:
        """Return a record with few experts, few groups and small widths."""
        router = self.router
        groups = self.router.groups
        top_k = min(router.top_k, SMALL_TOP_K)
        count = min(groups.count, SMALL_GROUPS) if groups else 1
        if groups and router.experts % count:
            count = groups.count
        # Both ep and the groups divide the number of experts.
        unit = lcm(by.ep, count)
        few_experts = round_up(min(router.experts, SMALL_EXPERTS), unit)
        experts = round_up(max(few_experts, top_k), unit)
        small: dict[str, Any] = {"experts": experts, "top_k": top_k}
        if router.idle_experts is not None:
            few = {name: min(number, 2) for name, number in router.idle_experts}
            small["idle"] = router.idle_experts.model_copy(update=few)
        if groups is not None:
            size = experts // count
            least = -(-top_k // size)
            keep = max(1, groups.keep * count // groups.count, least)
            kept = {"count": count, "keep": min(keep, count), "best": min(groups.best, size)}
            small["groups"] = groups.model_copy(update=kept)
        changed: dict[str, Any] = {"width": round_up(SMALL_WIDTH, by.etp)}
        changed["router"] = router.model_copy(update=small)
        if self.latent is not None:
            changed["latent"] = SMALL_WIDTH // 2
        if self.shared is not None:
            width = round_up(SMALL_WIDTH, by.tp)
            changed["shared"] = self.shared.model_copy(update={"width": width})
        return self.model_copy(update=changed)

    def narrowed(self, factor: int, multiple: int) -> Self:
        """Return a record with narrower experts, the shared one included; their number stays."""
        narrow = super().narrowed(factor, multiple)
        if self.shared is None:
            return narrow
        width = min(self.shared.width, round_up(-(-self.shared.width // factor), multiple))
        return narrow.model_copy(update={"shared": self.shared.model_copy(update={"width": width})})

    def without_discrete_choices(self) -> Self:
        """Return a record in which every token goes to all experts."""
        router = self.router.model_copy(update={"top_k": self.router.choices, "groups": None})
        return self.model_copy(update={"router": router, "capacity": None})
