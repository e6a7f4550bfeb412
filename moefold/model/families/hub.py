"""Reading and writing a Hugging Face ``config.json``, with every field accounted for.

A field is read, refused by name, or on a list of fields without effect here. Remaining fields are
refused, as an unread field may change what the model computes.
"""

from collections.abc import Mapping
from typing import Any

from moefold.layers.config import Bands, Rope, Yarn
from moefold.model.config import Decoder, MultiToken
from moefold.moe.config import Aux, Moe

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")

# Fields of all transformers configurations that affect how a model runs, not what it computes.
_NO_EFFECT = """
_name_or_path _attn_implementation _experts_implementation attn_implementation
chunk_size_feed_forward dtype experts_implementation finetuning_task id2label label2id
model_type num_labels output_attentions output_hidden_states output_router_logits prefix
problem_type return_dict task_specific_params tokenizer_class torch_dtype torchscript
transformers_version use_bfloat16 use_cache tf_legacy_loss pretraining_tp ep_size bad_words_ids
begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample early_stopping
encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups
num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty
return_dict_in_generate sep_token_id suppress_tokens temperature top_k top_p typical_p
"""
# Fields that, if present, must have one of these values in all families.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, 0.0, None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "partial_rotary_factor": (1, 1.0, None),
    "router_jitter_noise": (0, 0.0, None),
    "per_layer_config": (None,),
    "layer_types": (None,),
}
REQUIRED = object()
"""Default of a field that must be present."""


class ConfigReader:
    """Reads fields of a configuration, and collects all problems before it raises."""

    def __init__(
        self,
        config: Mapping[str, Any],
        architectures: tuple[str, ...] = (),
        model_type: str = "",
        respelled: Mapping[str, str] | None = None,
        unstated: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.model_type = model_type
        self.notes: list[str] = []
        self._problems: list[str] = []
        self._read: set[str] = set()
        self._architectures = architectures
        self._respelled = respelled or {}
        self._unstated = unstated or {}
        for usual, own in self._respelled.items():
            if {usual, own} <= config.keys():
                self.only(own, config[usual])

    def _there(self, name: str) -> str:
        """Return the usual name of a field if present, otherwise the family's name for it."""
        return name if name in self.config else self._respelled.get(name, name)

    def take(self, name: str, kind: type, default: Any = REQUIRED) -> Any:
        """Return a field of type ``kind``; ``default`` if it is absent or null.

        If it is absent, a default of the family (``Family.unstated``) takes precedence. A field
        without default is required. Problems are collected for ``finish``.
        """
        usual, name = name, self._there(name)
        self._read.add(name)
        if name not in self.config and usual in self._unstated:
            return self._unstated[usual]
        value = self.config.get(name)
        if value is None:
            if default is REQUIRED:
                self._problems.append(f"{name} is missing")
                return _stand_in(kind)
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            self._problems.append(f"{name} is {value!r}, which is not of type {kind.__name__}")
            return _stand_in(kind) if default is REQUIRED else default
        return value

    def step(self, name: str, default: int) -> int:
        """Return a field that is an interval of layers; less than 1 is refused."""
        found = self.take(name, int, default)
        if found < 1:
            self._problems.append(f"{name} is {found}; must be at least 1")
        return max(1, found)

    def present(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self.config.get(self._there(name)) is not None

    def null(self, name: str) -> bool:
        """Whether the field is present and null."""
        name = self._there(name)
        return name in self.config and self.config[name] is None

    def only(self, name: str, *allowed: Any) -> None:
        """Refuse the field if it is present with another value."""
        name = self._there(name)
        self._read.add(name)
        value = self.config.get(name)
        # 0 is not False.
        fits = any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed)
        if name in self.config and not fits:
            listed = " or ".join(repr(a) for a in allowed)
            self._problems.append(f"{name} is {value!r}; supported: {listed}")

    def skip(self, *names: str) -> None:
        """Accept fields that have no effect in this family."""
        self._read.update(map(self._there, names))

    def refuse(self, problem: str) -> None:
        """Add a problem."""
        self._problems.append(problem)

    def quantised(self) -> tuple[int, int] | None:
        """Return rows and columns of FP8 blocks; None if weights are not stored as FP8.

        MXFP4 needs no size: its blocks are fixed, and tensors are identified by their names.
        """
        name = "quantization_config"
        self._read.add(name)
        found = self.config.get(name)
        if found is None:
            return None
        held = found if isinstance(found, dict) else {}
        method, block = held.get("quant_method"), held.get("weight_block_size")
        if method == "fp8" and isinstance(block, list) and [type(n) for n in block] == [int, int]:
            return block[0], block[1]
        if method == "mxfp4":
            return None
        self._problems.append(
            f"{name} has quant_method {method!r} and weight_block_size {block!r}; supported: "
            "'fp8' with two block sizes, or 'mxfp4'"
        )
        return None

    def special_tokens(self) -> dict[str, Any]:
        """Return the ids of special tokens, which only generation uses."""
        self._read.update(SPECIAL)
        return {n: self.config[n] for n in SPECIAL if self.config.get(n) is not None}

    def finish(self) -> None:
        """Check fields that all families have, and raise if there are any problems.

        Raises:
            ValueError: naming each field that is missing, malformed, unsupported or unknown.
        """
        for name, allowed in _ONLY.items():
            if name not in self._read:
                self.only(name, *allowed)
        names = self.config.get("architectures")
        self._read.add("architectures")
        if names is not None and names not in [[name] for name in self._architectures]:
            known = " or ".join(self._architectures)
            self._problems.append(f"architectures is {names!r}; supported: {known}")
        if self.config.get("auto_map") is not None:
            self.notes.append("auto_map refers to Python code in the folder, which is never run")
        self._read.add("auto_map")
        left = sorted(n for n in self.config if n not in self._read and n not in _NO_EFFECT.split())
        if left:
            self._problems.append(
                f"unknown fields, which may change what the model computes: {', '.join(left)}"
            )
        self.refuse_all()

    def refuse_all(self) -> None:
        """Raise ``ValueError`` with the problems found so far, if there are any."""
        if self._problems:
            raise ValueError("config.json: " + "; ".join(dict.fromkeys(self._problems)))


def _stand_in(kind: type) -> Any:
    """Return a placeholder with which reading continues after a problem."""
    return kind() if kind in (list, dict) else kind(1)


def read_rope(
    config: ConfigReader,
    default_theta: float,
    *,
    scales_softmax: bool,
    fraction: float | None,
    unstated: Mapping[str, Any],
) -> Rope:
    """Read rotary positions from ``rope_theta`` and ``rope_scaling``, or ``rope_parameters``.

    Args:
        config: the configuration being read.
        default_theta: default of ``rope_theta``.
        scales_softmax: whether ``mscale_all_dim`` also scales the softmax.
        fraction: default fraction of a head's dims that are rotated; None requires all.
        unstated: default of ``rope_parameters``, without ``rope_scaling``.
    """
    theta = config.take("rope_theta", float, default_theta)
    scaling = dict(
        config.take("rope_scaling", dict, {}) or config.take("rope_parameters", dict, unstated)
    )
    config.skip("rope_parameters")
    inner = ConfigReader(scaling)
    inner.skip("mrope_interleaved", "mrope_section")  # for images: text has one position
    theta = inner.take("rope_theta", float, theta)
    kind = inner.take("rope_type", str, inner.take("type", str, "default"))
    turning = 1.0
    if fraction is None:
        inner.only("partial_rotary_factor", 1, 1.0, None)
    else:
        dims = config.take("rotary_dim", int, None)
        if dims and (whole := config.take("head_dim", int)):
            fraction = dims / whole
        stated = config.take("partial_rotary_factor", float, fraction)
        turning = inner.take("partial_rotary_factor", float, stated)
    yarn = bands = None
    if kind == "yarn":
        yarn = _read_yarn(config, inner, scales_softmax)
    elif kind == "llama3":
        bands = Bands(
            factor=inner.take("factor", float),
            original_length=inner.take("original_max_position_embeddings", int),
            slow=inner.take("low_freq_factor", float),
            fast=inner.take("high_freq_factor", float),
        )
    elif kind != "default":
        inner.refuse(f"rope_type is {kind!r}; supported: 'default', 'yarn' or 'llama3'")
    try:
        inner.finish()
    except ValueError as error:
        config.refuse(f"rotary positions: {str(error).removeprefix('config.json: ')}")
        yarn = bands = None
    if any(bands.rules()) if bands else False:
        config.refuse("rotary positions: high_freq_factor must be at least low_freq_factor")
        bands = None
    return Rope(theta=theta, yarn=yarn, bands=bands, fraction=turning)


def _read_yarn(config: ConfigReader, inner: ConfigReader, scales_softmax: bool) -> Yarn:
    longest = config.take("max_position_embeddings", int, 0)
    original = inner.take("original_max_position_embeddings", int, longest or REQUIRED)
    original = config.take("original_max_position_embeddings", int, original)
    factor = inner.take("factor", float, max(1.0, longest / (original or 1)))
    mscale = inner.take("mscale", float, 0.0)
    mscale_all_dim = inner.take("mscale_all_dim", float, 0.0)
    magnitude = inner.take("attention_factor", float, None)
    # transformers ignores a lone mscale; it uses only the ratio of both.
    both = bool(mscale and mscale_all_dim)
    if both and magnitude is None and not scales_softmax:
        magnitude = Yarn(
            factor=factor, original_length=original, mscale=mscale, mscale_all_dim=mscale_all_dim
        ).magnitude
    if not both and magnitude is None and scales_softmax and mscale_all_dim:
        magnitude = Yarn(factor=factor, original_length=original).magnitude
    return Yarn(
        factor=factor,
        original_length=original,
        beta_fast=inner.take("beta_fast", float, 32.0) or 32.0,
        beta_slow=inner.take("beta_slow", float, 1.0) or 1.0,
        mscale=mscale if both and scales_softmax else 1.0,
        mscale_all_dim=mscale_all_dim if scales_softmax else 0.0,
        attention_factor=magnitude,
        truncate=inner.take("truncate", bool, True),
    )


def rope_fields(rope: Rope, context: int | None) -> dict[str, Any]:
    """Return fields of rotary positions and context, in the form that all releases read."""
    yarn, bands = rope.yarn, rope.bands
    longest = context or (round(yarn.factor * yarn.original_length) if yarn else 4096)
    fields = {"max_position_embeddings": longest, "rope_theta": rope.theta}
    scaling: dict[str, Any]
    if bands is not None:
        scaling = {"rope_type": "llama3", "low_freq_factor": bands.slow, "factor": bands.factor}
        scaling |= {"high_freq_factor": bands.fast}
        scaling |= {"original_max_position_embeddings": bands.original_length}
        return fields | {"rope_scaling": scaling}
    if yarn is None:
        return fields | {"rope_scaling": None}
    scaling = {
        "rope_type": "yarn",
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original_length,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "truncate": yarn.truncate,
    }
    if yarn.mscale_all_dim:
        scaling |= {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    # transformers derives the magnitude from both mscales, or from neither.
    derived = yarn.mscale > 0 if yarn.mscale_all_dim else yarn.mscale == 1.0
    if yarn.attention_factor is not None or not derived:
        scaling["attention_factor"] = yarn.magnitude
    return fields | {"rope_scaling": scaling}


def left_out(decoder: Decoder) -> list[str]:
    """Return descriptions of the parts of a decoder that a Hugging Face folder cannot express."""
    moes = [b.ffn for b in decoder.blocks if isinstance(b.ffn, Moe)]
    said: list[str] = []
    if any(one != MultiToken() for one in decoder.multi_token):
        said.append("multi_token weight and reads are left out: config.json has no fields for them")
    if any(m.capacity for m in moes):
        said.append("capacity is left out: transformers drops no tokens")
    kinds = {str(getattr(t, "kind", t)) for m in moes for t in m.balance if not isinstance(t, Aux)}
    said += [f"balance term {k} is left out: config.json has no field for it" for k in kinds]
    if any(sum(isinstance(t, Aux) for t in m.balance) > 1 for m in moes):
        said.append("only the first aux loss is written: config.json has one coefficient")
    return sorted(said)
