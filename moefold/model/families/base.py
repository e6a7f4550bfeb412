"""What all model families share: their common knobs, and how sizes become a description.

A family is a record: the few sizes users write under ``shape``, and beside it what is not a size.
``describe`` turns it into a ``Decoder``; ``of`` finds the record whose description a decoder is.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import ValidationError

from moefold.config.base import Record
from moefold.config.errors import REMOVE, FieldPath, PathPart, Violation, dotted
from moefold.config.fields import required
from moefold.layers.config import Positive, Rope, Size
from moefold.layers.kinds.dense import Dense
from moefold.model.config import Block, Decoder, patterns
from moefold.model.families.fields import ConfigField, Rotary
from moefold.model.families.hub import ConfigReader
from moefold.model.families.names import Entry
from moefold.model.families.sizes import FamilySizes, GqaSizes, first_moe
from moefold.moe.config import BALANCE, ROUTER, Aux, Bias, Capacity, Moe, Router, Shared, Z

_ROTARY = re.compile(r"\.self_attn\.rotary_emb\.inv_freq$")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_FURTHER = re.compile(r"^(model\.)?mtp[._]")
Balance = tuple[Annotated[Record, BALANCE], ...]


@dataclass(frozen=True)
class Reading:
    """What a Hugging Face ``config.json`` says, and what the reader should know about it."""

    model: "Family"
    decoder: Decoder
    special_tokens: Mapping[str, Any]
    """``bos_token_id`` and its like, kept for a later export."""
    notes: tuple[str, ...]
    quantised: tuple[int, int] | None
    """Rows and columns that share a scale, where weights are stored as FP8."""
    nested: bool = False
    """Whether it is the language model of a larger one, whose other parts are left out."""


class Family(Record):
    """A model family; final classes add ``family``, their kind of ``shape`` and what is theirs."""

    shape: FamilySizes
    router: Annotated[Router, ROUTER] | None = None
    """A router in place of the family's; its experts and top_k are those of ``shape``."""
    balance: Balance = (Aux(),)
    capacity: Capacity | None = None
    """None is dropless."""
    rope: Rope = Rope()
    norm_epsilon: Positive = 1e-6
    tied: bool = False
    """Whether the head is the embedding."""
    init_std: Positive = 0.02
    context: Size | None = None
    """Longest sequence the model is meant for; written at export, changes no maths."""

    model_type: ClassVar[str]
    """The family's name in a Hugging Face ``config.json``; where none is stated, the record's."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Other names of the very same model in a ``config.json``."""
    architecture: ClassVar[str]
    other_architectures: ClassVar[tuple[str, ...]] = ()
    """What the very same class is called in released folders."""
    hf_sizes: ClassVar[Mapping[str, str]]
    """Fields of ``config.json`` that are sizes, and the size each is; a null one is left out."""
    respelled: ClassVar[Mapping[str, str]] = {}
    """Names that fields of ``config.json`` have here, by those that most families give them; both
    are read."""
    unstated: ClassVar[Mapping[str, Any]] = {}
    """What transformers' class takes for absent fields of ``config.json``, where entries do not."""
    epsilon_field: ClassVar[str] = "rms_norm_eps"
    """The field of ``config.json`` that is ``norm_epsilon``."""
    fields: ClassVar[tuple[ConfigField, ...]] = ()
    """The other fields of ``config.json``, beside those that all families have."""
    tensors: ClassVar[tuple[Entry, ...]]
    """Our parameters' names beside the names on disk."""
    shared_gate: ClassVar[bool] = False
    """Whether a sigmoid scales the shared expert's output."""
    extra_layers: ClassVar[str | None] = None
    """What layers beyond the last are, where a folder may have some that are left out."""
    fixed_rope: ClassVar[str | None] = "half"
    """The rotary layout the family is tied to; None allows either."""
    turns: ClassVar[bool] = True
    """Whether any layer has rotary positions."""
    scales_softmax: ClassVar[bool] = False
    """Whether YaRN's ``mscale_all_dim`` may scale the softmax."""
    attention_own: ClassVar[Mapping[str, Any]] = {}
    """What the family's attention is by nature, as fields of its record."""
    attention_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of the record that the attention's record has too."""
    moe_own: ClassVar[Mapping[str, Any]] = {}
    """What the family's feed-forward with experts is by nature."""
    moe_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of the record that the feed-forward with experts has too."""
    block_own: ClassVar[Mapping[str, Any]] = {}
    """What the family's blocks are by nature."""
    block_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of the record that each block has too."""
    decoder_own: ClassVar[Mapping[str, Any]] = {}
    """What the family's decoder is by nature."""
    decoder_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of the record that the decoder has too."""
    router_own: ClassVar[Mapping[str, Any]] = {}
    """What the family's router is by nature."""
    router_kinds: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """What it is by the record's ``weights``, in families that choose by that."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if "family" in cls.model_fields and "model_type" not in vars(cls):
            cls.model_type = cls.model_fields["family"].default

    @property
    def chosen_router(self) -> Router:
        """The router of the layers with experts: the one in place of the family's, or its own.

        That is softmax over all experts, then top-k, where the family says nothing else.
        """
        sizes = {"experts": self.shape.experts, "top_k": self.shape.top_k}
        if self.router is not None:
            return self.router.model_copy(update=sizes)
        own = {name: getattr(self, name) for name in self.router_fields}
        own |= self.router_kinds.get(getattr(self, "weights", ""), {})
        return Router(**sizes, **self.router_own, **own)

    def blocks(self) -> Sequence[Block]:
        """Every block in order: dense where ``shape`` says so, else with experts."""
        own = {name: getattr(self, name) for name in self.attention_fields}
        dense, sparse = Dense(width=self.shape.width_of_dense), self.moe()
        more = {**self.block_own, **{name: getattr(self, name) for name in self.block_fields}}
        made: dict[tuple[Record, bool], Block] = {}
        found: list[Block] = []
        rope = self.rope if self.turns else None
        for layer in range(self.shape.layers):
            attention = self.shape.attention(layer, rope, {**self.attention_own, **own})
            key = attention, layer in self.shape.dense
            if key not in made:
                made[key] = Block(attention=attention, ffn=dense if key[1] else sparse, **more)
            found.append(made[key])
        return found

    @classmethod
    def read(cls, config: ConfigReader) -> dict[str, Any]:
        """Take the family's own fields out of a ``config.json``; return those of the record.

        Those of ``shape`` are in a dict of their own.
        """
        found: dict[str, Any] = {"shape": {}}
        for entry in cls.fields:
            for path, value in entry.read(config).items():
                *outer, name = path.split(".")
                (found["shape"] if outer else found)[name] = value
        return found

    def write(self) -> dict[str, Any]:
        """Return the fields of ``config.json`` that are the family's own."""
        return {name: value for f in self.fields for name, value in f.write(self).items()}

    def ignores(self, name: str) -> str | None:
        """Why a tensor on disk has no place in the model; None where it must have one."""
        if _ROTARY.search(name):
            return "rotary frequencies, which are computed"
        if _FURTHER.match(name):
            return "layers for multi-token prediction"
        layer = _LAYER.match(name)
        layers = self.shape.layers + len(getattr(self, "multi_token", ()))
        return self.extra_layers if layer and int(layer[1]) >= layers else None

    @classmethod
    def copies(cls, decoder: Decoder) -> Mapping[str, tuple[str, ...]]:
        """Return names on disk of what stands there more than once, by ours."""
        return {}

    @classmethod
    def guess(cls, decoder: Decoder) -> Self:
        """Return the record that a decoder may come from, read off its blocks, not yet checked."""
        moe, attention = first_moe(decoder), decoder.blocks[0].attention
        shape = cls.model_fields["shape"].annotation.of(decoder)  # type: ignore[union-attr]
        own = {name: getattr(moe.router, name) for name in cls.router_fields}
        own |= {name: getattr(attention, name) for name in cls.attention_fields}
        own |= {name: getattr(moe, name) for name in cls.moe_fields}
        for name, kind in cls.router_kinds.items():
            if all(getattr(moe.router, field) == value for field, value in kind.items()):
                own["weights"] = name
        own |= {name: getattr(decoder.blocks[0], name) for name in cls.block_fields}
        own |= {name: getattr(decoder, name) for name in cls.decoder_fields}
        full_first = sorted(
            decoder.blocks, key=lambda b: bool(getattr(b.attention, "window", None))
        )
        ropes = (getattr(block.attention, "rope", None) for block in full_first)
        fields = {
            "balance": moe.balance,
            "capacity": moe.capacity,
            "rope": next((rope for rope in ropes if rope is not None), Rope()),
            **{n: getattr(decoder, n) for n in ("norm_epsilon", "tied", "init_std", "context")},
        }
        return cls(shape=shape, **own, **fields)  # type: ignore[arg-type]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Reading:
        """Read a Hugging Face ``config.json``.

        Raises:
            ValueError: naming every field that is unknown, missing or not supported.
        """
        names = cls.architecture, *cls.other_architectures
        reader = ConfigReader(config, names, cls.model_type, cls.respelled, cls.unstated)
        fields = {
            "norm_epsilon": reader.take(cls.epsilon_field, float),
            "tied": reader.take(
                "tie_word_embeddings", bool, cls.unstated.get("tie_word_embeddings", False)
            ),
            "init_std": reader.take("initializer_range", float, 0.02),
            "context": reader.take("max_position_embeddings", int, None),
        }
        own = cls.read(reader)
        record = cls.model_fields["shape"].annotation
        assert isinstance(record, type) and issubclass(record, FamilySizes)
        needed = {*required(record)} - own["shape"].keys()
        sizes = {
            ours: reader.take(theirs, int)
            for theirs, ours in cls.hf_sizes.items()
            if ours in needed or not reader.null(theirs)
        }
        reader.skip(*cls.hf_sizes)
        tokens, block = reader.special_tokens(), reader.quantised()
        reader.finish()
        model = cls(**(fields | own | {"shape": sizes | own["shape"]}))
        refuse((b.under("shape") for b in model.shape.rules()), "config.json describes a model: ")
        refuse(model.rules(), "config.json describes a model: ")
        for entry in cls.fields:
            entry.check(reader, model)
        reader.refuse_all()
        decoder = model.describe(model.shape.vocab or 2)
        return Reading(model, decoder, tokens, tuple(reader.notes), block)

    @classmethod
    def of(cls, decoder: Decoder) -> Self:
        """Return the record whose description ``decoder`` is.

        How weights start (``init_out_scale``) is not compared: it is no part of a trained model.

        Raises:
            ValueError: naming each part of the decoder that the family does not have.
        """
        try:
            found = cls.guess(decoder)
        except (AttributeError, StopIteration, ValidationError):
            raise ValueError(f"its blocks are not those of {cls.model_type}") from None
        wanted = _plain(found.describe(decoder.vocab))
        differing = list(_differences(_plain(decoder), wanted, ""))
        if differing:
            raise ValueError(f"not a {cls.model_type}: " + "; ".join(differing[:8]))
        return found

    @classmethod
    def to_hf(cls, decoder: Decoder) -> dict[str, Any]:
        """Return the ``config.json`` of a decoder of this family.

        Raises:
            ValueError: where the decoder is not of this family.
        """
        model = cls.of(decoder)
        fields = {
            "architectures": [cls.architecture],
            "model_type": cls.model_type,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": model.init_std,
            cls.epsilon_field: model.norm_epsilon,
            "tie_word_embeddings": model.tied,
            "output_router_logits": False,
            "use_cache": True,
            **{theirs: getattr(model.shape, ours) for theirs, ours in cls.hf_sizes.items()},
            **model.write(),
        }
        return {cls.respelled.get(name, name): value for name, value in fields.items()}

    def describe(self, vocab: int) -> Decoder:
        """Return the decoder for a tokenizer of ``vocab`` tokens.

        Raises:
            ValueError: where ``shape.vocab`` has fewer rows than the tokenizer has tokens.
        """
        refuse(self.violations(vocab))
        return Decoder(
            vocab=self.shape.vocab or vocab,
            hidden=self.shape.hidden,
            stacks=patterns(self.blocks()),
            norm_epsilon=self.norm_epsilon,
            tied=self.tied,
            init_std=self.init_std,
            context=self.context,
            family=self.model_type,
            **self.decoder_own,
            **{name: getattr(self, name) for name in self.decoder_fields},
        )

    def violations(self, vocab: int) -> Iterator[Violation]:
        """Yield what does not fit a tokenizer of ``vocab`` tokens."""
        yield from too_few_rows(("shape", "vocab"), self.shape.vocab, vocab)

    def moe(self, **own: Any) -> Moe:
        """The feed-forward with experts, ``own`` being what only some families have."""
        if width := self.shape.width_of_shared:
            own = {"shared": Shared(width=width, gate=self.shared_gate)} | own
        own = {**self.moe_own, **{name: getattr(self, name) for name in self.moe_fields}, **own}
        return Moe(
            width=self.shape.expert_width,
            router=self.chosen_router,
            capacity=self.capacity,
            balance=self.balance,
            **own,
        )

    router_paths: ClassVar[Mapping[tuple[PathPart, ...], tuple[PathPart, ...]]] = {
        ("top_k",): ("shape", "top_k"),
        ("renormalise",): ("renormalise",),
        ("groups", "count"): ("groups", "count"),
        ("groups", "keep"): ("groups", "keep"),
        ("groups", "best"): ("groups", "best"),
    }
    """Where what the own router's rules speak of stands in the family's record."""
    router_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of the record that only the own router reads."""

    def rules(self) -> Iterator[Violation]:
        """The router's rules at the family's own paths; each balance term once; rotary layout."""
        router = self.chosen_router
        # Fields of the own router that the family settles, so that a run file cannot mend them.
        settled = [(n,) for n in ("order", "renormalise") if n not in self.router_fields]
        for broken in router.rules():
            if self.router is None and broken.path in settled:
                size = "experts" if self.shape.experts == 1 else "top_k"
                yield Violation(("shape", size), 1, broken.rule, 2)
            elif self.router is None or broken.path == ("top_k",):
                path = self.router_paths.get(broken.path, broken.path)
                yield Violation(path, broken.value, broken.rule, broken.nearest)
            else:
                yield broken.under("router")
        yield from self._replaced()
        yield from balance_rules(self.balance, router.selection_bias)
        if not self.turns and self.rope != Rope():
            yield Violation(("rope",), self.rope, f"{self.model_type} has no positions", Rope())
        if self.fixed_rope is not None and self.rope.layout != self.fixed_rope:
            rule = f"{self.model_type} rotates pairs laid out as {self.fixed_rope}"
            yield Violation(("rope", "layout"), self.rope.layout, rule, self.fixed_rope)
        partial = any(isinstance(f, Rotary) and f.fraction is not None for f in self.fields)
        if self.rope.fraction != 1 and not partial:
            rule = f"{self.model_type} turns all dims of a head"
            yield Violation(("rope", "fraction"), self.rope.fraction, rule, 1.0)
        elif self.rope.fraction != 1 and isinstance(self.shape, GqaSizes):
            yield from self.rope.fits(self.shape.dims_per_head)
        if not self.scales_softmax and self.rope.yarn and self.rope.yarn.mscale_all_dim:
            rule = f"{self.model_type} does not scale its softmax; leave mscale_all_dim at 0"
            yield Violation(
                ("rope", "yarn", "mscale_all_dim"), self.rope.yarn.mscale_all_dim, rule, 0.0
            )

    def _replaced(self) -> Iterator[Violation]:
        """Yield what a router in place of the family's leaves without effect."""
        if self.router is None:
            return
        for name in ("experts", "top_k"):
            if value := getattr(self.router, name):
                yield Violation(("router", name), value, f"shape.{name} says it; leave it out", 0)
        for name in self.router_fields:
            value, unset = getattr(self, name), type(self).model_fields[name].default
            if value != unset:
                rule = "is read by the family's own router alone; say it under router"
                yield Violation((name,), value, rule, unset)


def too_few_rows(path: FieldPath, rows: int | None, vocab: int) -> Iterator[Violation]:
    """Yield a violation where an embedding of ``rows`` has none for some tokens."""
    if rows is not None and rows < vocab:
        yield Violation(
            path, rows, f"must be at least the tokenizer's number of tokens, {vocab}", vocab
        )


def refuse(broken: Iterable[Violation], where: str = "model.") -> None:
    """Raise ``ValueError`` with every violation, unless there is none."""
    said = [f"{where}{dotted(b.path)} is {b.value!r}; rule: {b.rule}" for b in broken]
    if said:
        raise ValueError("; ".join(said))


def balance_rules(balance: Sequence[Record], selection_bias: bool) -> Iterator[Violation]:
    """Yield a violation for each term that stands twice, or moves a bias the router lacks."""
    seen: list[Record] = []
    taken = list(balance)
    for i, term in enumerate(balance):
        rule = ""
        if isinstance(term, Bias) and not selection_bias:
            rule = "kind bias moves a selection bias, which this family's router does not have"
        elif any(_same_term(term, other) for other in seen):
            rule = "the same term stands in the list already"
        if rule:
            offers = (Aux(), Z(), Aux(over="sequence"), Aux(over="global_batch"))
            fresh = (o for o in offers if not any(_same_term(o, t) for t in taken))
            free = next(fresh, None)
            taken += [] if free is None else [free]
            yield Violation(("balance", i), term, rule, REMOVE if free is None else free)
        seen.append(term)


def _same_term(one: Record, other: Record) -> bool:
    same_population = getattr(one, "over", None) == getattr(other, "over", None)
    return type(one) is type(other) and same_population


def _plain(decoder: Decoder) -> dict[str, Any]:
    """A decoder as plain data, patterns written out; without name and start of weights."""
    plain = decoder.model_dump(exclude={"stacks", "init_out_scale", "family"})
    return plain | {"layers": [b.model_dump() for b in decoder.blocks]}


def _differences(have: Any, want: Any, path: str) -> Iterator[str]:
    if isinstance(have, dict) and isinstance(want, dict):
        for key in sorted({*have, *want}):
            yield from _differences(have.get(key), want.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(have, list) and isinstance(want, list) and len(have) == len(want):
        for i, (a, b) in enumerate(zip(have, want, strict=True)):
            yield from _differences(a, b, f"{path}[{i}]")
    elif have != want:
        yield f"{path} is {have!r} where the family has {want!r}"
