"""Base of model families: common settings, and the expansion of sizes into a description.

A family is a record: the few sizes that users write under ``shape``, and further settings.
``describe`` expands it into a ``Decoder``; ``of`` is the inverse, from a decoder to the record.
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
from moefold.model.config import Block, Decoder, to_stacks
from moefold.model.families.fields import ConfigField, Rotary
from moefold.model.families.hub import ConfigReader
from moefold.model.families.names import ParamMapping
from moefold.model.families.sizes import FamilySizes, GqaSizes, first_moe
from moefold.moe.config import BALANCE, ROUTER, Aux, Bias, Capacity, Moe, Router, Shared, Z

_ROTARY = re.compile(r"\.self_attn\.rotary_emb\.inv_freq$")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_MULTI_TOKEN = re.compile(r"^(model\.)?mtp[._]")
Balance = tuple[Annotated[Record, BALANCE], ...]


@dataclass(frozen=True)
class ParsedConfig:
    """The model that a Hugging Face ``config.json`` describes, with notes for the user."""

    model: "Family"
    decoder: Decoder
    special_tokens: Mapping[str, Any]
    """``bos_token_id`` and similar fields, kept for a later export."""
    notes: tuple[str, ...]
    fp8_block: tuple[int, int] | None
    """Rows and columns of an FP8 block with one scale; None if weights are not stored as FP8."""
    from_multimodal: bool = False
    """Whether it is the text model of a multimodal model, whose other parts are left out."""
    left_out: tuple[str, ...] = ()
    """Notes on fields and files of the folder that are not read."""


class Family(Record):
    """Base of model families; subclasses add ``family``, their ``shape`` and settings."""

    shape: FamilySizes
    router: Annotated[Router, ROUTER] | None = None
    """Router that replaces the family's; ``shape`` sets its ``experts`` and ``top_k``."""
    balance: Balance = (Aux(),)
    capacity: Capacity | None = None
    """Bound on the tokens per expert; None is dropless."""
    rope: Rope = Rope()
    norm_epsilon: Positive = 1e-6
    tied: bool = False
    """Whether the head shares the embedding's matrix."""
    init_std: Positive = 0.02
    context: Size | None = None
    """Longest intended sequence in tokens; written to exports, without effect on training."""

    model_type: ClassVar[str]
    """``model_type`` in a Hugging Face ``config.json``; default: the record's ``family``."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Other values of ``model_type`` for the same model."""
    architecture: ClassVar[str]
    other_architectures: ClassVar[tuple[str, ...]] = ()
    """Other class names of the model in released folders."""
    hf_sizes: ClassVar[Mapping[str, str]]
    """Names of sizes in ``shape`` by field of ``config.json``; null fields are skipped."""
    renamed_fields: ClassVar[Mapping[str, str]] = {}
    """The family's names of fields of ``config.json``, by their usual names; both are read."""
    field_defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults of the transformers class for absent fields that differ from the descriptors'."""
    epsilon_field: ClassVar[str] = "rms_norm_eps"
    """Field of ``config.json`` for ``norm_epsilon``."""
    fields: ClassVar[tuple[ConfigField, ...]] = ()
    """Fields of ``config.json`` in addition to those that all families have."""
    tensors: ClassVar[tuple[ParamMapping, ...]]
    """Mappings of parameter names to tensor names on disk."""
    shared_gate: ClassVar[bool] = False
    """Whether a sigmoid gate scales the shared expert's output."""
    extra_layers: ClassVar[str | None] = None
    """Description of extra layers that folders may have, which import ignores."""
    fixed_rope: ClassVar[str | None] = "half"
    """The only rotary layout of the family; None allows either."""
    has_rope: ClassVar[bool] = True
    """Whether any layer has rotary positions."""
    scales_softmax: ClassVar[bool] = False
    """Whether YaRN's ``mscale_all_dim`` may scale the softmax."""
    attention_fixed: ClassVar[Mapping[str, Any]] = {}
    """Fixed fields of the family's attention records."""
    attention_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of the family's record that are copied to the attention records."""
    moe_fixed: ClassVar[Mapping[str, Any]] = {}
    """Fixed fields of the family's MoE records."""
    moe_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of the family's record that are copied to the MoE records."""
    block_fixed: ClassVar[Mapping[str, Any]] = {}
    """Fixed fields of the family's blocks."""
    block_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of the family's record that are copied to each block."""
    decoder_fixed: ClassVar[Mapping[str, Any]] = {}
    """Fixed fields of the family's decoder."""
    decoder_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of the family's record that are copied to the decoder."""
    router_fixed: ClassVar[Mapping[str, Any]] = {}
    """Fixed fields of the family's router."""
    router_kinds: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Further fields of the router by the value of ``weights``, in families that have it."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if "family" in cls.model_fields and "model_type" not in vars(cls):
            cls.model_type = cls.model_fields["family"].default

    @property
    def effective_router(self) -> Router:
        """The router of the MoE layers: ``router`` if given, otherwise the family's.

        By default a family's router takes a softmax over all experts, then the top-k.
        """
        sizes = {"experts": self.shape.experts, "top_k": self.shape.top_k}
        if self.router is not None:
            return self.router.model_copy(update=sizes)
        own = {name: getattr(self, name) for name in self.router_fields}
        own |= self.router_kinds.get(getattr(self, "weights", ""), {})
        return Router(**sizes, **self.router_fixed, **own)

    def blocks(self) -> Sequence[Block]:
        """Return all blocks in order: dense if ``shape`` says so, else with experts."""
        own = {name: getattr(self, name) for name in self.attention_fields}
        dense = Dense(width=self.shape.resolved_dense_width)
        sparse = self.moe()
        unique: dict[tuple[Record, bool], Block] = {}
        blocks: list[Block] = []
        rope = self.rope if self.has_rope else None
        for layer in range(self.shape.layers):
            attention = self.shape.attention(layer, rope, {**self.attention_fixed, **own})
            key = attention, layer in self.shape.dense
            if key not in unique:
                unique[key] = self.block(attention, dense if key[1] else sparse)
            blocks.append(unique[key])
        return blocks

    def block(self, attention: Record, ffn: Record, **own: Any) -> Block:
        """Return a block of an attention and a feed-forward; ``own`` are fields of subclasses."""
        fields = {name: getattr(self, name) for name in self.block_fields}
        return Block(attention=attention, ffn=ffn, **self.block_fixed, **fields, **own)

    @classmethod
    def read(cls, config: ConfigReader) -> dict[str, Any]:
        """Read the family's fields of a ``config.json``; return values for its record.

        Values for ``shape`` are in a nested dict.
        """
        values: dict[str, Any] = {"shape": {}}
        for field in cls.fields:
            for path, value in field.read(config).items():
                *outer, name = path.split(".")
                (values["shape"] if outer else values)[name] = value
        return values

    def write(self) -> dict[str, Any]:
        """Return the family's fields of ``config.json``."""
        return {name: value for f in self.fields for name, value in f.write(self).items()}

    def ignore_reason(self, name: str) -> str | None:
        """Return why a tensor on disk may be ignored; None if it may not."""
        if _ROTARY.search(name):
            return "rotary frequencies, which are recomputed"
        if _MULTI_TOKEN.match(name):
            return "layers for multi-token prediction"
        layer = _LAYER.match(name)
        layers = self.shape.layers + len(getattr(self, "multi_token", ()))
        return self.extra_layers if layer and int(layer[1]) >= layers else None

    @classmethod
    def copies(cls, decoder: Decoder) -> Mapping[str, tuple[str, ...]]:
        """Return the names of redundant copies of parameters on disk, by parameter."""
        return {}

    @classmethod
    def guess(cls, decoder: Decoder) -> Self:
        """Infer the record from a decoder's blocks, without checking that it describes them."""
        moe = first_moe(decoder)
        attention = decoder.blocks[0].attention
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
        return cls(shape=shape, **own, **fields)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ParsedConfig:
        """Read a Hugging Face ``config.json``.

        Raises:
            ValueError: naming every field that is unknown, missing or not supported.
        """
        names = cls.architecture, *cls.other_architectures
        reader = ConfigReader(config, names, cls.model_type, cls.renamed_fields, cls.field_defaults)
        fields = {
            "norm_epsilon": reader.get(cls.epsilon_field, float),
            "tied": reader.get(
                "tie_word_embeddings", bool, cls.field_defaults.get("tie_word_embeddings", False)
            ),
            "init_std": reader.get("initializer_range", float, 0.02),
            "context": reader.get("max_position_embeddings", int, None),
        }
        values = cls.read(reader)
        record = cls.model_fields["shape"].annotation
        assert isinstance(record, type) and issubclass(record, FamilySizes)
        needed = {*required(record)} - values["shape"].keys()
        sizes = {
            name: reader.get(hf_name, int)
            for hf_name, name in cls.hf_sizes.items()
            if name in needed or not reader.is_null(hf_name)
        }
        reader.ignore(*cls.hf_sizes)
        tokens = reader.special_tokens()
        block = reader.fp8_block()
        reader.finish()
        model = cls(**(fields | values | {"shape": sizes | values["shape"]}))
        raise_violations((v.under("shape") for v in model.shape.rules()), "config.json: ")
        raise_violations(model.rules(), "config.json: ")
        for field in cls.fields:
            field.check(reader, model)
        reader.raise_problems()
        decoder = model.describe(model.shape.vocab or 2)
        left_out = tuple(reader.left_out)
        return ParsedConfig(model, decoder, tokens, tuple(reader.notes), block, left_out=left_out)

    @classmethod
    def of(cls, decoder: Decoder) -> Self:
        """Return the record whose description is ``decoder``.

        ``init_out_scale`` is not compared, as it has no effect on a trained model.

        Raises:
            ValueError: naming each part of the decoder that differs from the family.
        """
        try:
            record = cls.guess(decoder)
        except (AttributeError, StopIteration, ValidationError):
            raise ValueError(f"{cls.model_type}: has other kinds of layers") from None
        expected = _to_dict(record.describe(decoder.vocab))
        differences = list(_differences(_to_dict(decoder), expected, ""))
        if differences:
            raise ValueError(f"{cls.model_type}: " + "; ".join(differences[:8]))
        return record

    @classmethod
    def to_hf(cls, decoder: Decoder) -> dict[str, Any]:
        """Return the ``config.json`` of a decoder of this family.

        Raises:
            ValueError: if the decoder is not of this family.
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
            **{hf_name: getattr(model.shape, name) for hf_name, name in cls.hf_sizes.items()},
            **model.write(),
        }
        return {cls.renamed_fields.get(name, name): value for name, value in fields.items()}

    def describe(self, vocab: int) -> Decoder:
        """Expand the record into a decoder, for a tokenizer of ``vocab`` tokens.

        Raises:
            ValueError: if ``shape.vocab`` is less than ``vocab``.
        """
        raise_violations(self.violations(vocab))
        return Decoder(
            vocab=self.shape.vocab or vocab,
            hidden=self.shape.hidden,
            stacks=to_stacks(self.blocks()),
            norm_epsilon=self.norm_epsilon,
            tied=self.tied,
            init_std=self.init_std,
            context=self.context,
            family=self.model_type,
            **self.decoder_fixed,
            **{name: getattr(self, name) for name in self.decoder_fields},
        )

    def violations(self, vocab: int) -> Iterator[Violation]:
        """Yield values that do not fit a tokenizer of ``vocab`` tokens."""
        yield from vocab_violations(("shape", "vocab"), self.shape.vocab, vocab)

    def moe(self, **own: Any) -> Moe:
        """Return the MoE record; ``own`` are fields that subclasses add."""
        if width := self.shape.resolved_shared_width:
            own = {"shared": Shared(width=width, gate=self.shared_gate)} | own
        own = {**self.moe_fixed, **{name: getattr(self, name) for name in self.moe_fields}, **own}
        return Moe(
            width=self.shape.expert_width,
            router=self.effective_router,
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
    """Paths in the family's record, by paths in violations of the family's router."""
    router_fields: ClassVar[tuple[str, ...]] = ()
    """Fields of the family's record that are copied to the family's router."""

    def rules(self) -> Iterator[Violation]:
        """Check router (with paths of this record), balance, router settings and rotary layout."""
        router = self.effective_router
        # Fixed fields of the family's router, which a run file cannot change.
        fixed = [(n,) for n in ("order", "renormalise") if n not in self.router_fields]
        for violation in router.rules():
            if self.router is None and violation.path in fixed:
                size = "experts" if self.shape.experts == 1 else "top_k"
                yield Violation(("shape", size), 1, violation.rule, 2)
            elif self.router is None or violation.path == ("top_k",):
                path = self.router_paths.get(violation.path, violation.path)
                yield Violation(path, violation.value, violation.rule, violation.nearest)
            else:
                yield violation.under("router")
        yield from self._unused_settings()
        yield from balance_rules(self.balance, router.selection_bias)
        if not self.has_rope and self.rope != Rope():
            rule = f"must be left out: {self.model_type} has no rotary positions"
            yield Violation(("rope",), self.rope, rule, Rope())
        if self.fixed_rope is not None and self.rope.layout != self.fixed_rope:
            rule = f"must be {self.fixed_rope}, the rotary layout of {self.model_type}"
            yield Violation(("rope", "layout"), self.rope.layout, rule, self.fixed_rope)
        partial = any(isinstance(f, Rotary) and f.fraction is not None for f in self.fields)
        if self.rope.fraction != 1 and not partial:
            rule = f"must be 1: {self.model_type} rotates all dims of a head"
            yield Violation(("rope", "fraction"), self.rope.fraction, rule, 1.0)
        elif self.rope.fraction != 1 and isinstance(self.shape, GqaSizes):
            yield from self.rope.fits(self.shape.resolved_head_dim)
        if not self.scales_softmax and self.rope.yarn and self.rope.yarn.mscale_all_dim:
            rule = f"must be 0: {self.model_type} does not scale the softmax"
            yield Violation(
                ("rope", "yarn", "mscale_all_dim"), self.rope.yarn.mscale_all_dim, rule, 0.0
            )

    def _unused_settings(self) -> Iterator[Violation]:
        """Yield settings that have no effect because ``router`` replaces the family's."""
        if self.router is None:
            return
        for name in ("experts", "top_k"):
            if value := getattr(self.router, name):
                yield Violation(("router", name), value, f"must be 0: shape.{name} sets it", 0)
        for name in self.router_fields:
            value = getattr(self, name)
            default = type(self).model_fields[name].default
            if value != default:
                rule = "must be left out if router is given; set it under router instead"
                yield Violation((name,), value, rule, default)


def vocab_violations(path: FieldPath, rows: int | None, vocab: int) -> Iterator[Violation]:
    """Yield a violation if an embedding of ``rows`` rows is smaller than the vocabulary."""
    if rows is not None and rows < vocab:
        yield Violation(
            path, rows, f"must be at least the tokenizer's number of tokens, {vocab}", vocab
        )


def raise_violations(violations: Iterable[Violation], prefix: str = "model.") -> None:
    """Raise ``ValueError`` with all violations, if there are any."""
    messages = []
    for violation in violations:
        path = prefix + dotted(violation.path)
        messages.append(f"{path} is {violation.value!r}: {violation.rule}")
    if messages:
        raise ValueError("; ".join(messages))


def balance_rules(balance: Sequence[Record], selection_bias: bool) -> Iterator[Violation]:
    """Yield a violation for each term that occurs twice, or moves a bias the router lacks."""
    seen: list[Record] = []
    taken = list(balance)
    for i, term in enumerate(balance):
        rule = ""
        if isinstance(term, Bias) and not selection_bias:
            rule = "needs a router with a selection bias, which this model does not have"
        elif any(_same_term(term, other) for other in seen):
            rule = "repeats an earlier entry of the list (same kind and over)"
        if rule:
            offers = (Aux(), Z(), Aux(over="sequence"), Aux(over="global_batch"))
            unused = (o for o in offers if not any(_same_term(o, t) for t in taken))
            nearest = next(unused, None)
            taken += [] if nearest is None else [nearest]
            yield Violation(("balance", i), term, rule, REMOVE if nearest is None else nearest)
        seen.append(term)


def _same_term(a: Record, b: Record) -> bool:
    return type(a) is type(b) and getattr(a, "over", None) == getattr(b, "over", None)


def _to_dict(decoder: Decoder) -> dict[str, Any]:
    """Return a decoder as plain data, with all blocks but without ``family`` and initialisation."""
    plain = decoder.model_dump(exclude={"stacks", "init_out_scale", "family"})
    return plain | {"layers": [b.model_dump() for b in decoder.blocks]}


def _differences(a: Any, b: Any, path: str) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted({*a, *b}):
            yield from _differences(a.get(key), b.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, items in enumerate(zip(a, b, strict=True)):
            yield from _differences(*items, f"{path}[{i}]")
    elif a != b:
        yield f"{path} is {a!r}, expected {b!r}"
