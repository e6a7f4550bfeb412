"""Records of how rows travel to experts and back, and of clones of experts on other ranks."""

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
    """Copies of hot experts on other ranks of ``ep``, made anew for each layer and micro-batch."""

    slots: Size = 2
    """Most experts of other ranks that a rank takes in beside its own."""
    least_rows: Size = 1
    """Fewest rows for which a clone is made."""


class Dispatch(Record):
    """How token rows go to the ranks of their experts and back; base of every dispatcher."""

    kind: str
    even_rows: ClassVar[bool] = False
    """Whether all ranks have to bring as many rows, in every micro-batch of a step."""
    repeatable: ClassVar[bool] = True
    """Whether it runs where torch has to be deterministic."""
    moves_codes: ClassVar[bool] = False
    """Whether rows can travel as codes."""

    @property
    def splits(self) -> tuple[tuple[str, int], ...]:
        """Kinds of groups that it cuts in two levels, and how many neighbours go together."""
        return ()

    def violations(self, sizes: Sizes) -> Iterator[Violation]:
        """Yield what of the record does not fit the sizes of a layout."""
        yield from ()


@DISPATCH.register
class LocalExperts(Dispatch):
    """All experts live on this rank: rows are permuted, nothing is sent."""

    kind: Literal["local"] = "local"

    owner = "moefold.moe.dispatch.base:Dispatcher"

    def violations(self, sizes: Sizes) -> Iterator[Violation]:
        """Experts on other ranks need rows to be sent."""
        if sizes.ep * sizes.etp > 1:
            rule = f"local sends nothing, and ep{sizes.ep} etp{sizes.etp} has experts elsewhere"
            yield Violation(("kind",), self.kind, rule, "alltoall")


@DISPATCH.register
class AllToAll(Dispatch):
    """Each rank sends token copies straight to the ranks of their experts."""

    kind: Literal["alltoall"] = "alltoall"
    moves_codes = True

    owner = "moefold.moe.dispatch.alltoall:AllToAllDispatch"


@DISPATCH.register
class AllToAllOnce(Dispatch):
    """A token is sent once to each rank that has any of its experts, and copied there."""

    kind: Literal["alltoall_once"] = "alltoall_once"
    moves_codes = True

    owner = "moefold.moe.dispatch.alltoall:DeduplicatedDispatch"


@DISPATCH.register
class TwoLevel(Dispatch):
    """A token is sent once to each node with any of its experts, and there once to each rank."""

    kind: Literal["two_level"] = "two_level"
    moves_codes = True
    node: Size
    """Neighbouring ranks of ``ep`` that are on one node."""

    owner = "moefold.moe.dispatch.two_level:TwoLevelDispatch"

    @property
    def splits(self) -> tuple[tuple[str, int], ...]:
        """The ranks of ``ep`` by nodes."""
        return (("ep", self.node),)

    def violations(self, sizes: Sizes) -> Iterator[Violation]:
        """Nodes are of equal size."""
        if sizes.ep % self.node:
            nearest = max(d for d in range(1, min(self.node, sizes.ep) + 1) if sizes.ep % d == 0)
            yield Violation(("node",), self.node, f"must divide ep ({sizes.ep})", nearest)


@DISPATCH.register
class AllGather(Dispatch):
    """Every rank gathers all rows and takes the copies of its own experts."""

    kind: Literal["allgather"] = "allgather"
    moves_codes = True

    owner = "moefold.moe.dispatch.allgather:AllGatherDispatch"


class FixedRoom(Dispatch):
    """A dispatcher of fixed shapes, into room that the run file states; base of its records.

    Nothing is read on the host in a pass. The step looks at its end whether the room was enough.
    """

    moves_codes = True
    of_pair: ClassVar[bool] = False
    """Whether room is that of a pair of ranks."""
    max_rows: Size
    on_overflow: Literal["again", "stop"] = "again"
    """What happens to a step whose rows did not fit, before it changes anything: it is repeated by
    ``alltoall``, each MoE layer in rounds that fill no more room, or the run ends with an error
    that states the room needed."""

    def between(self, ranks: int) -> int:
        """Return the rows of each of the equal parts that a rank receives from ``ranks``."""
        raise NotImplementedError

    def hops(self, ranks: int) -> tuple[int, ...]:
        """Return the rows that a rank sends to ``ranks``, itself among them, hop by hop."""
        return (ranks * self.between(ranks),)

    def arriving(self, sizes: Sizes) -> int:
        """Return the rows that a rank holds after dispatch, filled or not."""
        return sizes.etp * sizes.ep * self.between(sizes.ep)

    def filled(self, sizes: Sizes) -> int:
        """Return the rows that a rank is sent at most: those that its room is stated for."""
        return self.arriving(sizes)

    def places(self, sizes: Sizes) -> int:
        """Return the places of rows that a rank notes for the way back, beyond those of entries
        and of rows that arrived: the token of each row sent, and each arrived one's turn.
        """
        return sizes.ep * self.between(sizes.ep) + self.arriving(sizes)


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

    def hops(self, ranks: int) -> tuple[int, ...]:
        """Return what is dealt, and what is sent on."""
        return (ranks * self.dealt(ranks), *super().hops(ranks))

    def filled(self, sizes: Sizes) -> int:
        """Return the stated room of all slices of an expert's rank."""
        return sizes.etp * self.max_rows

    def places(self, sizes: Sizes) -> int:
        """Return both hops': what is dealt is sent, and sent on."""
        return super().places(sizes) + 2 * sizes.ep * self.dealt(sizes.ep)


class Foreign(Dispatch):
    """A dispatcher of another package, which sends bf16 rows of GPUs; base of its records."""

    module: ClassVar[str]
    """What is imported."""
    calls: ClassVar[tuple[tuple[str, str], ...]]
    """What is called of it, by name: the arguments, all by keyword; one with a question mark is
    given where the function takes it."""
    remedy: ClassVar[str]
    """How to get it, and which versions take these calls."""

    def violations(self, sizes: Sizes) -> Iterator[Violation]:
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

    def violations(self, sizes: Sizes) -> Iterator[Violation]:
        """It has settings for some numbers of ranks."""
        yield from super().violations(sizes)
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
