"""Records of the mixture-of-experts layer: router, balance, capacity, shared expert."""

from collections.abc import Iterator
from fractions import Fraction
from math import ceil
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import REMOVE, Violation
from moefold.config.slot import Slot
from moefold.layers.config import FFN, Activation, Size
from moefold.moe.describe import MoeSpec

ROUTER = Slot("router", default="topk")
BALANCE = Slot("balance term")


class Groups(Record):
    """Group-limited routing: only the experts of the best ``keep`` groups can be chosen.

    How a group is scored is explicit because models differ: DeepSeek-V2 takes the maximum,
    DeepSeek-V3 the sum of the best two.
    """

    count: Size
    keep: Size
    score: Literal["max", "sum_best"] = "sum_best"
    best: Size = 2
    """How many of a group's scores ``sum_best`` adds."""

    @property
    def summed(self) -> int:
        """How many of a group's best scores are added up to rank it."""
        return self.best if self.score == "sum_best" else 1

    def rules(self) -> Iterator[Violation]:
        """No more groups are kept than there are."""
        if self.keep > self.count:
            yield Violation(("keep",), self.keep, f"at most count ({self.count})", self.count)


class Idle(Record):
    """Choices beside the experts that compute nothing: rows for them are not sent.

    Zero-computation experts of LongCat-Flash (arXiv 2509.01322: identities) and MoE++ (arXiv
    2410.07348, whose constants are weighed as identities besides).
    """

    identity: Annotated[int, Field(ge=0)] = 0
    """Choices that return what an expert would read."""
    constant: Annotated[int, Field(ge=0)] = 0
    """Choices that return a learned row each."""
    zero: Annotated[int, Field(ge=0)] = 0
    """Choices that return zeros."""

    @property
    def count(self) -> int:
        """All of them."""
        return self.identity + self.constant + self.zero

    def rules(self) -> Iterator[Violation]:
        """There is one."""
        if not self.count:
            yield Violation(("identity",), 0, "idle names at least one choice", 1)


@ROUTER.register
class Router(Record):
    """How a token chooses its experts and with which weights; base of every router's record."""

    kind: Literal["topk"] = "topk"
    experts: Annotated[int, Field(ge=0)] = 0
    """Experts of a layer; 0 under a family, whose shape states them."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Experts of a token; 0 under a family, whose shape states them."""
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    order: Literal["score_first", "topk_first"] = "score_first"
    """Whether scores are taken over all experts or only over the chosen ones."""
    renormalise: bool = True
    """Whether the chosen scores are divided by their sum."""
    epsilon: Annotated[float, Field(ge=0)] = 0.0
    """Added to the sum of the chosen scores."""
    floor: Annotated[float, Field(ge=0)] = 0.0
    """Lower bound of the sum of the chosen scores (ERNIE 4.5)."""
    scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor on the routing weights, applied last."""
    groups: Groups | None = None
    selection_bias: bool = False
    """A buffer added to the scores for the choice alone, never for the weights."""
    bias: bool = False
    """Whether logits have a learned bias of each expert."""
    jitter: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Half-width of the random factors around 1 on the router's input in training (Switch)."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of the scores where the model's own is not wider."""

    owner = "moefold.moe.router:Router"
    partial: ClassVar[bool] = False
    """Whether decisions in training leave places of a token empty."""

    @property
    def unsent(self) -> Idle | None:
        """Choices that compute nothing, numbered behind the experts."""
        return None

    @property
    def choices(self) -> int:
        """What is chosen among: experts, and those that compute nothing."""
        return self.experts + (self.unsent.count if self.unsent else 0)

    @property
    def eligible(self) -> int:
        """What can be chosen by one token: the choices of the groups that are kept."""
        if self.groups is None:
            return self.choices
        return self.experts // self.groups.count * self.groups.keep

    @property
    def places(self) -> int:
        """Places for experts in a row of a decision in training."""
        return self.top_k

    @property
    def words(self) -> str:
        """How experts are chosen, as a line of the banner says it."""
        return f"top {self.top_k}"

    def rules(self) -> Iterator[Violation]:
        """Top-k fits the experts, and the groups that are kept."""
        if not self.experts:
            return
        if self.top_k > self.choices:
            rule = f"must be at most experts ({self.choices})"
            yield Violation(("top_k",), self.top_k, rule, self.choices)
        if self.order == "topk_first" and self.score != "softmax":
            rule = "topk_first needs softmax scores"
            yield Violation(("order",), self.order, rule, "score_first")
        elif self.order == "score_first" and self.top_k == 1 and self.renormalise:
            rule = "with top_k 1 the renormalised weight is always 1 and the router learns nothing"
            yield Violation(("renormalise",), True, rule, False)
        elif self.order == "topk_first" and self.top_k == 1:
            rule = "with top_k 1 a softmax over the chosen is always 1: the router learns nothing"
            yield Violation(("order",), self.order, rule, "score_first")
        if self.groups is not None:
            yield from self._group_rules(self.groups)

    def _group_rules(self, groups: Groups) -> Iterator[Violation]:
        if self.experts % groups.count:
            nearest = max(d for d in range(1, groups.count + 1) if self.experts % d == 0)
            rule = f"must divide experts ({self.experts})"
            yield Violation(("groups", "count"), groups.count, rule, nearest)
            return
        size = self.experts // groups.count
        if self.top_k > size * groups.keep:
            rule = f"keep * experts per group ({size}) must be at least top_k ({self.top_k})"
            yield Violation(("groups", "keep"), groups.keep, rule, -(-self.top_k // size))
        if groups.score == "sum_best" and groups.best > size:
            rule = f"must be at most experts per group ({size})"
            yield Violation(("groups", "best"), groups.best, rule, size)


@ROUTER.register
class IdleRouter(Router):
    """The best of experts and of choices that compute nothing."""

    kind: Literal["idle"] = "idle"  # type: ignore[assignment]
    idle: Idle = Idle(identity=1)

    @property
    def unsent(self) -> Idle:
        """Choices that compute nothing, numbered behind the experts."""
        return self.idle

    @property
    def words(self) -> str:
        """How experts are chosen, as a line of the banner says it."""
        return f"top {self.top_k} of these and {self.idle.count} idle"

    def rules(self) -> Iterator[Violation]:
        """As for top-k, without groups, which hold experts alone."""
        yield from super().rules()
        if self.groups is not None:
            rule = "experts that compute nothing are in no group"
            yield Violation(("groups",), self.groups, rule, None)


class _OwnChoice(Router):
    """A router that chooses by more than the scores: no bias and no groups move its choice."""

    def rules(self) -> Iterator[Violation]:
        """As for top-k, and nothing else that chooses."""
        yield from super().rules()
        for name, without in (("groups", None), ("selection_bias", False)):
            if (value := getattr(self, name)) != without:
                yield Violation((name,), value, f"{self.kind} chooses without it", without)


@ROUTER.register
class Sinkhorn(_OwnChoice):
    """In training, chooses by scores scaled so that all experts are wanted alike.

    The micro-batch decides together (BASE layers, arXiv 2103.16716; scaling as in arXiv
    2202.01169); elsewhere each token chooses by its own scores.
    """

    kind: Literal["sinkhorn"] = "sinkhorn"  # type: ignore[assignment]
    rounds: Annotated[int, Field(ge=1)] = 8
    """How often experts and tokens are scaled in turn."""

    owner = "moefold.moe.routers:SinkhornRouter"


@ROUTER.register
class Hash(_OwnChoice):
    """Chooses by the token's id, another choice in each layer (hash layers, arXiv 2106.04426).

    Scores are weights alone.
    """

    kind: Literal["hash"] = "hash"  # type: ignore[assignment]

    owner = "moefold.moe.routers:HashRouter"


@ROUTER.register
class RoundRobin(_OwnChoice):
    """Gives all experts as many tokens, in turns, whatever they are: to measure balanced load.

    With ``skew`` it measures unbalanced load: tokens choose by chance.
    """

    kind: Literal["round_robin"] = "round_robin"  # type: ignore[assignment]
    skew: Annotated[float, Field(ge=0)] = 0.0
    """Spread (standard deviation) of the logarithms of experts' odds in a layer; 0 is turns."""

    owner = "moefold.moe.routers:RoundRobinRouter"


@ROUTER.register
class ExpertChoice(_OwnChoice):
    """In training, each expert chooses its tokens: those of the micro-batch that score it highest,
    ``top_k / experts`` of them (arXiv 2202.09368).

    All experts have as many tokens, and a token any number of experts. A token's experts then
    depend on tokens after it, which a causal model does not have when it writes: elsewhere each
    token chooses ``top_k`` by its own scores.
    """

    kind: Literal["expert_choice"] = "expert_choice"  # type: ignore[assignment]
    renormalise: bool = False
    most: Annotated[int, Field(ge=0)] = 0
    """Experts that a token keeps of those that chose it, the best ones; 0 is all. On one rank rows
    to experts take room for as many."""

    owner = "moefold.moe.routers:ExpertChoiceRouter"
    partial = True

    @property
    def places(self) -> int:
        """Experts that can have one token."""
        return self.most or self.experts

    @property
    def words(self) -> str:
        """Who chooses, and what it reads."""
        return f"experts choose, {self.top_k} of a token on average, by later tokens too"

    def rules(self) -> Iterator[Violation]:
        """Scores are weights as they are, and no token keeps more experts than there are."""
        yield from super().rules()
        if self.renormalise:
            rule = "must be off: a token of few experts would weigh as much as one of many"
            yield Violation(("renormalise",), True, rule, False)
        if self.order == "topk_first":
            rule = "experts choose by scores over all experts"
            yield Violation(("order",), self.order, rule, "score_first")
        if self.most > self.experts > 0:
            rule = f"must be at most experts ({self.experts})"
            yield Violation(("most",), self.most, rule, self.experts)


class Capacity(Record):
    """A bound on tokens per expert: ``ceil(tokens * top_k / experts * factor)`` per micro-batch."""

    factor: Annotated[float, Field(gt=0)]
    drop: Literal["probs", "position", "random"] = "probs"
    """Which choices an overfull expert drops: the least probable, the latest, or any (random token
    selection, arXiv 2109.10465)."""

    def copies(self, tokens: int, top_k: int, experts: int) -> int:
        """Return how many copies one expert takes at most of ``tokens`` valid tokens.

        The factor is taken as it is written: 1.1 of 50 is 55, which binary floats make 56.
        """
        return ceil(Fraction(str(self.factor)) * tokens * top_k / experts)


class Shared(Record):
    """A dense SwiGLU expert that sees every token."""

    width: Size
    gate: bool = False
    """Whether its output is scaled by a sigmoid of the token."""
    two_way: bool = False
    """Whether the routed experts have what the gate leaves: a softmax of two (PR-MoE's residual
    experts, arXiv 2201.05596)."""

    def rules(self) -> Iterator[Violation]:
        """There is a gate where it weighs both."""
        if self.two_way and not self.gate:
            yield Violation(("gate",), False, "must be on: two_way shares out by it", True)


@BALANCE.register
class Aux(Record):
    """Auxiliary load-balancing loss: ``E / K * sum_i f_i P_i`` over a population of tokens.

    f_i is the share of tokens whose plain top-k (no bias, no groups, before drops) holds expert i,
    P_i the mean probability of i. Uniform routing gives 1. Each layer has its own term; the
    populations of a step weigh in by their share of its valid tokens.
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
    """Moves the selection bias to where each expert would have had its share, once per step.

    Of a micro-batch of m tokens: with a_t the (K+1)-th largest of token t's biased scores, an
    expert's bias would be minus the (m K / E + 1)-th largest of its scores less a_t. The mean of
    that over micro-batches is taken in by an exponential average (Megatron-Core's rule).
    """

    kind: Literal["quantile"] = "quantile"
    rate: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of the new value in the average."""

    owner = "moefold.moe.balance:QuantileUpdate"


@BALANCE.register
class Bias(Record):
    """Loss-free balancing (arXiv 2408.15664): moves the selection bias once per global batch."""

    kind: Literal["bias"] = "bias"
    rate: Annotated[float, Field(ge=0)] = 1e-3

    owner = "moefold.moe.balance:BiasUpdate"


FREE = {"coefficient": 0.0, "rate": 0.0}
"""What two entries of one term may differ in and be one term all the same."""


@FFN.register
class Moe(MoeSpec):
    """A mixture-of-experts feed-forward: routed SwiGLU experts of ``width``, and a shared one."""

    kind: Literal["moe"] = "moe"
    width: Size
    router: Annotated[Router, ROUTER]
    shared: Shared | None = None
    capacity: Capacity | None = None
    """Bound on the tokens of an expert; None is dropless."""
    balance: tuple[Annotated[Record, BALANCE], ...] = ()
    scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor on the output of all experts together, the shared one included."""
    activation: Activation | None = None
    """Activation of the routed experts; None is SwiGLU."""
    expert_bias: bool = False
    """Whether both products of a routed expert have biases."""
    weigh: Literal["output", "input"] = "output"
    """Whether a token's routing weights multiply its experts' outputs or their inputs."""
    latent: Size | None = None
    """Width that rows have between a projection before they are sent and one after their results
    are added up; router, shared and idle experts read whole rows (LatentMoE, arXiv 2601.18089)."""

    owner = "moefold.moe.layer:MoeFfn"
    caches = True

    @property
    def words(self) -> str:
        """Experts, the shared one, and whether any token is dropped."""
        shared = f", shared {self.shared.width}" if self.shared else ""
        drop = "dropless" if self.capacity is None else f"capacity {self.capacity.factor}"
        router = self.router
        narrow = f" in {self.latent} features" if self.latent else ""
        sizes = f"{router.experts} experts of {self.width}{narrow}, {router.words}"
        return f"MoE ({sizes}{shared}, {drop})"

    @property
    def drops(self) -> bool:
        """Whether a row may go to fewer experts than a decision has places for."""
        router = self.router
        return self.capacity is not None or router.partial or router.unsent is not None

    @property
    def draws(self) -> bool:
        """Whether a router's jitter or drops are drawn."""
        by_chance = self.capacity is not None and self.capacity.drop == "random"
        return bool(self.router.jitter) or by_chance

    @property
    def compares_rows(self) -> bool:
        """Whether experts choose their tokens, or the bound of a full one does by scores."""
        by_scores = self.capacity is not None and self.capacity.drop == "probs"
        return by_scores or isinstance(self.router, ExpertChoice)

    @property
    def formed(self) -> bool:
        """Whether routed experts compute more than SwiGLU, weighed as it is given."""
        return self.expert_bias or self.activation is not None or self.weigh == "input"

    @property
    def populations(self) -> frozenset[str]:
        """The populations of tokens whose choices of each expert a term of the loss reads."""
        return frozenset(term.over for term in self.balance if isinstance(term, Aux))

    @property
    def keeps_logits(self) -> bool:
        """Whether a term of the loss reads the router's logits."""
        return any(isinstance(term, Z) for term in self.balance)

    def without_gradient(self) -> Iterator[tuple[str, str]]:
        """A router's weight, where a softmax weighs its one expert.

        Neither that weight nor what the auxiliary loss reads moves with a logit. Any other term
        may reach it.
        """
        alone = self.router.choices == 1 and self.router.score == "softmax"
        if alone and all(isinstance(term, Aux | Bias | Quantile) for term in self.balance):
            yield "router.weight", "a softmax over one expert is always 1"

    def rules(self) -> Iterator[Violation]:
        """Experts are counted; a bias update needs a bias; each term stands once."""
        for name in ("experts", "top_k"):
            if not getattr(self.router, name):
                yield Violation(("router", name), 0, "must be at least 1", 1)
        seen: list[Record] = []
        for i, term in enumerate(self.balance):
            moves = isinstance(term, Bias | Quantile)
            if moves and not self.router.selection_bias:
                rule = f"kind {term.kind} moves the router's selection_bias, which is off"
                yield Violation(("router", "selection_bias"), False, rule, True)
            if moves and any(isinstance(one, Bias | Quantile) for one in seen):
                rule = "two entries move the selection bias"
                yield Violation(("balance", i), term, rule, REMOVE)
            if isinstance(term, Quantile) and self.router.eligible <= self.router.top_k:
                rule = f"kind quantile needs fewer than what can be chosen ({self.router.eligible})"
                most = self.router.eligible - 1
                yield Violation(("router", "top_k"), self.router.top_k, rule, most)
            if term.model_copy(update=FREE) in seen:
                rule = "the same term stands in the list already"
                yield Violation(("balance", i), term, rule, REMOVE)
            seen.append(term.model_copy(update=FREE))
        if self.weigh == "input" and self.shared is not None and self.shared.two_way:
            rule = "must be output: two_way shares out what experts give"
            yield Violation(("weigh",), self.weigh, rule, "output")
        if self.capacity is not None and isinstance(self.router, ExpertChoice):
            rule = "experts that choose take as many tokens each"
            yield Violation(("capacity",), self.capacity, rule, None)
