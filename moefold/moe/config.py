"""Records of the mixture-of-experts layer: router, balance, capacity, shared expert, dispatch."""

from collections.abc import Iterator
from fractions import Fraction
from math import ceil
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from moefold.config.base import Record
from moefold.config.errors import REMOVE, Violation
from moefold.config.slot import Slot
from moefold.layers.config import FFN, Activation, Size
from moefold.mesh.config import Sizes
from moefold.moe.describe import MoeSpec

ROUTER = Slot("router", default="topk")
BALANCE = Slot("balance term")
DISPATCH = Slot("dispatcher")
DEEP_EP_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)


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


class Capacity(Record):
    """A bound on tokens per expert: ``ceil(tokens * top_k / experts * factor)`` per micro-batch."""

    factor: Annotated[float, Field(gt=0)]
    drop: Literal["probs", "position"] = "probs"
    """Which choices an overfull expert drops: the least probable, or the latest."""

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


class Dispatch(Record):
    """How token rows go to the ranks of their experts and back; base of every dispatcher."""

    kind: str
    even_rows: ClassVar[bool] = False
    """Whether all ranks have to bring as many rows, in every micro-batch of a step."""
    repeatable: ClassVar[bool] = True
    """Whether it runs where torch has to be deterministic."""

    @property
    def splits(self) -> tuple[tuple[str, int], ...]:
        """Kinds of groups that it cuts in two levels, and how many neighbours go together."""
        return ()

    def misfits(self, sizes: Sizes) -> Iterator[Violation]:
        """Yield what of the record does not fit the sizes of a layout."""
        yield from ()


@DISPATCH.register
class LocalExperts(Dispatch):
    """All experts live on this rank: rows are permuted, nothing is sent."""

    kind: Literal["local"] = "local"

    owner = "moefold.moe.dispatch.base:Dispatcher"

    def misfits(self, sizes: Sizes) -> Iterator[Violation]:
        """Experts on other ranks need rows to be sent."""
        if sizes.ep * sizes.etp > 1:
            rule = f"local sends nothing, and ep{sizes.ep} etp{sizes.etp} has experts elsewhere"
            yield Violation(("kind",), self.kind, rule, "alltoall")


@DISPATCH.register
class AllToAll(Dispatch):
    """Each rank sends token copies straight to the ranks of their experts."""

    kind: Literal["alltoall"] = "alltoall"

    owner = "moefold.moe.dispatch.alltoall:AllToAllDispatch"


@DISPATCH.register
class AllToAllOnce(Dispatch):
    """A token is sent once to each rank that has any of its experts, and copied there."""

    kind: Literal["alltoall_once"] = "alltoall_once"

    owner = "moefold.moe.dispatch.alltoall:DeduplicatedDispatch"


@DISPATCH.register
class TwoLevel(Dispatch):
    """A token is sent once to each node with any of its experts, and there once to each rank."""

    kind: Literal["two_level"] = "two_level"
    node: Size
    """Neighbouring ranks of ``ep`` that are on one node."""

    owner = "moefold.moe.dispatch.two_level:TwoLevelDispatch"

    @property
    def splits(self) -> tuple[tuple[str, int], ...]:
        """The ranks of ``ep`` by nodes."""
        return (("ep", self.node),)

    def misfits(self, sizes: Sizes) -> Iterator[Violation]:
        """Nodes are of equal size."""
        if sizes.ep % self.node:
            nearest = max(d for d in range(1, min(self.node, sizes.ep) + 1) if sizes.ep % d == 0)
            yield Violation(("node",), self.node, f"must divide ep ({sizes.ep})", nearest)


@DISPATCH.register
class AllGather(Dispatch):
    """Every rank gathers all rows and takes the copies of its own experts."""

    kind: Literal["allgather"] = "allgather"

    owner = "moefold.moe.dispatch.allgather:AllGatherDispatch"


class FixedRoom(Dispatch):
    """A dispatcher of fixed shapes, into room that the run file states; base of its records.

    Nothing is read on the host in a pass. The step looks at its end whether the room was enough.
    """

    of_pair: ClassVar[bool] = False
    """Whether room is that of a pair of ranks."""
    max_rows: Size
    on_overflow: Literal["again", "stop"] = "again"
    """What follows a step whose rows did not fit, before it changes anything: it is made once more
    by ``alltoall``, each mixture in rounds that fill no more room, or the run ends with an error
    that says how much is enough."""

    def between(self, ranks: int) -> int:
        """Return the rows of each of the equal parts that a rank receives from ``ranks``."""
        raise NotImplementedError

    def arriving(self, sizes: Sizes) -> int:
        """Return the rows that a rank holds after dispatch, filled or not."""
        return sizes.etp * sizes.ep * self.between(sizes.ep)

    def filled(self, sizes: Sizes) -> int:
        """Return the rows that a rank is sent at most: those that its room is stated for."""
        return self.arriving(sizes)


@DISPATCH.register
class Padded(FixedRoom):
    """Token copies in equal splits: nothing is read on the host, and every shape is fixed."""

    of_pair = True
    kind: Literal["padded"] = "padded"
    max_rows: Size
    """Room between each pair of ranks, in copies of tokens of one micro-batch."""

    owner = "moefold.moe.dispatch.padded:PaddedDispatch"

    def between(self, ranks: int) -> int:
        """Return the rows that are stated."""
        return self.max_rows


@DISPATCH.register
class Spread(FixedRoom):
    """Token copies in equal splits over two hops, so that room is that of a rank, not of a pair.

    Copies are dealt over all ranks, each of which sends on what it was dealt. So every routing fits
    that gives no rank more than ``max_rows``, whoever sends them, at twice the bytes.
    """

    kind: Literal["spread"] = "spread"
    max_rows: Size
    """Room of each rank of ``ep``, in copies of one micro-batch's tokens; none may send more."""

    owner = "moefold.moe.dispatch.spread:SpreadDispatch"

    def dealt(self, ranks: int) -> int:
        """Return the copies that a rank deals to each of ``ranks``."""
        return -(-self.max_rows // ranks)

    def between(self, ranks: int) -> int:
        """Return the most copies for one rank that another was dealt, one left over of each."""
        return self.dealt(ranks) + ranks

    def filled(self, sizes: Sizes) -> int:
        """Return the stated room of all slices of an expert's rank."""
        return sizes.etp * self.max_rows


class Foreign(Dispatch):
    """A dispatcher of another package, which sends bf16 rows of GPUs; base of its records."""

    module: ClassVar[str]
    """What is imported."""
    calls: ClassVar[tuple[tuple[str, str], ...]]
    """What is called of it, by name: the arguments, all by keyword; one with a question mark is
    given where the function takes it."""
    remedy: ClassVar[str]
    """How to get it, and which versions take these calls."""

    def misfits(self, sizes: Sizes) -> Iterator[Violation]:
        """None of them gathers rows for slices of an expert."""
        if sizes.etp > 1:
            rule = f"{self.kind} sends rows over ep alone, and etp is {sizes.etp}"
            yield Violation(("kind",), self.kind, rule, "alltoall_once")


@DISPATCH.register
class DeepEp(Foreign):
    """DeepEP's normal kernels: a token once to each rank, over NVLink and RDMA."""

    kind: Literal["deep_ep"] = "deep_ep"

    owner = "moefold.moe.dispatch.deep_ep:DeepEpDispatch"
    module = "deep_ep"
    calls = (
        ("Buffer", "group num_nvl_bytes num_rdma_bytes"),
        ("Buffer.get_dispatch_config", "num_ranks"),
        ("Buffer.get_combine_config", "num_ranks"),
        ("Buffer.get_dispatch_layout", "topk_idx num_experts"),
        (
            "Buffer.dispatch",
            "x topk_idx topk_weights num_tokens_per_rank num_tokens_per_rdma_rank "
            "is_token_in_rank num_tokens_per_expert",
        ),
        ("Buffer.dispatch", "x handle"),
        ("Buffer.combine", "x handle topk_weights"),
    )
    remedy = "Build 1.2.1 or 2.1.0 from github.com/deepseek-ai/DeepEP"
    repeatable = False

    def misfits(self, sizes: Sizes) -> Iterator[Violation]:
        """It has settings for some numbers of ranks."""
        yield from super().misfits(sizes)
        if sizes.ep > 1 and sizes.ep not in DEEP_EP_RANKS:
            known = ", ".join(map(str, DEEP_EP_RANKS))
            rule = f"deep_ep has settings for {known} ranks, and ep is {sizes.ep}"
            yield Violation(("kind",), self.kind, rule, "alltoall_once")


@DISPATCH.register
class HybridEp(Foreign):
    """HybridEP: across nodes and then over NVLink, sorted by expert on the way."""

    kind: Literal["hybrid_ep"] = "hybrid_ep"

    owner = "moefold.moe.dispatch.hybrid_ep:HybridEpDispatch"
    module = "deep_ep"
    calls = (
        (
            "HybridEPBuffer",
            "group hidden_dim max_num_of_tokens_per_rank num_local_experts use_fp8",
        ),
        (
            "HybridEPBuffer.dispatch_with_permute",
            "hidden routing_map probs num_of_experts_per_rank",
        ),
        ("HybridEPBuffer.dispatch_with_permute", "hidden handle num_permuted_tokens"),
        ("HybridEPBuffer.combine_with_unpermute", "hidden probs handle"),
    )
    remedy = "Build the branch hybrid-ep of github.com/deepseek-ai/DeepEP, at 94a9f8f"
    even_rows = True


@DISPATCH.register
class NcclEp(Foreign):
    """NCCL EP through Transformer Engine, in shapes known beforehand."""

    kind: Literal["nccl_ep"] = "nccl_ep"
    max_rows: Size
    """Rows of one micro-batch on a rank, at most."""

    owner = "moefold.moe.dispatch.nccl_ep:NcclEpDispatch"
    module = "transformer_engine.pytorch.ep"
    calls = (
        (
            "ep_bootstrap",
            "ep_group num_experts max_tokens_per_rank recv_capacity_per_rank hidden_dim num_topk?",
        ),
        (
            "EpBuffer",
            "top_k max_tokens_per_rank recv_capacity_per_rank hidden_dim num_local_experts",
        ),
        ("ep_dispatch", "buffer tokens topk_idx topk_weights"),
        ("ep_combine", "buffer expert_out num_local_tokens"),
        ("ep_finalize", ""),
    )
    remedy = "Install transformer-engine[pytorch] 2.17 to 2.19 built with NVTE_WITH_NCCL_EP=ON"
