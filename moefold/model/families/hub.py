"""Reading and writing a Hugging Face ``config.json``, with every field accounted for.

A field is read, refused by name, or on a list of fields without effect here. Any other field is
refused, as it may change what the model computes.
"""

import re
from collections.abc import Mapping
from typing import Any

from moefold.layers.config import Bands, Rope, Yarn
from moefold.model.config import Decoder, MultiToken
from moefold.model.families.quantised import block_of, is_empty
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
_FIXED_VALUES: dict[str, tuple[Any, ...]] = {
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
_MARKS = re.compile(
    r"_?unsloth_.*|transformers\.js_config|_commit_hash|_flash_attn_2_enabled"
    r"|_attn_implementation_(autoset|internal)|axolotl_.*"
)
"""Names of fields in which tools say who wrote a folder, or how a program should load it."""
REQUIRED = object()
"""Default of a field that must be present."""


class ConfigReader:
    """Reads fields of a configuration, and collects all problems before it raises."""

    def __init__(
        self,
        config: Mapping[str, Any],
        architectures: tuple[str, ...] = (),
        model_type: str = "",
        renamed: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self.model_type = model_type
        self.notes: list[str] = []
        self.left_out: list[str] = []
        """Notes on fields that are not read."""
        self._problems: list[str] = []
        self._read: set[str] = set()
        self._architectures = architectures
        self._renamed = renamed or {}
        self._defaults = defaults or {}
        for usual, renamed_to in self._renamed.items():
            if {usual, renamed_to} <= config.keys():
                self.require_one_of(renamed_to, config[usual])

    def _actual_name(self, name: str) -> str:
        """Return the usual name of a field if present, otherwise the family's name for it."""
        return name if name in self.config else self._renamed.get(name, name)

    def get(self, name: str, kind: type, default: Any = REQUIRED) -> Any:
        """Return a field of type ``kind``; ``default`` if it is absent or null.

        If it is absent, a default of the family (``Family.field_defaults``) takes precedence. A
        field without a default is required. ``finish`` raises the problems.
        """
        usual = name
        name = self._actual_name(name)
        self._read.add(name)
        if name not in self.config and usual in self._defaults:
            return self._defaults[usual]
        value = self.config.get(name)
        if value is None:
            if default is REQUIRED:
                self._problems.append(f"{name} is missing")
                return _placeholder(kind)
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            self._problems.append(f"{name} is {value!r}, which is not of type {kind.__name__}")
            return _placeholder(kind) if default is REQUIRED else default
        return value

    def get_interval(self, name: str, default: int) -> int:
        """Return a field that is an interval of layers; values below 1 are refused."""
        interval = self.get(name, int, default)
        if interval < 1:
            self._problems.append(f"{name} is {interval}; must be at least 1")
        return max(1, interval)

    def is_set(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self.config.get(self._actual_name(name)) is not None

    def is_null(self, name: str) -> bool:
        """Whether the field is present and null."""
        name = self._actual_name(name)
        return name in self.config and self.config[name] is None

    def require_one_of(self, name: str, *allowed: Any) -> None:
        """Refuse the field if it is present with a value other than ``allowed``."""
        name = self._actual_name(name)
        self._read.add(name)
        value = self.config.get(name)
        # 0 is not False.
        fits = any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed)
        if name in self.config and not fits:
            listed = " or ".join(repr(a) for a in allowed)
            self._problems.append(f"{name} is {value!r}; supported: {listed}")

    def ignore(self, *names: str) -> None:
        """Accept fields that have no effect in this family."""
        self._read.update(map(self._actual_name, names))

    def add_problem(self, problem: str) -> None:
        """Add a problem, which :meth:`raise_problems` raises."""
        self._problems.append(problem)

    def fp8_block(self) -> tuple[int, int] | None:
        """Return rows and columns of FP8 blocks; None if the config states none."""
        name = "quantization_config"
        self._read.add(name)
        value = self.config.get(name)
        if is_empty(value):
            if value is not None:
                self.left_out.append(f"{name} in config.json states no quantisation")
            return None
        try:
            return block_of(value)
        except ValueError as error:
            self._problems.append(str(error))
            return None

    def special_tokens(self) -> dict[str, Any]:
        """Return the ids of special tokens, which only generation uses."""
        self._read.update(SPECIAL)
        return {n: self.config[n] for n in SPECIAL if self.config.get(n) is not None}

    def finish(self) -> None:
        """Check the fields of all families and refuse unread ones; raise if there are problems.

        Raises:
            ValueError: naming each field that is missing, malformed, unsupported or unknown.
        """
        for name, allowed in _FIXED_VALUES.items():
            if name not in self._read:
                self.require_one_of(name, *allowed)
        names = self.config.get("architectures")
        self._read.add("architectures")
        if names is not None and names not in [[name] for name in self._architectures]:
            known = " or ".join(self._architectures)
            self._problems.append(f"architectures is {names!r}; supported: {known}")
        if self.config.get("auto_map") is not None:
            self.notes.append("auto_map refers to Python code in the folder, which is never run")
        self._read.add("auto_map")
        if marks := sorted(filter(is_mark, self.config)):
            self.left_out.append(
                f"marks of tools in config.json without effect: {', '.join(marks)}"
            )
        self._read.update(marks)
        known_names = {*self._read, *_NO_EFFECT.split()}
        if unknown := sorted(name for name in self.config if name not in known_names):
            self._problems.append(
                f"unknown fields, which may change what the model computes: {', '.join(unknown)}"
            )
        self.raise_problems()

    def raise_problems(self) -> None:
        """Raise ``ValueError`` with the problems collected so far, if there are any."""
        if self._problems:
            raise ValueError("config.json: " + "; ".join(dict.fromkeys(self._problems)))


def is_mark(name: str) -> bool:
    """Return whether a field is one in which a tool says that it wrote or changed the folder."""
    return _MARKS.fullmatch(name) is not None


def _placeholder(kind: type) -> Any:
    """Return a placeholder value, so that reading can continue after a problem."""
    return kind() if kind in (list, dict) else kind(1)


def read_rope(
    config: ConfigReader,
    default_theta: float,
    *,
    scales_softmax: bool,
    fraction: float | None,
    parameters: Mapping[str, Any],
) -> Rope:
    """Read rotary positions from ``rope_theta`` and ``rope_scaling``, or ``rope_parameters``.

    Args:
        config: the configuration being read.
        default_theta: default of ``rope_theta``.
        scales_softmax: whether ``mscale_all_dim`` also scales the softmax.
        fraction: default fraction of a head's dims that are rotated; None requires all.
        parameters: default of ``rope_parameters`` if ``rope_scaling`` is absent too.
    """
    theta = config.get("rope_theta", float, default_theta)
    scaling = dict(
        config.get("rope_scaling", dict, {}) or config.get("rope_parameters", dict, parameters)
    )
    config.ignore("rope_parameters")
    inner = ConfigReader(scaling)
    inner.ignore("mrope_interleaved", "mrope_section")  # for images: text has one position
    theta = inner.get("rope_theta", float, theta)
    kind = inner.get("rope_type", str, inner.get("type", str, "default"))
    rotated = 1.0
    if fraction is None:
        inner.require_one_of("partial_rotary_factor", 1, 1.0, None)
    else:
        dims = config.get("rotary_dim", int, None)
        if dims and (head_dim := config.get("head_dim", int)):
            fraction = dims / head_dim
        default = config.get("partial_rotary_factor", float, fraction)
        rotated = inner.get("partial_rotary_factor", float, default)
    yarn = bands = None
    if kind == "yarn":
        yarn = _read_yarn(config, inner, scales_softmax)
    elif kind == "llama3":
        bands = Bands(
            factor=inner.get("factor", float),
            original_length=inner.get("original_max_position_embeddings", int),
            slow=inner.get("low_freq_factor", float),
            fast=inner.get("high_freq_factor", float),
        )
    elif kind != "default":
        inner.add_problem(f"rope_type is {kind!r}; supported: 'default', 'yarn' or 'llama3'")
    try:
        inner.finish()
    except ValueError as error:
        config.add_problem(f"rotary positions: {str(error).removeprefix('config.json: ')}")
        yarn = bands = None
    if any(bands.rules()) if bands else False:
        config.add_problem("rotary positions: high_freq_factor must be at least low_freq_factor")
        bands = None
    return Rope(theta=theta, yarn=yarn, bands=bands, fraction=rotated)


def _read_yarn(config: ConfigReader, inner: ConfigReader, scales_softmax: bool) -> Yarn:
    longest = config.get("max_position_embeddings", int, 0)
    original = inner.get("original_max_position_embeddings", int, longest or REQUIRED)
    original = config.get("original_max_position_embeddings", int, original)
    factor = inner.get("factor", float, max(1.0, longest / (original or 1)))
    mscale = inner.get("mscale", float, 0.0)
    mscale_all_dim = inner.get("mscale_all_dim", float, 0.0)
    magnitude = inner.get("attention_factor", float, None)
    # transformers ignores a lone mscale: it uses only the ratio of both.
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
        beta_fast=inner.get("beta_fast", float, 32.0) or 32.0,
        beta_slow=inner.get("beta_slow", float, 1.0) or 1.0,
        mscale=mscale if both and scales_softmax else 1.0,
        mscale_all_dim=mscale_all_dim if scales_softmax else 0.0,
        attention_factor=magnitude,
        truncate=inner.get("truncate", bool, True),
    )


def rope_fields(rope: Rope, context: int | None) -> dict[str, Any]:
    """Return the fields of rotary positions and context, in the form that all releases read."""
    yarn = rope.yarn
    bands = rope.bands
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


def export_notes(decoder: Decoder) -> list[str]:
    """Return notes on the parts of a decoder that a Hugging Face folder cannot express."""
    moes = [b.ffn for b in decoder.blocks if isinstance(b.ffn, Moe)]
    notes: list[str] = []
    if any(record != MultiToken() for record in decoder.multi_token):
        notes.append(
            "multi_token weight and reads are left out: config.json has no fields for them"
        )
    if any(m.capacity for m in moes):
        notes.append("capacity is left out: transformers drops no tokens")
    unwritten = [term for moe in moes for term in moe.balance if not isinstance(term, Aux)]
    kinds = {str(getattr(term, "kind", term)) for term in unwritten}
    notes += [f"balance term {kind} is left out: config.json has no field for it" for kind in kinds]
    if any(sum(isinstance(t, Aux) for t in m.balance) > 1 for m in moes):
        notes.append("only the first aux loss is written: config.json has one coefficient")
    return sorted(notes)
