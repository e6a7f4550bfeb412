"""Records of the mixture-of-experts layer: router, balance, capacity, shared expert."""

from collections.abc import Iterator
from fractions import Fraction
from math import ceil
from typing import Annotated, Literal

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
    """How many scores ``sum_best`` adds."""

    @property
    def summed(self) -> int:
        """How many of a group's best scores are added up to rank it."""
        return self.best if self.score == "sum_best" else 1

    def rules(self) -> Iterator[Violation]:
        """No more groups are kept than there are."""
        if self.keep > self.count:
            yield Violation(("keep",), self.keep, f"at most count ({self.count})", self.count)


@ROUTER.register
class Router(Record):
    """How a token chooses its experts and with which weights; base of every router's record."""

    kind: Literal["topk"] = "topk"
    experts: Annotated[int, Field(ge=0)] = 0
    """Under a family 0: its shape says how many there are."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Experts of a token; under a family 0, as its shape says."""
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    order: Literal["score_first", "topk_first"] = "score_first"
    """Whether scores are taken over all experts or only over the chosen ones."""
    renormalise: bool = True
    """Whether the chosen scores are divided by their sum."""
    epsilon: Annotated[float, Field(ge=0)] = 0.0
    """Added to that sum."""
    floor: Annotated[float, Field(ge=0)] = 0.0
    """The least that the sum is taken for (ERNIE 4.5)."""
    scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor on the weights, applied last."""
    groups: Groups | None = None
    selection_bias: bool = False
    """A buffer added to the scores for the choice alone, never for the weights."""
    bias: bool = False
    """Whether logits have a learned bias of each expert."""
    jitter: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """In training, what the router reads is times 1 - jitter to 1 + jitter, by chance (Switch)."""
    dtype: Literal["float32", "float64"] = "float32"
    """Type of the scores where the model's own is not wider."""

    owner = "moefold.moe.router:Router"

    def rules(self) -> Iterator[Violation]:
        """Top-k fits the experts, and the groups that are kept."""
        if not self.experts:
            return
        if self.top_k > self.experts:
            rule = f"must be at most experts ({self.experts})"
            yield Violation(("top_k",), self.top_k, rule, self.experts)
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
    """Gives all experts as many tokens, in turns, whatever they are: to measure balanced load."""

    kind: Literal["round_robin"] = "round_robin"  # type: ignore[assignment]

    owner = "moefold.moe.routers:RoundRobinRouter"


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
    """None is dropless."""
    balance: tuple[Annotated[Record, BALANCE], ...] = ()
    scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor on what all experts give together, the shared one's output among it."""
    activation: Activation | None = None
    """Of the routed experts; None is SwiGLU."""
    expert_bias: bool = False
    """Whether both products of a routed expert have biases."""
    weigh: Literal["output", "input"] = "output"
    """Whether a token's weights are factors of what its experts give, or of what they read."""

    owner = "moefold.moe.layer:MoeFfn"
    caches = True

    @property
    def words(self) -> str:
        """Experts, the shared one, and whether any token is dropped."""
        shared = f", shared {self.shared.width}" if self.shared else ""
        drop = "dropless" if self.capacity is None else f"capacity {self.capacity.factor}"
        router = self.router
        sizes = f"{router.experts} experts of {self.width}, top {router.top_k}"
        return f"MoE ({sizes}{shared}, {drop})"

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
        alone = self.router.experts == 1 and self.router.score == "softmax"
        if alone and all(isinstance(term, Aux | Bias) for term in self.balance):
            yield "router.weight", "a softmax over one expert is always 1"

    def rules(self) -> Iterator[Violation]:
        """Experts are counted; a bias update needs a bias; each term stands once."""
        for name in ("experts", "top_k"):
            if not getattr(self.router, name):
                yield Violation(("router", name), 0, "must be at least 1", 1)
        seen: list[Record] = []
        for i, term in enumerate(self.balance):
            if isinstance(term, Bias) and not self.router.selection_bias:
                rule = "kind bias moves the router's selection_bias, which is off"
                yield Violation(("router", "selection_bias"), False, rule, True)
            if term.model_copy(update=FREE) in seen:
                rule = "the same term stands in the list already"
                yield Violation(("balance", i), term, rule, REMOVE)
            seen.append(term.model_copy(update=FREE))
