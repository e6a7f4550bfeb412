"""What a pipeline rank holds after each action of a step, against what is planned for it."""

from collections.abc import Iterator, Sequence
from itertools import islice, product
from operator import sub
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NamedTuple, get_args

import pytest
import torch

from moefold.comm.world import World
from moefold.data.batch import from_ids
from moefold.kernels.quantise.config import QUANTISE
from moefold.layers.config import OffloadKind, RecomputeKind
from moefold.mesh.folding import Folding
from moefold.mesh.partition import ALIGN
from moefold.model.config import Block, Decoder, MultiToken, Stack
from moefold.moe.config import RoundRobin
from moefold.optim.config import AdamW
from moefold.parallel.apply import build_parts
from moefold.parallel.config import Layout
from moefold.parallel.data.sharding import ShardedState
from moefold.parallel.pipeline.p2p import held_messages, plan_rank
from moefold.planner.case import (
    Case,
    NumberFormats,
)
from moefold.planner.hardware import Cluster, cpu_device
from moefold.planner.memory import estimate_memory, memory_after_each
from moefold.spec.decoder import with_multi_token
from moefold.spec.tuning import freeze
from moefold.training.memory_probe import measure_step
from tests.cpu.alive import HIDDEN
from tests.cpu.test_planner_kept import BLOCKS, steady
from tests.gloo.harness import run_ranks

SEQ, ROWS, VOCAB, LAYERS, MICRO = 32, 2, 64, 4, 4
SCRATCH = str(Path(gettempdir(), "moefold-scratch"))
LEAVING = 3
"""Layers of a chunk that sends some away."""
PASSED = ("embed.weight", "layers.[012].*")
"""Patterns of the parameters of all layers but the last, and of what is below them."""
POLICIES: tuple[tuple[str, ...] | None, ...] = (
    None,
    ("block",),
    ("norms", "experts"),
    ("mla_up", "attention", "permute"),
)
AHEAD = (
    (MultiToken(),),
    (MultiToken(reads="residual"),) * 2,
    (MultiToken(reads="residual"), MultiToken()),
)
Bytes = tuple[float, ...]
"""Activations, operands of products that wait for W, messages, activations on host and disk, and
pages here and on the host, filled or not."""
PARTS: tuple[str, ...] = (
    "activations",
    "operands",
    "messages",
    "gradients",
    "host",
    "disk",
    "pages",
    "host pages",
)
SCHEDULES = [
    ("pp2", "gpipe"),
    ("pp2", "1f1b"),
    ("pp2 vpp2", "interleaved"),
    ("pp2", "zb_h1"),
    ("pp2 vpp2", "zb_v"),
    ("pp2", "merged"),
    ("pp2 vpp2", "dualpipe_v"),
]


class Away(NamedTuple):
    """Kinds of module whose activations leave."""

    host: tuple[str, ...] = ()
    disk: tuple[str, ...] = ()
    share: float = 1.0
    in_flight: int = 2
    page: int = 0
    spill: float = 0.0

    @property
    def stated(self) -> dict[str, Any]:
        """As a layout says it."""
        disk = {"modules": self.disk, "folder": SCRATCH}
        places = (("host", {"modules": self.host}), ("disk", disk))
        found = {name: to | {"share": self.share} for name, to in places if to["modules"]}
        pages = {"page": self.page, "load": 1.5, "spill": self.spill}
        found |= {"pages": pages} if self.page else {}
        return found | {"in_flight": self.in_flight}


class Asked(NamedTuple):
    """A layer, what of it is made again, the layout that it is in, and what leaves the device."""

    block: str
    policy: tuple[str, ...] | None
    sizes: str
    schedule: str
    zero: int = 0
    dp: int = 1
    away: Away | None = None
    room: tuple[str, int, int] | None = None
    """A dispatch of fixed shapes, its room, and slots for clones."""
    ahead: tuple[MultiToken, ...] = ()
    """Losses of further tokens."""
    stages: str | None = None
    """What stages hold, where that is listed."""
    codes: str = ""
    """The kind of few bits that products run in, in blocks of four, and what scales it if not its
    own numbers."""
    even: bool = False
    """Whether each expert gets as many rows, sent as they come."""
    frozen: tuple[str, ...] = ()
    """Patterns of parameters that are not trained."""

    @property
    def layout(self) -> Layout:
        again = {"kind": "selective", "modules": self.policy} if self.policy else None
        again = {"kind": "full"} if self.policy == ("block",) else again
        given = {"sizes": self.sizes, "schedule": {"kind": self.schedule}, "zero": self.zero}
        given["stages"] = self.stages
        away = None if self.away is None else self.away.stated
        if self.room is not None:
            given["dispatch"] = {"kind": self.room[0], "max_rows": self.room[1]}
            given["clones"] = {"slots": self.room[2]} if self.room[2] else None
        return Layout.model_validate({**given, "recompute": again, "offload": away})

    @property
    def world(self) -> int:
        return self.layout.split.smallest_world * self.dp

    @property
    def layers(self) -> int:
        sizes = self.layout.split
        leaves = self.away is not None and (self.away.host or self.away.disk)
        return LEAVING * sizes.pp * sizes.vpp if leaves else LAYERS

    @property
    def decoder(self) -> Decoder:
        block = steady(self.block) if self.codes else BLOCKS[self.block]
        block = evenly(block) if self.even else block
        given = {"block": 4, "rows": "micro_batch" if "ep" in self.sizes else "rank"}
        kind, *scaling = self.codes.split() or [""]
        given |= {"scaling": scaling[0]} if scaling else {}
        record = QUANTISE.kinds[kind].model_validate(given) if kind else None
        stack = Stack(repeat=self.layers, blocks=(block,))
        plain = Decoder(vocab=VOCAB, hidden=HIDDEN, stacks=(stack,), quantise=record)
        return freeze(with_multi_token(plain, self.ahead), self.frozen)


def evenly(block: Block) -> Block:
    """A mixture each of whose experts gets as many rows."""
    experts, top_k = block.ffn.routing[:2]  # type: ignore[attr-defined]
    changed = {"router": RoundRobin(experts=experts, top_k=top_k), "balance": ()}
    return block.model_copy(update={"ffn": block.ffn.model_copy(update=changed)})


DENSE, SHARED, GATED, WINDOW, LATENT, *_, WIDE = BLOCKS
WEIGHED = (DENSE, SHARED, GATED, WINDOW, LATENT, WIDE)
"""Pairs hold more of a block with norms after its halves than is planned: such are not here yet."""
AWAY: list[tuple[str, tuple[str, ...] | None, Away]] = [
    (SHARED, None, Away(("experts", "attention"))),
    (LATENT, ("norms", "mla_up", "permute"), Away(("block",), ("experts", "attention"))),
    (GATED, ("experts",), Away((), ("experts", "shared"), in_flight=1)),
    (LATENT, ("block",), Away(("block",))),
    (DENSE, None, Away(get_args(OffloadKind), in_flight=1)),
    (WIDE, ("attention",), Away(("ffn", "attention"), ("norms",), share=0.5)),
    (WINDOW, ("norms", "ffn"), Away(("block",), ("attention",))),
]


OF_KIND = {"mla_up": LATENT, "ffn": DENSE, "permute": GATED, "experts": GATED, "block": WINDOW}
"""A block in which a kind makes a difference, where the one with a shared expert has none."""
PAIRS: list[tuple[str, tuple[str, ...] | None, Away | None]] = [
    (SHARED, ("norms", "permute"), None),
    (LATENT, ("mla_up", "norms"), None),
    (GATED, ("attention", "experts"), None),
    (DENSE, ("ffn", "attention"), None),
    (SHARED, ("norms",), Away(("experts",))),
    (LATENT, ("mla_up",), Away(("attention",))),
    (GATED, ("permute",), Away(("block",))),
    (DENSE, ("ffn",), Away((), ("norms",))),
    (GATED, ("experts",), Away((), ("experts",))),
    (WIDE, ("attention",), Away((), ("ffn",))),
    (SHARED, None, Away(("attention",), ("experts",))),
    (LATENT, ("block",), Away((), ("block",))),
]


def singly(tp: bool) -> Iterator[tuple[str, tuple[str, ...] | None, Away | None]]:
    """Yield every kind by itself: made again, on the host, on disk."""
    for kind in get_args(RecomputeKind):
        if tp or kind != "gather":
            yield OF_KIND.get(kind, SHARED), (kind,), None
    for kind in get_args(OffloadKind):
        yield OF_KIND.get(kind, SHARED), None, Away((kind,))
        yield OF_KIND.get(kind, SHARED), None, Away((), (kind,))


def executed(rank: int, asked: Sequence[Asked]) -> list[tuple[list[Bytes], dict[str, int]]]:
    """Return, of each, the bytes after each step of a rank's line, and the peaks elsewhere."""
    split = asked[0].layout.split
    world = World.open(Folding(split, asked[0].world), "cpu", 60)
    stage = world.attention.pp
    found: list[tuple[list[Bytes], dict[str, int]]] = []
    for one in asked:
        parts = build_parts(one.decoder, "bf16" if one.codes else "fp32", one.layout, world)
        for parameter in parts.model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        draw = torch.Generator().manual_seed(0)
        ids = [torch.randint(0, VOCAB, (ROWS, SEQ), generator=draw) for _ in range(MICRO)]
        wanted = [dict(zip(PARTS, after, strict=True)) for after in planned(one, stage)[0]]
        left = measure_step(ShardedState(parts), [from_ids(one) for one in ids], 64, wanted)
        places = {} if parts.offload is None else parts.offload.stores
        peaks = {name: place.stats.peak for name, place in places.items()}
        found.append(([tuple(step.get(name, 0) for name in PARTS) for step in left], peaks))
    return found


def planned(asked: Asked, rank: int) -> tuple[list[Bytes], dict[str, float]]:
    """Return the same of a pipeline rank."""
    layout, world = asked.layout, asked.world
    case = Case(
        decoder=asked.decoder,
        seq=SEQ,
        batch=ROWS * MICRO * Folding(layout.split, world).dp,
        micro_batch=ROWS,
        cluster=Cluster(cpu_device(1e11, 1e10, 2**34), world, 1, 1),
        layout=layout,
        load=1.0,
        number_formats=NumberFormats(asked.codes or "fp32", AdamW(lr=1e-3), weight_bytes=0),
    )
    row = case.rows * HIDDEN * (2 if asked.codes else 4)
    crossing = held_messages(plan_rank(layout, rank, MICRO), case.stages.sent_rows)
    state = estimate_memory(case)[rank].state
    pages = round(state.pages), round(state.offloaded_pages)
    after = [
        (
            round(one.activations),
            round(one.operands),
            messages * row,
            round(one.gradients),
            *map(round, one.offloaded),
            *pages,
        )
        for one, messages in zip(memory_after_each(case, rank), crossing, strict=True)
    ]
    return after, estimate_memory(case)[rank].offloaded_activations


PADDING = 4 * ALIGN * 40
"""Bytes of the gaps between 40 parameters in a bucket."""


def without_padding(asked: Asked, left: Sequence[Bytes], wanted: Sequence[Bytes]) -> list[Bytes]:
    """What a rank holds, with gradients as planned where buckets add no more than their gaps.

    From ZeRO 2 on what is planned after an action is without sums under way.
    """
    at = PARTS.index("gradients")
    pairs = zip(left, wanted, strict=True)
    return [
        (*have[:at], plan[at], *have[at + 1 :])
        if asked.zero > 1 or 0 <= have[at] - plan[at] <= PADDING
        else have
        for have, plan in pairs
    ]


def check(asked: Sequence[Asked]) -> None:
    """Hold what ranks hold against what is planned; all of one number of ranks."""
    by_rank = run_ranks(executed, asked[0].world, asked, time_out_s=240)
    wrong = []
    for number, one in enumerate(asked):
        folding = Folding(one.layout.split, one.world)
        for rank, found in enumerate(by_rank):
            (left, peaks), wanted = (
                found[number],
                planned(one, folding.attention_coordinates(rank).pp),
            )
            if one.zero:
                left = without_padding(one, left, wanted[0])
            if left != wanted[0]:
                pairs = zip(left, wanted[0], strict=True)
                over = [tuple(map(sub, have, plan)) for have, plan in pairs]
                wrong.append(f"{one} rank {rank}: over by {over}")
            # In a pair one pass sends while another frees.
            if peaks != wanted[1] and one.schedule not in ("merged", "dualpipe_v"):
                wrong.append(f"{one} rank {rank}: peaks {peaks}, planned {wanted[1]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "kind"), SCHEDULES)
def test_after_each_action_a_rank_holds_what_is_planned(sizes: str, kind: str) -> None:
    """Activations, operands of products that wait for W, messages between stages.

    A pair of a block and a policy, in turns: the matrix has all.
    """
    turn = SCHEDULES.index((sizes, kind))
    block, policy, away = AWAY[turn]
    leaving = Asked(block, policy, sizes, kind, away=away)
    some = islice(product(WEIGHED, POLICIES), 5 * turn % 24, None, 24)
    policy, ahead = POLICIES[turn % 4], AHEAD[turn % 3]
    further = Asked((SHARED, LATENT)[turn % 2], policy, sizes, kind, ahead=ahead)
    others = {
        "zb_h1": [Asked(SHARED, None, sizes, kind, codes="mxfp8")],
        "merged": [Asked(GATED, ("block",), sizes, kind)],  # its last exchange is run again
    }
    # No gradient reaches the first three of four layers, of which two are on another stage.
    frozen = (SHARED, LATENT)[turn % 2], (None, ("block",))[turn // 2 % 2]
    passed = Asked(*frozen, sizes, kind, frozen=PASSED)
    asked = [*(Asked(*one, sizes, kind) for one in some), leaving, further, passed]
    check(asked + others.get(kind, []))


def test_what_is_fetched_ahead_is_what_the_table_takes_next() -> None:
    """Of the micro-batch and the chunk whose backward is next, and of no other."""
    away = Away(("ffn",), ("attention",))
    check([Asked(WIDE, None, "pp2 vpp2", "interleaved", away=away)])


@pytest.mark.parametrize(
    ("sizes", "kind", "zero", "dp", "block"),
    [
        ("pp2 tp2", "zb_h1", 0, 1, SHARED),
        ("pp2 vpp2 cp2", "dualpipe_v", 0, 1, LATENT),
        ("pp2", "1f1b", 3, 2, SHARED),
        ("pp2", "zb_h1", 1, 2, SHARED),
    ],
)
def test_so_it_is_where_ranks_share_rows_or_weights(
    sizes: str, kind: str, zero: int, dp: int, block: str
) -> None:
    """Tensor ranks, context ranks, and data ranks with ZeRO: a selection, the matrix has all."""
    check([Asked(block, POLICIES[1 + (block == LATENT)], sizes, kind, zero, dp)])


APART = f"E|{'t' * LAYERS}|m|L"


def test_so_it_is_where_further_tokens_have_a_stage_of_their_own() -> None:
    """It has the last norm, and sends on the rows of two tokens; the last has two losses."""
    one = AHEAD[1][:1]
    kinds = (("interleaved", None), ("dualpipe_v", None))
    check([Asked(SHARED, p, "pp2 vpp2", kind, ahead=one, stages=APART) for kind, p in kinds])


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["interleaved", "zb_v", "dualpipe_v", "merged"])
def test_so_it_is_of_every_policy_with_such_a_stage(kind: str) -> None:
    pairs = product((DENSE, SHARED, LATENT), POLICIES)
    stages = APART.replace("m", "mm")
    sizes = "pp2 vpp2"
    asked = [Asked(*one, sizes, kind, ahead=AHEAD[1], stages=stages) for one in pairs]
    block, policy, away = AWAY[0]
    shape = f"Et|t|{'t' * (4 * LEAVING - 2)}mm|L"
    check([*asked, Asked(block, policy, sizes, kind, 0, 1, away, ahead=AHEAD[1], stages=shape)])


@pytest.mark.matrix
@pytest.mark.parametrize("more", ["", "tp2", "cp2", "zero 1", "zero 3"])
@pytest.mark.parametrize(("sizes", "kind"), SCHEDULES)
def test_so_it_is_in_every_layout(sizes: str, kind: str, more: str) -> None:
    """Every block under every policy."""
    zero = int(more.removeprefix("zero")) if more.startswith("zero") else 0
    sizes, dp = (sizes, 2) if zero else (f"{sizes} {more}", 1)
    check([Asked(*one, sizes, kind, zero, dp) for one in product(WEIGHED, POLICIES)])


@pytest.mark.matrix
@pytest.mark.parametrize("more", ["", "tp2", "cp2", "zero 1", "zero 3"])
@pytest.mark.parametrize(("sizes", "kind"), SCHEDULES)
def test_so_it_is_of_products_in_few_bits(sizes: str, kind: str, more: str) -> None:
    """Two kinds by turns of the schedules, and of what backward reads of latents and experts."""
    turn = SCHEDULES.index((sizes, kind))
    zero = int(more.removeprefix("zero")) if more.startswith("zero") else 0
    sizes, dp = (sizes, 2) if zero else (f"{sizes} {more}", 1)
    some = product((DENSE, SHARED, LATENT), POLICIES, [*QUANTISE.kinds][turn % 2 :: 2])
    check([Asked(b, p, sizes, kind, zero, dp, codes=codes) for b, p, codes in some])


@pytest.mark.matrix
@pytest.mark.parametrize("more", ["", "tp2", "cp2", "zero 1"])
@pytest.mark.parametrize(("sizes", "kind"), SCHEDULES)
def test_so_it_is_of_further_tokens(sizes: str, kind: str, more: str) -> None:
    """Under every policy; also where other activations leave."""
    zero = int(more.removeprefix("zero")) if more.startswith("zero") else 0
    sizes, dp = (sizes, 2) if zero else (f"{sizes} {more}", 1)
    pairs = product((DENSE, SHARED, LATENT), POLICIES)
    asked = [Asked(*one, sizes, kind, zero, dp, ahead=a) for one, a in product(pairs, AHEAD)]
    block, policy, away = AWAY[0]
    check([*asked, Asked(block, policy, sizes, kind, zero, dp, away, ahead=AHEAD[1])])


@pytest.mark.matrix
@pytest.mark.parametrize("more", ["", "tp2", "cp2", "zero 1", "zero 3"])
@pytest.mark.parametrize(("sizes", "kind"), SCHEDULES)
def test_so_it_is_of_every_kind_and_of_pairs(sizes: str, kind: str, more: str) -> None:
    """Each made again, on the host and on disk, and two of these beside each other.

    Where ranks share rows or weights every third of them, in turns of the schedules.
    """
    turn = SCHEDULES.index((sizes, kind))
    zero = int(more.removeprefix("zero")) if more.startswith("zero") else 0
    sizes, dp = (sizes, 2) if zero else (f"{sizes} {more}", 1)
    every = [*singly(more == "tp2"), *PAIRS]
    every = every[turn % 3 :: 3] if more else every
    check([Asked(b, policy, sizes, kind, zero, dp, away) for b, policy, away in every])


@pytest.mark.matrix
@pytest.mark.parametrize(("sizes", "kind"), SCHEDULES)
def test_so_it_is_where_any_activations_leave(sizes: str, kind: str) -> None:
    """On the device, on the host and on disk."""
    check([Asked(*one, sizes, kind, away=away) for *one, away in AWAY])


ROOMS = (("padded", 160, 0), ("spread", 80, 0), ("spread", 160, 1))


def test_so_it_is_where_room_is_stated() -> None:
    """Whatever the routing is, also where it lacks that room and the step is made twice; where
    rows have pages they have as many as are planned.
    """
    asked = []
    for room, block in zip(ROOMS, (SHARED, LATENT, GATED), strict=True):
        if room[0] == "padded" or room[2]:
            asked.append(Asked(block, ("block",), "pp2 ep2", "1f1b", room=room))
        paged = Away(page=16, spill=0.7 * (room[0] == "spread"), in_flight=1)
        asked.append(Asked(block, ("norms",), "pp2 ep2", "zb_h1", away=paged, room=room))
    # What tells experts' rows in few bits apart is made again too.
    check([*asked, Asked(SHARED, ("block",), "pp2 ep2", "1f1b", codes="fp8_tensor delayed")])


def test_so_it_is_where_rows_are_sent_as_they_come() -> None:
    """Where each goes is noted twice: as it leaves, and as it has come."""
    ways = product((SHARED, LATENT), (("gpipe", None), ("merged", ("block",))))
    check([Asked(block, again, "pp2 ep2", kind, even=True) for block, (kind, again) in ways])
    check([Asked(SHARED, ("norms",), "pp2 etp2", "1f1b", even=True)])
