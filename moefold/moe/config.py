"""Records of the mixture-of-experts layer: router, balance, capacity, shared expert."""

from collections.abc import Iterable, Iterator
from fractions import Fraction
from math import ceil
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import REMOVE, Violation
from moefold.config.slot import Slot
from moefold.layers.config import FFN, Activation, Size
from moefold.mesh.shares import divisors
from moefold.moe.describe import MoeSpec
from moefold.spec.layer import Weight

ROUTER = Slot("router", default="topk")
BALANCE = Slot("balance term")
MAX_EXPERTS = 1 << 16


class Groups(Record):
    """Group-limited routing: only experts of the ``keep`` best groups can be chosen.

    A group's score differs by model: the maximum of its experts' scores in DeepSeek-V2, the sum of
    the best two in DeepSeek-V3.
    """

    count: Size
    keep: Size
    score: Literal["max", "sum_best"] = "sum_best"
    best: Size = 2
    """Number of scores of a group that ``sum_best`` adds."""

    @property
    def summed_scores(self) -> int:
        """Number of best scores whose sum is a group's score."""
        return self.best if self.score == "sum_best" else 1

    def rules(self) -> Iterator[Violation]:
        """Require at most ``count`` groups to keep."""
        if self.keep > self.count:
            rule = f"must be at most count ({self.count})"
            yield Violation(("keep",), self.keep, rule, self.count)


class Idle(Record):
    """Zero-computation experts: further choices, for which no row is dispatched.

    Used by LongCat-Flash (arXiv 2509.01322: identities) and MoE++ (arXiv 2410.07348, whose
    constants also mix in the token by a learned weight, unlike here).
    """

    identity: Annotated[int, Field(ge=0, le=MAX_EXPERTS)] = 0
    """Number of choices that return their input."""
    constant: Annotated[int, Field(ge=0, le=MAX_EXPERTS)] = 0
    """Number of choices that each return a learned row."""
    zero: Annotated[int, Field(ge=0, le=MAX_EXPERTS)] = 0
    """Number of choices that return zeros."""

    @property
    def count(self) -> int:
        """Total number of zero-computation experts."""
        return self.identity + self.constant + self.zero

    def rules(self) -> Iterator[Violation]:
        """Require at least one choice."""
        if not self.count:
            yield Violation(("identity",), 0, "must be at least 1 if constant and zero are 0", 1)


@ROUTER.register
class Router(Record):
    """Top-k choice of experts and their weights; base of every router's record."""

    kind: Literal["topk"] = "topk"
    experts: Annotated[int, Field(ge=0, le=MAX_EXPERTS)] = 0
    """Experts of a layer; 0 under a family, whose shape states the number."""
    top_k: Annotated[int, Field(ge=0, le=MAX_EXPERTS)] = 0
    """Experts per token; 0 under a family, whose shape states the number."""
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    order: Literal["score_first", "topk_first"] = "score_first"
    """Whether scores are computed over all experts or, after a choice by logits, of the chosen."""
    renormalise: bool = True
    """Whether weights are the chosen scores divided by their sum."""
    epsilon: Annotated[float, Field(ge=0)] = 0.0
    """Added to the sum of the chosen scores before the division."""
    floor: Annotated[float, Field(ge=0)] = 0.0
    """Lower bound of the sum of the chosen scores (ERNIE 4.5)."""
    scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor on the routing weights, applied last."""
    groups: Groups | None = None
    selection_bias: bool = False
    """Whether a bias (a buffer) is added to the scores (the logits with ``topk_first``) for the
    choice, but not for the weights."""
    bias: bool = False
    """Whether the logits have a learned bias per expert."""
    jitter: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Half-width around 1 of random factors on the router's input in training (Switch)."""
    dtype: Literal["float32", "float64"] = "float32"
    """Dtype of the scores, unless the rows' dtype is wider."""

    owner = "moefold.moe.router:TopKRouter"
    partial: ClassVar[bool] = False
    """Whether decisions in training may leave a token's places empty."""

    @property
    def idle_experts(self) -> Idle | None:
        """Zero-computation experts, numbered after the experts; None if there are none."""
        return None

    @property
    def softmax_over_chosen(self) -> bool:
        """Whether weights are a softmax over the chosen experts, which sums to 1 by itself."""
        return self.order == "topk_first" and self.score == "softmax"

    @property
    def choices(self) -> int:
        """Number of choices: experts and zero-computation experts."""
        return self.experts + (self.idle_experts.count if self.idle_experts else 0)

    @property
    def eligible(self) -> int:
        """Number of choices open to one token: those in the kept groups."""
        if self.groups is None:
            return self.choices
        return self.experts // self.groups.count * self.groups.keep

    @property
    def places(self) -> int:
        """Columns of ``experts_TK`` in a decision in training."""
        return self.top_k

    @property
    def words(self) -> str:
        """Description of the choice for the banner."""
        return f"top {self.top_k}"

    def weights(self, hidden: int) -> Iterable[Weight]:
        """Return a plug-in router's further parameters, by their names in it, in order."""
        return ()

    def rules(self) -> Iterator[Violation]:
        """Check top-k against experts and groups, and that the router can learn."""
        if not self.experts:
            return
        if self.top_k > self.choices:
            rule = f"must be at most experts ({self.choices})"
            yield Violation(("top_k",), self.top_k, rule, self.choices)
        if self.softmax_over_chosen and self.top_k == 1:
            rule = "with top_k 1 a softmax over the chosen is always 1: the router cannot learn"
            yield Violation(("order",), self.order, rule, "score_first")
        elif self.top_k == 1 and self.renormalise:
            rule = "with top_k 1 the renormalised weight is always 1: the router cannot learn"
            yield Violation(("renormalise",), True, rule, False)
        if (groups := self.groups) is None:
            return
        if self.experts % groups.count:
            nearest = max(d for d in divisors(self.experts) if d <= groups.count)
            rule = f"must divide experts ({self.experts})"
            yield Violation(("groups", "count"), groups.count, rule, nearest)
            return
        size = self.experts // groups.count
        if self.top_k > size * groups.keep:
            rule = f"keep * experts per group ({size}) must be at least top_k ({self.top_k})"
            least = -(-self.top_k // size)
            yield Violation(("groups", "keep"), groups.keep, rule, least)
        if groups.score == "sum_best" and groups.best > size:
            rule = f"must be at most experts per group ({size})"
            yield Violation(("groups", "best"), groups.best, rule, size)


@ROUTER.register
class IdleRouter(Router):
    """Top-k choice among experts and zero-computation experts."""

    kind: Literal["idle"] = "idle"
    idle: Idle = Idle(identity=1)

    @property
    def idle_experts(self) -> Idle:
        """Zero-computation experts, numbered after the experts."""
        return self.idle

    @property
    def words(self) -> str:
        """Description of the choice for the banner."""
        return f"top {self.top_k} of these and {self.idle.count} idle"

    def rules(self) -> Iterator[Violation]:
        """Apply the rules of top-k; refuse groups, which contain only experts."""
        yield from super().rules()
        if self.groups is not None:
            rule = "cannot be combined with idle: zero-computation experts have no group"
            yield Violation(("groups",), self.groups, rule, None)


class _CustomChoice(Router):
    """Base of routers that choose by another rule, without selection bias or groups."""

    def rules(self) -> Iterator[Violation]:
        """Apply the rules of top-k; refuse groups and a selection bias."""
        yield from super().rules()
        for name, without in (("groups", None), ("selection_bias", False)):
            if (value := getattr(self, name)) != without:
                yield Violation((name,), value, f"has no effect with kind {self.kind}", without)


@ROUTER.register
class Sinkhorn(_CustomChoice):
    """In training, top-k of scores scaled by Sinkhorn iterations to equal demand for all experts.

    Scaling covers the micro-batch (BASE layers, arXiv 2103.16716; scaling as in arXiv
    2202.01169). Outside training each token chooses by its own scores.
    """

    kind: Literal["sinkhorn"] = "sinkhorn"
    rounds: Annotated[int, Field(ge=1, le=1000)] = 8
    """Iterations, each of which scales experts and then tokens."""

    owner = "moefold.moe.routers:SinkhornRouter"


@ROUTER.register
class Hash(_CustomChoice):
    """Choice by a hash of token id and layer number (hash layers, arXiv 2106.04426).

    Scores only determine the weights.
    """

    kind: Literal["hash"] = "hash"

    owner = "moefold.moe.routers:HashRouter"


@ROUTER.register
class RoundRobin(_CustomChoice):
    """Experts assigned to tokens in turn, for benchmarks of balanced load.

    With ``skew`` tokens choose at random with unequal odds, for benchmarks of unbalanced load.
    """

    kind: Literal["round_robin"] = "round_robin"
    skew: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of the logarithms of experts' odds in a layer; 0 is balanced."""

    owner = "moefold.moe.routers:RoundRobinRouter"


@ROUTER.register
class ExpertChoice(_CustomChoice):
    """In training, each expert chooses the fraction ``top_k / experts`` of the micro-batch's tokens
    that score highest for it (arXiv 2202.09368).

    All experts get equally many tokens, and a token any number of experts. The choice depends on
    later tokens, which do not exist in generation: outside training each token chooses ``top_k``
    experts by its own scores.
    """

    kind: Literal["expert_choice"] = "expert_choice"
    renormalise: bool = False
    most: Annotated[int, Field(ge=0)] = 0
    """Most experts per token, the best of those that chose it; 0 is no bound. On one rank the
    dispatched rows have space for this many copies of each token."""

    owner = "moefold.moe.routers:ExpertChoiceRouter"
    partial = True

    @property
    def places(self) -> int:
        """Most experts per token."""
        return self.most or self.experts

    @property
    def words(self) -> str:
        """Description of the choice for the banner."""
        return f"expert choice, {self.top_k} per token on average, looking at later tokens"

    def rules(self) -> Iterator[Violation]:
        """Apply the rules of top-k; weights are scores over all experts, not renormalised."""
        yield from super().rules()
        if self.renormalise:
            rule = "must be off: weights would sum to 1 for any number of experts per token"
            yield Violation(("renormalise",), True, rule, False)
        if self.order == "topk_first":
            rule = "must be score_first: expert_choice reads scores over all experts"
            yield Violation(("order",), self.order, rule, "score_first")
        if self.most > self.experts > 0:
            rule = f"must be at most experts ({self.experts})"
            yield Violation(("most",), self.most, rule, self.experts)


class Capacity(Record):
    """Bound on tokens per expert: ``ceil(tokens * top_k / experts * factor)`` per micro-batch."""

    factor: Annotated[float, Field(gt=0)]
    drop: Literal["probs", "position", "random"] = "probs"
    """Which choices an overfull expert drops: the least probable, the latest, or random ones
    (random token selection, arXiv 2109.10465)."""

    def max_copies(self, tokens: int, top_k: int, experts: int) -> int:
        """Return the most copies that one expert takes from ``tokens`` valid tokens.

        The factor is read as a decimal fraction: 1.1 * 50 is 55, where binary floats lead to 56.
        """
        factor = Fraction(str(self.factor))
        return ceil(factor * tokens * top_k / experts)


class Shared(Record):
    """Dense SwiGLU expert for every token."""

    width: Size
    gate: bool = False
    """Whether the output is scaled by a learned sigmoid gate of the token."""
    two_way: bool = False
    """Whether routed experts are scaled by one minus the gate, a softmax over the two parts (the
    residual experts of PR-MoE, arXiv 2201.05596)."""

    def rules(self) -> Iterator[Violation]:
        """Require ``gate`` for ``two_way``."""
        if self.two_way and not self.gate:
            yield Violation(("gate",), False, "must be on: two_way needs the gate", True)


@BALANCE.register
class Aux(Record):
    """Auxiliary load-balancing loss: ``E / K * sum_i f_i P_i`` over a population of tokens.

    f_i is the fraction of tokens whose plain top-k (no bias, no groups, before drops) contains
    expert i, P_i the mean probability of i. The value is 1 for uniform routing. Each layer has its
    own term; populations are weighted by their share of the step's valid tokens.
    """

    kind: Literal["aux"] = "aux"
    over: Literal["micro_batch", "sequence", "global_batch"] = "micro_batch"
    coefficient: Annotated[float, Field(ge=0)] = 1e-2

    owner = "moefold.moe.balance:AuxLoss"


@BALANCE.register
class Z(Record):
    """Router z-loss: mean over valid tokens of the squared log-sum-exp of the logits."""

    kind: Literal["z"] = "z"
    coefficient: Annotated[float, Field(ge=0)] = 1e-3

    owner = "moefold.moe.balance:ZLoss"


@BALANCE.register
class Quantile(Record):
    """Moves the selection bias once per step towards the value that would have balanced the load.

    For a micro-batch of m tokens, with a_t the (K+1)-th largest biased score of token t, an
    expert's balancing bias is minus the (m K / E + 1)-th largest of its scores minus a_t. The mean
    over micro-batches enters an exponential moving average (Megatron-Core's rule).
    """

    kind: Literal["quantile"] = "quantile"
    rate: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Weight of the new value in the moving average."""

    owner = "moefold.moe.balance:QuantileUpdate"


@BALANCE.register
class Bias(Record):
    """Loss-free balancing (arXiv 2408.15664): updates the selection bias once per global batch."""

    kind: Literal["bias"] = "bias"
    rate: Annotated[float, Field(ge=0)] = 1e-3

    owner = "moefold.moe.balance:BiasUpdate"


IGNORED_FIELDS = {"coefficient": 0.0, "rate": 0.0}
"""Fields that do not distinguish two entries of ``balance``."""


@FFN.register
class Moe(MoeSpec):
    """MoE feed-forward: routed SwiGLU experts of ``width``, and an optional shared one."""

    kind: Literal["moe"] = "moe"
    width: Size
    router: Annotated[Router, ROUTER]
    shared: Shared | None = None
    capacity: Capacity | None = None
    """Bound on the tokens per expert; None is dropless."""
    balance: tuple[Annotated[Record, BALANCE], ...] = ()
    scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor on the sum of all experts' outputs, including the shared one."""
    activation: Activation | None = None
    """Activation of the routed experts; None is SwiGLU."""
    expert_bias: bool = False
    """Whether both products of a routed expert have biases."""
    weigh: Literal["output", "input"] = "output"
    """Whether routing weights multiply the experts' outputs or their inputs."""
    latent: Size | None = None
    """Width to which rows are projected before dispatch, and from which sums are projected back;
    router, shared and idle experts read full rows (LatentMoE, arXiv 2601.18089)."""

    widths = ("width", "latent")
    owner = "moefold.moe.layer:MoeFfn"
    caches = True

    @property
    def summary(self) -> str:
        """Description of experts, shared expert and capacity for the banner."""
        shared = f", shared {self.shared.width}" if self.shared else ""
        drop = "dropless" if self.capacity is None else f"capacity {self.capacity.factor}"
        router = self.router
        narrow = f" in {self.latent} features" if self.latent else ""
        sizes = f"{router.experts} experts of {self.width}{narrow}, {router.words}"
        return f"MoE ({sizes}{shared}, {drop})"

    @property
    def drops(self) -> bool:
        """Whether a row may be sent to fewer experts than a decision has places."""
        router = self.router
        return self.capacity is not None or router.partial or router.idle_experts is not None

    @property
    def is_stochastic(self) -> bool:
        """Whether routing depends on random numbers: jitter or random drops."""
        random_drops = self.capacity is not None and self.capacity.drop == "random"
        return bool(self.router.jitter) or random_drops

    @property
    def compares_rows(self) -> bool:
        """Whether tokens compete by score: under expert choice, or for capacity by ``probs``."""
        by_scores = self.capacity is not None and self.capacity.drop == "probs"
        return by_scores or isinstance(self.router, ExpertChoice)

    @property
    def has_expert_variant(self) -> bool:
        """Whether routed experts need more than plain SwiGLU with weighted outputs."""
        return self.expert_bias or self.activation is not None or self.weigh == "input"

    @property
    def populations(self) -> frozenset[str]:
        """Populations of tokens over which auxiliary losses count choices."""
        return frozenset(term.over for term in self.balance if isinstance(term, Aux))

    @property
    def keeps_logits(self) -> bool:
        """Whether a loss term reads the router's logits."""
        return any(isinstance(term, Z) for term in self.balance)

    def without_gradient(self) -> Iterator[tuple[str, str]]:
        """Yield the router's weight if there is a single expert with softmax scores.

        Routing weight and auxiliary loss then do not depend on the logits; other terms may.
        """
        if self.router.choices != 1 or self.router.score != "softmax":
            return
        if all(isinstance(term, Aux | Bias | Quantile) for term in self.balance):
            yield "router.weight", "a softmax over one expert is always 1"

    def rules(self) -> Iterator[Violation]:
        """Require experts, a selection bias if an entry updates it, and no term twice."""
        for name in ("experts", "top_k"):
            if not getattr(self.router, name):
                yield Violation(("router", name), 0, "must be at least 1", 1)
        seen: list[Record] = []
        for i, term in enumerate(self.balance):
            updates_bias = isinstance(term, Bias | Quantile)
            if updates_bias and not self.router.selection_bias:
                rule = f"must be on: balance kind {term.kind} updates the selection bias"
                yield Violation(("router", "selection_bias"), False, rule, True)
            if updates_bias and any(isinstance(other, Bias | Quantile) for other in seen):
                rule = "only one entry may update the selection bias"
                yield Violation(("balance", i), term, rule, REMOVE)
            if isinstance(term, Quantile) and self.router.eligible <= self.router.top_k:
                rule = f"must be below the reachable experts ({self.router.eligible}) for quantile"
                most = self.router.eligible - 1
                yield Violation(("router", "top_k"), self.router.top_k, rule, most)
            if term.model_copy(update=IGNORED_FIELDS) in seen:
                rule = "repeats an earlier entry of the list"
                yield Violation(("balance", i), term, rule, REMOVE)
            seen.append(term.model_copy(update=IGNORED_FIELDS))
        if self.weigh == "input" and self.shared is not None and self.shared.two_way:
            rule = "must be output: shared.two_way weights the experts' outputs"
            yield Violation(("weigh",), self.weigh, rule, "output")
        if self.capacity is not None and isinstance(self.router, ExpertChoice):
            rule = "cannot be combined with expert_choice: each expert gets equally many tokens"
            yield Violation(("capacity",), self.capacity, rule, None)
