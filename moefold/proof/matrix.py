"""The matrix: layouts that a release must pass, made by a few rules. Torch-free.

Kinds of dispatcher, schedule, context, balance, optimizer and recompute are taken from their slots,
and models from the recipes too: what is registered later is in the matrix without an edit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from tempfile import gettempdir
from typing import Any, get_args

from moefold.config.base import Record
from moefold.config.slot import Slot
from moefold.kernels.quantise.config import QUANTISE, Fp8Block, Fp8Tensor, Mxfp8, Nvfp4
from moefold.layers.config import (
    CONTEXT,
    RECOMPUTE,
    Full,
    Kind,
    Offload,
    Offloaded,
    OffloadToDisk,
    OffloadToHost,
    OffloadToPages,
    Selective,
)
from moefold.layers.kinds.dense import Dense
from moefold.layers.kinds.gqa import Gqa
from moefold.mesh.config import ORDERS, Sizes
from moefold.moe.config import Shared
from moefold.moe.dispatch.config import DISPATCH, Clones, FixedRoom, Foreign
from moefold.optim.config import OPTIMIZER, AdamW, QkClip
from moefold.parallel.config import Layout, StatePlacement
from moefold.proof.case import ProofCase, Subject, enough
from moefold.proof.shrink import shrink, small_optimizer
from moefold.proof.subjects import (
    BIASED,
    DENSE,
    GQA,
    LATER,
    MLA,
    SHARED,
    SUBJECTS,
    UNCOMMON,
    WINDOWED,
    decoder,
    moe,
    router_kinds,
    subject,
    terms,
)
from moefold.run import load_run, recipes
from moefold.schedule.config import SCHEDULE, Merged, ZeroBubbleH1
from moefold.spec.decoder import with_multi_token
from moefold.spec.tuning import freeze

AXES = ("tp", "cp", "pp", "ep", "etp", "dp")
DEEP_LATER = (
    "multi token deep",
    subject(with_multi_token(decoder(GQA, DENSE, SHARED, moe(), moe()), LATER)),
)
ROOM = 256
"""Rows between two ranks that are always enough here: 32 of a micro-batch to 8 experts each."""


def kinds(slot: Slot, **sizes: int) -> Iterator[Record]:
    """Yield a record of each kind in a slot; required numbers are 2, or those given by name."""
    for record in slot.kinds.values():
        fields = record.model_fields
        required = {name: sizes.get(name, 2) for name, f in fields.items() if f.is_required()}
        yield record(**required)


def dispatches() -> list[Record]:
    """Return every dispatcher that needs no GPU, with room that is enough."""
    return [one for one in kinds(DISPATCH, max_rows=ROOM) if not isinstance(one, Foreign)]


Rule = Callable[[], Iterator[ProofCase]]
RULES: dict[str, Rule] = {}


def rule(make: Rule) -> Rule:
    """Add a rule under its name."""
    RULES[make.__name__] = make
    return make


def matrix() -> dict[str, tuple[ProofCase, ...]]:
    """Return every case once, by the rule that asks for it first."""
    seen: set[tuple[Subject, Layout, int]] = set()
    found: dict[str, tuple[ProofCase, ...]] = {}
    for name, make in RULES.items():
        kept = []
        for case in make():
            key = case.subject, case.layout, case.world
            if key not in seen:
                seen.add(key)
                kept.append(case)
        found[name] = tuple(kept)
    return found


def _word(value: Any) -> str:
    """Name a layout's choice: a record by its kind and what of it is not by default."""
    kind = getattr(value, "kind", None)
    if isinstance(value, Offload):
        return ", ".join(f"{to} {'+'.join(it.modules)}" for to, it in value.stated.items())
    if isinstance(value, StatePlacement):
        return f"on {value.at} by {value.step}, {value.share:.0%}"
    if kind is None:
        return str(value)
    return " ".join([kind, *(f"{k} {v}" for k, v in value if k != "kind" and v is not None)])


def _sizes(**axes: int) -> str:
    return " ".join(f"{axis}{size}" for axis, size in axes.items() if size > 1 and axis != "dp")


def _smallest(sizes: str) -> int:
    return Sizes.parse(sizes).smallest_world


def _each(
    names: Sequence[str | tuple[str, Subject]], layouts: Sequence[tuple[str, int]], **more: Any
) -> Iterator[ProofCase]:
    """Yield cases of some models in some layouts: those that a table, dims and groups allow."""
    words = [f"{key} {_word(value)}" for key, value in more.items()]
    for of, (sizes, world) in product(names, layouts):
        name, found = (of, SUBJECTS[of]) if isinstance(of, str) else of
        title = ", ".join([f"{name}: {sizes or f'dp{world}'} on {world}", *words])
        record = Layout(sizes=sizes, **more)
        try:
            found = replace(found, micro_batches=enough(record, world))
        except ValueError:
            continue
        case = ProofCase(title, found, record, world)
        if not any(case.refused()):
            yield case


@rule
def axes() -> Iterator[ProofCase]:
    """Every axis alone, on 2, 4 and 8 ranks."""
    for axis, size in product(AXES, (2, 4, 8)):
        sizes = _sizes(**{axis: size})
        if axis == "pp":
            more = {"stages": "Et|t||t|||t|L"} if size == 8 else {}
            yield from _each(["deep"], [(sizes, size)], **more)
        else:
            yield from _each(["mha"], [(sizes, size)])


@rule
def pairs() -> Iterator[ProofCase]:
    """Every pair of axes, on the fewest ranks and on eight."""
    for one, other in combinations(AXES, 2):
        sizes = _sizes(**{one: 2, other: 2})
        fewest = _smallest(sizes) * (2 if "dp" in (one, other) else 1)
        for world in dict.fromkeys((fewest, 8)):
            yield from _each(["gqa"], [(sizes, world)])


@rule
def foldings() -> Iterator[ProofCase]:
    """Every folding of eight ranks with up to four tensor or context ranks and four stages."""
    for pp, tp, cp, ep, etp in product((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4, 8), (1, 2, 4)):
        if pp * tp * cp > 8 or pp * ep * etp > 8:
            continue
        sizes = _sizes(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
        yield from _each(["deep" if pp > 2 else "gqa"], [(sizes, 8)])


@rule
def orders() -> Iterator[ProofCase]:
    """Every order of ranks."""
    for order in ORDERS:
        yield from _each(["gqa"], [("tp2 pp2 ep2", 8), ("cp2 pp2 etp2", 8)], order=order)


@rule
def dispatchers() -> Iterator[ProofCase]:
    """Every dispatcher that needs no GPU, dropless and with capacity, over folded groups."""
    layouts = [("ep2", 2), ("tp2 ep4", 4), ("ep2 etp2", 4), ("tp2 ep4 etp2", 8), ("cp2 ep8", 8)]
    for record in dispatches():
        yield from _each(["gqa"], [*layouts, ("", 2)], dispatch=record)
        yield from _each(["capacity", "idle experts"], [("tp2 ep4", 8)], dispatch=record)
        yield from _each(["idle ranks"], [("ep4", 4)], dispatch=record)


@rule
def clones() -> Iterator[ProofCase]:
    """Clones of hot experts by every dispatcher that needs no GPU, and in every schedule."""
    made = Clones(slots=2)
    layouts = [("ep2", 2), ("tp2 ep4", 4), ("ep2 etp2", 4), ("cp2 ep4", 8)]
    for record in dispatches():
        yield from _each(["gqa"], layouts, dispatch=record, clones=made)
        names = ["capacity", "idle ranks", "formed"]
        yield from _each(names, [("ep4", 4)], dispatch=record, clones=made)
    for schedule, zero in zip(kinds(SCHEDULE), (0, 1, 2, 3) * 3, strict=False):
        sizes = [("pp2 ep2", 4), ("pp2 vpp2 ep4", 8)]
        yield from _each(["deep", "mla"], sizes, schedule=schedule, zero=zero, clones=made)
    for again in (Full(), Selective(modules=get_args(Kind))):
        yield from _each(["deep", "mla"], [("ep4", 4)], recompute=again, clones=made)


@rule
def schedules() -> Iterator[ProofCase]:
    """Every schedule, with and without virtual stages, even and uneven, with empty stages."""
    for record in kinds(SCHEDULE):
        for sizes in ("pp2", "pp4", "pp2 vpp2"):
            yield from _each(["deep"], [(sizes, _smallest(sizes))], schedule=record)
        yield from _each(["deep"], [("tp2 pp2 ep4", 8), ("tp2 pp2 vpp2 ep2", 8)], schedule=record)
        for sizes, stages in (
            ("pp2", "Et|tttL"),
            ("pp4", "Ett||tt|L"),
            ("pp2 vpp2", "E|tt|t|tL"),
            ("pp4 vpp2", "Et||t|t|||t|L"),
        ):
            world = _smallest(sizes)
            yield from _each(["deep"], [(sizes, world)], schedule=record, stages=stages)
        yield from _each(["tied deep"], [("pp2 vpp2", 2), ("pp2", 4)], schedule=record)


@rule
def uncommon_parts() -> Iterator[ProofCase]:
    """Parts of layers that only some families have, along every axis."""
    yield from _each(
        [*UNCOMMON, "scaled", "normed", "centred", "formed", "entered"],
        [("tp2", 2), ("cp2", 2), ("tp2 pp2", 4), ("ep2 etp2", 4)],
    )


@rule
def frozen_parts() -> Iterator[ProofCase]:
    """Weights of each such part frozen, those of one layer and small ones of the others."""
    some = ("mla", "windowed", "scaled", "normed", "centred", "formed", "dense in parts")
    for name, layer in product([*UNCOMMON, *some], range(2)):
        patterns = (f"layers.{layer}.*", "*norm*", "*bias*", "*taps", "*sinks")
        found = replace(SUBJECTS[name], decoder=freeze(SUBJECTS[name].decoder, patterns))
        named = [(f"{name} without layer {layer}", found)]
        layouts = [("cp2 etp2", 4), ("", 2)] if layer else [("tp2 ep2", 2), ("pp2", 4)]
        yield from _each(named, layouts, zero=3)


@rule
def contexts() -> Iterator[ProofCase]:
    """Every kind of context parallelism on packed documents, of both kinds of attention."""
    layouts = [("cp2", 2), ("cp4", 4), ("tp2 cp2", 4), ("cp2 pp2 ep2", 8), ("tp2 cp4", 8)]
    for record in kinds(CONTEXT):
        yield from _each(["mha", "mla"], layouts, context=record)
        yield from _each(["idle ranks"], [("cp4", 4)], context=record)
        yield from _each(["windowed"], [("cp2", 2), ("tp2 cp2", 4)], context=record)


@rule
def models() -> Iterator[ProofCase]:
    """Every model over each axis, and over several."""
    layouts = [("tp2", 2), ("ep2", 2), ("cp2", 2), ("pp2", 2), ("", 2)]
    layouts += [("tp2 cp2 ep4", 8), ("tp2 pp2 ep4", 8)]
    yield from _each(list(SUBJECTS), layouts)


@rule
def multi_token() -> Iterator[ProofCase]:
    """Losses of further tokens in every schedule, zero stage and recompute policy."""
    both = ["multi token", "multi token tied"]
    for schedule, zero in zip(kinds(SCHEDULE), (0, 1, 2, 3) * 3, strict=False):
        layouts = [("pp2", 4), ("pp2 vpp2 ep2", 4)]
        yield from _each([DEEP_LATER, *both], layouts, schedule=schedule, zero=zero)
    for zero in range(4):
        yield from _each(both, [("", 2), ("tp2 ep2", 4)], zero=zero)
    for again in (Full(), Selective(modules=("norms", "attention", "experts"))):
        yield from _each(both, [("cp2 ep2", 4), ("tp2 pp2", 4)], recompute=again)
    stages = {"stages": "Et|tmmL", "schedule": ZeroBubbleH1()}
    yield from _each(both[:1], [("pp2 cp2", 4)], **stages)


@rule
def router_terms() -> Iterator[ProofCase]:
    """Every router loss over every population, alone."""
    for name, made in terms():
        yield from _each([(name, made)], [("tp2 cp2 ep2", 8), ("ep4", 4)])


@rule
def routers() -> Iterator[ProofCase]:
    """Every router, and what is drawn by chance, along every axis, and run again in backward."""
    layouts = [("tp2", 2), ("cp2", 2), ("tp2 cp2 ep2", 8), ("ep2 etp2", 4), ("pp2 ep2", 4)]
    found = list(router_kinds())
    yield from _each(found, layouts)
    yield from _each(found, [("tp2 ep2", 4)], recompute=Full())
    latent = [one for one in found if "latent" in one[0]]
    for schedule, zero in zip(kinds(SCHEDULE), (1, 2, 3, 0) * 3, strict=False):
        layouts = [("pp2 ep2", 4), ("pp2 vpp2 ep2", 4)]
        yield from _each(latent, layouts, schedule=schedule, zero=zero)
    for record in dispatches():
        yield from _each(latent, [("tp2 ep4", 4)], dispatch=record)


@rule
def zero_stages() -> Iterator[ProofCase]:
    """Every way in which data ranks share a model's state."""
    layouts = [("", 2), ("tp2", 4), ("ep2", 4), ("cp2 ep4", 8), ("pp2 ep2", 8), ("tp2 pp2", 8)]
    for stage in range(4):
        yield from _each(["gqa"], layouts, zero=stage)


@rule
def recomputes() -> Iterator[ProofCase]:
    """Every recompute policy."""
    layouts = [("tp2 ep4", 4), ("cp2 ep2", 4), ("tp2 pp2 ep2", 8)]
    some = {"modules": ["norms", "attention", "ffn", "shared", "experts"]}
    for record in RECOMPUTE.kinds.values():
        policy = record(**(some if "modules" in record.model_fields else {}))
        yield from _each(["gqa", "mla"], layouts, recompute=policy)
    kinds_of = {"mla": get_args(Kind), "gqa": tuple(k for k in get_args(Kind) if k != "mla_up")}
    for (name, every), (sizes, world) in product(kinds_of.items(), [("tp2", 2), *layouts]):
        yield from _each([name], [(sizes, world)], recompute=_again(sizes, *every))


def _again(sizes: str, *kinds: Kind) -> Selective:
    """Return the policy of some kinds; rows are gathered from tensor ranks alone."""
    alone = Sizes.parse(sizes).tp == 1
    return Selective(modules=tuple(kind for kind in kinds if not (alone and kind == "gather")))


@rule
def offloads() -> Iterator[ProofCase]:
    """Activations on host and disk in every schedule, beside recompute and with all axes; experts'
    rows in pages of the device, and of the host."""
    deeper = "deeper", subject(decoder(GQA, *(DENSE, SHARED, moe(), moe()) * 2))
    latent = "latent", subject(decoder(MLA, *(DENSE, BIASED) * 2))
    file = OffloadToDisk(modules=("experts", "attention"), folder=gettempdir())
    every = Offload(host=OffloadToHost(modules=get_args(Offloaded)))
    host = OffloadToHost(modules=("block", "norms", "ffn", "shared"))
    away = Offload(host=host, disk=file, in_flight=1)
    layouts = [("tp2 ep4", 4), ("cp2 ep2", 4), ("ep2 etp2", 4), ("tp2 pp2 ep2", 8)]
    for record in (every, away):
        yield from _each([deeper, latent], layouts, offload=record)
        for zero in (0, 2, 3):
            yield from _each([deeper], [("ep2", 2), ("tp2 pp2", 8)], offload=record, zero=zero)
    for schedule, sizes in product(kinds(SCHEDULE), ("pp2", "pp2 vpp2")):
        yield from _each([deeper], [(sizes, 2)], offload=away, schedule=schedule)
    sets: list[tuple[Kind, ...]]
    sets = [("mla_up", "permute"), ("experts", "attention", "gather"), ("ffn", "shared")]
    for some, (sizes, world) in product(sets, layouts):
        more = {"offload": away, "recompute": _again(sizes, *some)}
        yield from _each([latent], [(sizes, world)], **more)
    sizes = [("ep2", 2), ("tp2 ep4", 4), ("pp2 ep2", 4)]
    for record in (one for one in dispatches() if isinstance(one, FixedRoom)):
        for spill, of in enumerate((["gqa", "mla"], [deeper])):
            pages = Offload(pages=OffloadToPages(page=8, load=4.0, spill=spill))
            yield from _each(of, sizes, dispatch=record, offload=pages)
    inputs = Offload(host=OffloadToHost(modules=("block",)))
    for schedule in kinds(SCHEDULE):
        more = {"offload": inputs, "schedule": schedule, "recompute": Full()}
        yield from _each([deeper], [("pp2", 2), ("pp2 vpp2", 2)], **more)


@rule
def states() -> Iterator[ProofCase]:
    """Masters and moments on host and disk at every zero stage, updated by device and host."""
    layouts = [("", 2), ("tp2", 4), ("ep2", 2)]
    muon = "muon", replace(SUBJECTS["gqa"], optim=small_optimizer(OPTIMIZER.kinds["muon"]()))
    host, disk = {"at": "host"}, {"at": "disk", "folder": gettempdir()}
    for zero, (sizes, world) in product(range(4), layouts):
        for place in (host, disk | {"share": 0.5}, disk | {"step": "host"}):
            more = {"zero": zero, "state": StatePlacement.model_validate(place)}
            yield from _each(["gqa"], [(sizes, world)], **more)
    for zero, place in product((1, 3), (host, disk)):
        state = StatePlacement.model_validate(place)
        yield from _each([muon], [("ep2", 2), ("tp2", 4)], zero=zero, state=state)
    away = StatePlacement.model_validate(host | {"step": "host"})
    for schedule in kinds(SCHEDULE):
        more = {"schedule": schedule, "state": away, "zero": 1}
        yield from _each(["deep"], [("pp2 vpp2", 4), ("pp2", 4)], **more)


@rule
def optimizers() -> Iterator[ProofCase]:
    """Every optimizer, with state in pieces and whole."""
    for kind, record in OPTIMIZER.kinds.items():
        made = replace(SUBJECTS["gqa"], optim=small_optimizer(record()))
        for sizes, world in (("tp2", 2), ("", 2), ("tp2 ep4", 8), ("cp2 pp2 etp2", 8)):
            for zero in (0, 1, 3):
                yield from _each([(kind, made)], [(sizes, world)], zero=zero)
    host = StatePlacement.model_validate({"at": "host", "step": "host"})
    clips, plain = small_optimizer(AdamW(qk_clip=QkClip(bound=0.3))), {"qk_norm": "none"}
    biased = GQA.model_copy(update=plain | {"bias": "qkv"})
    heads = small_optimizer(OPTIMIZER.kinds["muon"].model_validate({"by_heads": True}))
    for name, zero in product(("gqa", "mla"), (0, 1, 3)):
        named = [(f"{name} by heads", replace(SUBJECTS[name], optim=heads))]
        yield from _each(named, [("tp2", 2), ("", 2), ("tp2 cp2 ep2", 8)], zero=zero)
    for attention in (biased, WINDOWED.model_copy(update=plain), MLA):
        clipped = replace(subject(decoder(attention, DENSE, SHARED)), optim=clips)
        named = [(f"clipped {attention.kind}", clipped)]
        for zero, layout in product((0, 3), (("tp2", 2), ("cp2", 2), ("tp2 cp2 ep2", 8))):
            yield from _each(named, [layout], zero=zero)
        yield from _each(named, [("pp2", 4)], zero=1, recompute=Full(), state=host)
    for moments, zero in product(("bf16", "fp8"), (0, 1, 3)):
        narrow = small_optimizer(AdamW(moments=moments, moment_group=4))
        named = [(f"moments {moments}", replace(SUBJECTS["gqa"], optim=narrow))]
        yield from _each(named, [("tp2 ep4", 8), ("cp2 pp2 etp2", 8)], zero=zero)
    # Rows that runs of data ranks cut through groups, and units in turns.
    wide = subject(decoder(GQA, Dense(width=24), moe(width=24), hidden=24))
    cut = replace(wide, optim=small_optimizer(AdamW(moments="fp8", moment_group=5)))
    for zero, more in ((1, {}), (3, {}), (1, {"state": host})):
        yield from _each([("moments cut", cut)], [("", 4), ("ep2", 4)], zero=zero, **more)


@rule
def precisions() -> Iterator[ProofCase]:
    """Every kind of few bits over each axis, zero stage and recompute, in blocks of four."""
    layouts = [("tp2 ep2", 2), ("cp2 ep2", 2), ("ep2 etp2", 4), ("etp2", 2), ("tp2 cp2 ep4", 4)]
    layouts += [("cp2 ep2 etp2", 4), ("ep4", 4), ("pp2 ep2", 4), ("tp2 pp2 ep2", 4)]
    records = {kind: made.model_validate({"block": 4}) for kind, made in QUANTISE.kinds.items()}
    records["delayed"] = delayed = Fp8Tensor(scaling="delayed", history=2)
    for kind, record in records.items():
        named = [(f"{kind} {name}", few_bits(name, record)) for name in ("gqa", "mla")]
        yield from _each(named, layouts[:2])
        for number, layout in enumerate(layouts[2:]):  # of both models in turn
            yield from _each([named[number % 2]], [layout])
        for zero, layout in enumerate([("tp2 ep2", 4), ("", 2)] * 2):
            yield from _each([named[zero // 2]], [layout], zero=zero)
        more = {"schedule": ZeroBubbleH1(), "recompute": Full()}
        yield from _each(named, [("tp2 pp2 ep2", 4)], **more)
        for one, absent in zip(named, (("gather", "mla_up"), ("gather",)), strict=True):
            again = Selective(modules=tuple(m for m in get_args(Kind) if m not in absent))
            four = [("cp2 ep4", 4), ("cp2 ep2 etp2", 4)]
            yield from _each([one], four, recompute=again, zero=3)
        if isinstance(record, Fp8Tensor | Nvfp4) and kind != "delayed":
            yield from _dispatched(named[:1], "tp2 ep4")
    for record in (Fp8Block(block=4, wire="codes", wgrad="wide"), Mxfp8(block=4, wire="codes")):
        named = [
            (f"codes sent {record.kind} {name}", few_bits(name, record)) for name in ("gqa", "mla")
        ]
        yield from _each(named, [("tp2 ep2", 2), ("cp2 ep2 etp2", 4), ("tp2 cp2 ep4", 4)])
        yield from _each(named[:1], [("tp2 pp2 ep2", 4)], **more)
        yield from _each(named[:1], [("pp2 ep2", 4)], schedule=Merged())
        yield from _each(named[1:], four, recompute=again, zero=3)
        yield from _dispatched(named[:1], "ep2 etp2")
    named = [("hidden codes mla", few_bits("mla", Nvfp4(block=4, hidden="codes")))]
    yield from _each(named, [layouts[i] for i in (0, 1, 2, 4, 7)])
    yield from _each(named, [("tp2 pp2 ep2", 4)], **more)
    yield from _each(named, [("tp2 ep2", 4)], zero=1)
    yield from _each(named, [("tp2 ep2", 4)], zero=3, recompute=again)
    wide = Mxfp8(block=4, scales="floor", wgrad="wide")
    named = [("wgrad wide", few_bits("gqa", wide)), ("delayed", few_bits("gqa", delayed))]
    kept = wide.model_copy(update={"hidden": "codes"})
    named.append(("hidden codes, wgrad wide", few_bits("gqa", kept)))
    yield from _each(named, [("tp2", 2), ("cp2", 2), ("tp2 cp2 ep2", 4)])
    for record, sizes in ((Fp8Block(hidden="codes"), "tp2 ep2"), (Nvfp4(), "cp2 ep2")):
        yield from _each([(f"published {record.kind}", published_blocks(record))], [(sizes, 2)])


def _dispatched(named: Sequence[tuple[str, Subject]], sizes: str) -> Iterator[ProofCase]:
    """Yield every way of sending rows over four ranks."""
    for dispatch in dispatches():
        if isinstance(dispatch, FixedRoom):
            dispatch = dispatch.model_copy(update={"on_overflow": "stop"})
        yield from _each(named, [(sizes, 4)], dispatch=dispatch)


def few_bits(name: str, record: Record) -> Subject:
    """Return a subject whose products read codes."""
    found = SUBJECTS[name]
    return replace(found, decoder=found.decoder.model_copy(update={"quantise": record}))


def published_blocks(record: Record) -> Subject:
    """Return a subject of one block that holds several blocks of the published size."""
    wide = Gqa(heads=4, kv_heads=4, head_dim=64)
    made = decoder(wide, moe(width=256, shared=Shared(width=256)), hidden=256, quantise=record)
    return subject(made, rows=512, micro_batches=2)


@rule
def shipped() -> Iterator[ProofCase]:
    """Every recipe, made small, in two layouts."""
    for name in recipes():
        run = load_run(name, ["layout={}"])
        for sizes, world in (("tp2 cp2 ep4", 8), ("pp2 ep2 etp2", 8)):
            made = shrink(run, [Layout(sizes=sizes)])
            yield from _each([(name, made)], [(sizes, world)])
