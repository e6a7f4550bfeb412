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
    """Copies of hot experts on other ranks of ``ep``, chosen per layer and micro-batch."""

    slots: Size = 2
    """Most clones that a rank holds besides its own experts."""
    least_rows: Size = 1
    """Fewest rows that justify a clone."""


class Dispatch(Record):
    """Sends rows to the ranks of their experts and back; base of dispatchers' records."""

    kind: str
    needs_equal_rows: ClassVar[bool] = False
    """Whether all ranks need equally many rows in each micro-batch of a step."""
    deterministic: ClassVar[bool] = True
    """Whether results are reproducible, as torch's deterministic mode requires."""
    supports_codes: ClassVar[bool] = False
    """Whether rows can be sent as codes and scales."""

    @property
    def splits(self) -> tuple[tuple[str, int], ...]:
        """Kinds of groups to split in two levels, each with the number of neighbours per part."""
        return ()

    def violations(self, sizes: Sizes) -> Iterator[Violation]:
        """Yield values of the record that do not fit a layout's sizes."""
        yield from ()


@DISPATCH.register
class LocalExperts(Dispatch):
    """For experts that are all on this rank: rows are permuted, none is sent."""

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
    supports_codes = True

    owner = "moefold.moe.dispatch.alltoall:AllToAllDispatch"


@DISPATCH.register
class AllToAllOnce(Dispatch):
    """De-duplicated all-to-all: a token is sent once to each rank with any of its experts."""

    kind: Literal["alltoall_once"] = "alltoall_once"
    supports_codes = True

    owner = "moefold.moe.dispatch.alltoall:DeduplicatedDispatch"


@DISPATCH.register
class TwoLevel(Dispatch):
    """A token is sent once to each node with any of its experts, then once to each rank there."""

    kind: Literal["two_level"] = "two_level"
    supports_codes = True
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
            rule = f"must divide ep ({sizes.ep})"
            nearest = max(d for d in range(1, min(self.node, sizes.ep) + 1) if sizes.ep % d == 0)
            yield Violation(("node",), self.node, rule, nearest)


@DISPATCH.register
class AllGather(Dispatch):
    """Every rank gathers all rows and selects the copies for its own experts."""

    kind: Literal["allgather"] = "allgather"
    supports_codes = True

    owner = "moefold.moe.dispatch.allgather:AllGatherDispatch"


class FixedShape(Dispatch):
    """Base of dispatchers with fixed shapes, which hold as many rows as the run states.

    A pass reads nothing on the host. Overflow is detected at the end of the step.
    """

    supports_codes = True
    per_pair: ClassVar[bool] = False
    """Whether ``max_rows`` is per pair of ranks."""
    max_rows: Size
    on_overflow: Literal["again", "stop"] = "again"
    """Action before the update of a step whose rows did not fit: ``again`` repeats it by
    ``alltoall``, in rounds that need no more space; ``stop`` ends the run with an error that states
    the space needed."""

    def rows_per_pair(self, ranks: int) -> int:
        """Return the rows in each of the equal splits that a rank receives from ``ranks``."""
        raise NotImplementedError

    def rows_per_hop(self, ranks: int) -> tuple[int, ...]:
        """Return the rows that a rank sends to all ``ranks``, including itself, in each hop."""
        return (ranks * self.rows_per_pair(ranks),)

    def buffer_rows(self, sizes: Sizes) -> int:
        """Return the rows of a rank's buffer after dispatch, filled or empty."""
        return sizes.etp * sizes.ep * self.rows_per_pair(sizes.ep)

    def max_rows_received(self, sizes: Sizes) -> int:
        """Return the most rows that a rank can receive without overflow."""
        return self.buffer_rows(sizes)

    def saved_indices(self, sizes: Sizes) -> int:
        """Return the row indices that a rank saves for combine, besides those of entries and of
        received rows: the token of each row sent, and the sorted position of each received one.
        """
        return sizes.ep * self.rows_per_pair(sizes.ep) + self.buffer_rows(sizes)


@DISPATCH.register
class Padded(FixedShape):
    """All-to-all of token copies in equal, padded splits, without host reads."""

    per_pair = True
    kind: Literal["padded"] = "padded"
    max_rows: Size
    """Most token copies from one rank to another in a micro-batch."""

    owner = "moefold.moe.dispatch.padded:PaddedDispatch"

    def rows_per_pair(self, ranks: int) -> int:
        """Return ``max_rows``."""
        return self.max_rows


@DISPATCH.register
class Spread(FixedShape):
    """Padded all-to-all in two hops, bounded by rows per rank instead of per pair of ranks.

    Copies are dealt evenly to all ranks, which forward them. Any routing fits in which no rank
    receives more than ``max_rows``, whichever ranks send them; twice the bytes are sent.
    """

    kind: Literal["spread"] = "spread"
    max_rows: Size
    """Most token copies that a rank of ``ep`` receives, or sends, in a micro-batch."""

    owner = "moefold.moe.dispatch.spread:SpreadDispatch"

    def dealt_rows(self, ranks: int) -> int:
        """Return the copies that a rank deals to each of ``ranks``."""
        return -(-self.max_rows // ranks)

    def rows_per_pair(self, ranks: int) -> int:
        """Return the most copies for one rank dealt to another, rounded up per source."""
        return self.dealt_rows(ranks) + ranks

    def rows_per_hop(self, ranks: int) -> tuple[int, ...]:
        """Return the rows that are dealt, and those that are forwarded."""
        return (ranks * self.dealt_rows(ranks), *super().rows_per_hop(ranks))

    def max_rows_received(self, sizes: Sizes) -> int:
        """Return ``max_rows`` for all ``etp`` ranks that share the experts."""
        return sizes.etp * self.max_rows

    def saved_indices(self, sizes: Sizes) -> int:
        """Return the indices of both hops."""
        dealt = sizes.ep * self.dealt_rows(sizes.ep)
        return super().saved_indices(sizes) + 2 * dealt


class ThirdParty(Dispatch):
    """Base of dispatchers by other packages, which send bf16 rows on GPUs."""

    module: ClassVar[str]
    """Module to import."""
    required_calls: ClassVar[tuple[tuple[str, str], ...]]
    """Functions called, each with its keyword arguments; those with a question mark are passed only
    if the function accepts them."""
    install: ClassVar[str]
    """How to install the package, and which versions accept these calls."""

    def violations(self, sizes: Sizes) -> Iterator[Violation]:
        """Refuse ``etp``, over which these packages do not gather rows."""
        if sizes.etp > 1:
            rule = f"{self.kind} needs etp1, not etp{sizes.etp}: it sends rows over ep only"
            yield Violation(("kind",), self.kind, rule, "alltoall_once")


@DISPATCH.register
class DeepEp(ThirdParty):
    """DeepEP's normal kernels: a token is sent once to each rank, over NVLink and RDMA."""

    kind: Literal["deep_ep"] = "deep_ep"

    owner = "moefold.moe.dispatch.deep_ep:DeepEpDispatch"
    module = "deep_ep"
    required_calls = (
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
    install = "Build 1.2.1 or 2.1.0 from github.com/deepseek-ai/DeepEP"
    deterministic = False

    def violations(self, sizes: Sizes) -> Iterator[Violation]:
        """Refuse numbers of ranks for which DeepEP has no settings."""
        yield from super().violations(sizes)
        if sizes.ep > 1 and sizes.ep not in DEEP_EP_RANKS:
            known = ", ".join(map(str, DEEP_EP_RANKS))
            rule = f"deep_ep needs ep of {known}, not {sizes.ep}"
            yield Violation(("kind",), self.kind, rule, "alltoall_once")


@DISPATCH.register
class HybridEp(ThirdParty):
    """HybridEP: sends rows across nodes, then over NVLink, and sorts them by expert."""

    kind: Literal["hybrid_ep"] = "hybrid_ep"

    owner = "moefold.moe.dispatch.hybrid_ep:HybridEpDispatch"
    module = "deep_ep"
    required_calls = (
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
    install = "Build the branch hybrid-ep of github.com/deepseek-ai/DeepEP, at 94a9f8f"
    needs_equal_rows = True


@DISPATCH.register
class NcclEp(ThirdParty):
    """NCCL EP through Transformer Engine, in fixed shapes."""

    kind: Literal["nccl_ep"] = "nccl_ep"
    max_rows: Size
    """Most rows of one micro-batch on a rank."""

    owner = "moefold.moe.dispatch.nccl_ep:NcclEpDispatch"
    module = "transformer_engine.pytorch.ep"
    required_calls = (
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
    install = "Install transformer-engine[pytorch] 2.17 to 2.19 built with NVTE_WITH_NCCL_EP=ON"
