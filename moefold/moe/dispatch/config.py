"""Records of dispatchers, which send rows to experts and back, and of clones of hot experts."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from moefold.config.base import Record
from moefold.config.errors import Violation
from moefold.config.slot import Slot
from moefold.layers.config import Size
from moefold.mesh.config import Sizes

DISPATCH = Slot("dispatcher")
DEEP_EP_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)


class Clones(Record):
    """Copies of hot experts on other ranks of ``ep``, chosen for each layer and micro-batch."""

    slots: Size = 2
    """Most clones that a rank holds in addition to its own experts."""
    least_rows: Size = 1
    """Fewest rows for which a clone is made."""


class Dispatch(Record):
    """How rows are sent to the ranks of their experts and back; base of dispatchers' records."""

    kind: str
    even_rows: ClassVar[bool] = False
    """Whether all ranks must have equally many rows in each micro-batch of a step."""
    repeatable: ClassVar[bool] = True
    """Whether the dispatcher is allowed if torch must be deterministic."""
    moves_codes: ClassVar[bool] = False
    """Whether rows can be sent quantised, as codes and scales."""

    @property
    def splits(self) -> tuple[tuple[str, int], ...]:
        """Kinds of groups to split in two levels, each with the number of neighbours in a part."""
        return ()

    def violations(self, sizes: Sizes) -> Iterator[Violation]:
        """Yield values of the record that do not fit the sizes of a layout."""
        yield from ()


@DISPATCH.register
class LocalExperts(Dispatch):
    """For experts that are all on this rank: rows are permuted, and nothing is sent."""

    kind: Literal["local"] = "local"

    owner = "moefold.moe.dispatch.base:Dispatcher"

    def violations(self, sizes: Sizes) -> Iterator[Violation]:
        """Refuse layouts with experts on other ranks."""
        if sizes.ep * sizes.etp > 1:
            rule = f"local needs ep1 etp1: ep{sizes.ep} etp{sizes.etp} puts experts on other ranks"
            yield Violation(("kind",), self.kind, rule, "alltoall")


@DISPATCH.register
class AllToAll(Dispatch):
    """Each copy of a token is sent directly to the rank of its expert."""

    kind: Literal["alltoall"] = "alltoall"
    moves_codes = True

    owner = "moefold.moe.dispatch.alltoall:AllToAllDispatch"


@DISPATCH.register
class AllToAllOnce(Dispatch):
    """De-duplicated all-to-all: a token is sent once to each rank with any of its experts."""

    kind: Literal["alltoall_once"] = "alltoall_once"
    moves_codes = True

    owner = "moefold.moe.dispatch.alltoall:DeduplicatedDispatch"


@DISPATCH.register
class TwoLevel(Dispatch):
    """A token is sent once to each node with any of its experts, then once to each rank there."""

    kind: Literal["two_level"] = "two_level"
    moves_codes = True
    node: Size
    """Number of neighbouring ranks of ``ep`` on one node."""

    owner = "moefold.moe.dispatch.two_level:TwoLevelDispatch"

    @property
    def splits(self) -> tuple[tuple[str, int], ...]:
        """The ranks of ``ep``, split by node."""
        return (("ep", self.node),)

    def violations(self, sizes: Sizes) -> Iterator[Violation]:
        """Require that ``node`` divides ``ep``."""
        if sizes.ep % self.node:
            nearest = max(d for d in range(1, min(self.node, sizes.ep) + 1) if sizes.ep % d == 0)
            yield Violation(("node",), self.node, f"must divide ep ({sizes.ep})", nearest)


@DISPATCH.register
class AllGather(Dispatch):
    """Every rank gathers all rows and selects the copies for its own experts."""

    kind: Literal["allgather"] = "allgather"
    moves_codes = True

    owner = "moefold.moe.dispatch.allgather:AllGatherDispatch"


class FixedRoom(Dispatch):
    """Base of dispatchers of fixed shapes, with space for the number of rows that the run states.

    A pass reads nothing on the host. Overflow is detected at the end of the step.
    """

    moves_codes = True
    of_pair: ClassVar[bool] = False
    """Whether ``max_rows`` is per pair of ranks."""
    max_rows: Size
    on_overflow: Literal["again", "stop"] = "again"
    """What happens to a step whose rows did not fit, before any update: ``again`` repeats it by
    ``alltoall``, in rounds that need no more space; ``stop`` ends the run with an error that states
    the space needed."""

    def between(self, ranks: int) -> int:
        """Return the rows of each of the equal splits that a rank receives from ``ranks``."""
        raise NotImplementedError

    def hops(self, ranks: int) -> tuple[int, ...]:
        """Return the rows that a rank sends to all ``ranks``, including itself, in each hop."""
        return (ranks * self.between(ranks),)

    def arriving(self, sizes: Sizes) -> int:
        """Return the rows of a rank's buffer after dispatch, filled or not."""
        return sizes.etp * sizes.ep * self.between(sizes.ep)

    def filled(self, sizes: Sizes) -> int:
        """Return the most rows that a rank can be sent without overflow."""
        return self.arriving(sizes)

    def places(self, sizes: Sizes) -> int:
        """Return how many indices of rows a rank saves for combine, besides those of entries and
        of arrived rows: the token of each row sent, and the sorted position of each arrived one.
        """
        return sizes.ep * self.between(sizes.ep) + self.arriving(sizes)


@DISPATCH.register
class Padded(FixedRoom):
    """All-to-all of token copies in equal, padded splits, without host reads."""

    of_pair = True
    kind: Literal["padded"] = "padded"
    max_rows: Size
    """Most token copies from one rank to another in a micro-batch."""

    owner = "moefold.moe.dispatch.padded:PaddedDispatch"

    def between(self, ranks: int) -> int:
        """Return ``max_rows``."""
        return self.max_rows


@DISPATCH.register
class Spread(FixedRoom):
    """Padded all-to-all in two hops, so that the bound is on rows per rank, not per pair of ranks.

    Copies are dealt evenly to all ranks, which forward them. Any routing fits in which no rank
    receives more than ``max_rows``, whichever ranks send them, at twice the bytes.
    """

    kind: Literal["spread"] = "spread"
    max_rows: Size
    """Most token copies that a rank of ``ep`` receives, or sends, in a micro-batch."""

    owner = "moefold.moe.dispatch.spread:SpreadDispatch"

    def dealt(self, ranks: int) -> int:
        """Return the copies that a rank deals to each of ``ranks``."""
        return -(-self.max_rows // ranks)

    def between(self, ranks: int) -> int:
        """Return the most copies for one rank that another is dealt, rounded up per source."""
        return self.dealt(ranks) + ranks

    def hops(self, ranks: int) -> tuple[int, ...]:
        """Return the rows that are dealt, and those that are forwarded."""
        return (ranks * self.dealt(ranks), *super().hops(ranks))

    def filled(self, sizes: Sizes) -> int:
        """Return ``max_rows`` of all ``etp`` ranks that share the experts."""
        return sizes.etp * self.max_rows

    def places(self, sizes: Sizes) -> int:
        """Return the indices of both hops."""
        return super().places(sizes) + 2 * sizes.ep * self.dealt(sizes.ep)


class Foreign(Dispatch):
    """Base of dispatchers of other packages, which send bf16 rows on GPUs."""

    module: ClassVar[str]
    """Module to import."""
    calls: ClassVar[tuple[tuple[str, str], ...]]
    """Functions called, each with its keyword arguments; one with a question mark is passed only if
    the function accepts it."""
    remedy: ClassVar[str]
    """How to install the package, and which versions accept these calls."""

    def violations(self, sizes: Sizes) -> Iterator[Violation]:
        """Refuse ``etp``, for which these packages do not gather rows."""
        if sizes.etp > 1:
            rule = f"{self.kind} needs etp1, not etp{sizes.etp}: it sends rows over ep only"
            yield Violation(("kind",), self.kind, rule, "alltoall_once")


@DISPATCH.register
class DeepEp(Foreign):
    """DeepEP's normal kernels: a token is sent once to each rank, over NVLink and RDMA."""

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

    def violations(self, sizes: Sizes) -> Iterator[Violation]:
        """Refuse numbers of ranks for which DeepEP has no settings."""
        yield from super().violations(sizes)
        if sizes.ep > 1 and sizes.ep not in DEEP_EP_RANKS:
            known = ", ".join(map(str, DEEP_EP_RANKS))
            rule = f"deep_ep needs ep of {known}, not {sizes.ep}"
            yield Violation(("kind",), self.kind, rule, "alltoall_once")


@DISPATCH.register
class HybridEp(Foreign):
    """HybridEP: sends rows across nodes, then over NVLink, and sorts them by expert."""

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
    """NCCL EP through Transformer Engine, in fixed shapes."""

    kind: Literal["nccl_ep"] = "nccl_ep"
    max_rows: Size
    """Most rows of one micro-batch on a rank."""

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
