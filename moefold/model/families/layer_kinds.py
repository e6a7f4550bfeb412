"""Fields of ``config.json`` for the kind of each layer: dense or MoE, full attention or not."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moefold.layers.config import Rope, Temperature
from moefold.model.families.fields import ConfigField, FieldValue, Rotary, Values
from moefold.model.families.hub import REQUIRED, ConfigReader, read_rope, rope_fields

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
_SLIDING_THETA = "swa_rope_theta"
IsFull = Callable[[ConfigReader, int], bool]
"""A function that returns whether a layer has full attention."""
_START = "moe_layer_start_index"
_END = "moe_layer_end_index"
_STEP = "moe_layer_interval"


def read_kinds(config: ConfigReader, name: str, kinds: tuple[str, str], default: Any) -> list[str]:
    """Read the kind of each layer, one of two."""
    layers = config.get("num_hidden_layers", int)
    values = config.get(name, list, default)
    if len(values) != layers or not all(value in kinds for value in values):
        choice = " or ".join(kinds)
        config.add_problem(f"{name} must be {choice} for each of {layers} layers")
    return values


def read_mixer_kinds(config: ConfigReader, other: str, full: IsFull | None) -> list[str]:
    """Read ``layer_types``; by default ``full`` decides which layers have full attention."""
    default: Any = REQUIRED
    if full is not None and not config.is_set("layer_types"):
        layers = range(config.get("num_hidden_layers", int))
        default = [FULL if full(config, n) else other for n in layers]
    return read_kinds(config, "layer_types", (FULL, other), default)


def layer_numbers(kinds: list[str], kind: str) -> tuple[int, ...]:
    """Return the numbers of the layers of a kind."""
    return tuple(n for n, of_layer in enumerate(kinds) if of_layer == kind)


@dataclass(frozen=True)
class DenseKinds(ConfigField):
    """``mlp_layer_types``: ``dense`` or ``sparse`` per layer; default: the first are dense."""

    first: int = 1
    count_field: str | None = None
    """Field with the number of dense layers, if ``mlp_layer_types`` is absent."""

    def read(self, config: ConfigReader) -> Values:
        layers = config.get("num_hidden_layers", int)
        first = config.get(self.count_field, int, self.first) if self.count_field else self.first
        default = ["dense"] * first + ["sparse"] * (layers - first)
        kinds = read_kinds(config, "mlp_layer_types", ("dense", "sparse"), default[:layers])
        return {"shape.dense_layers": layer_numbers(kinds, "dense")}

    def write(self, model: Any) -> Mapping[str, Any]:
        dense = model.shape.dense
        layers = range(model.shape.layers)
        return {"mlp_layer_types": ["dense" if n in dense else "sparse" for n in layers]}


class DenseSteps(ConfigField):
    """``mlp_only_layers`` and ``decoder_sparse_step``, which determine the layers with experts."""

    def read(self, config: ConfigReader) -> Values:
        step = config.get_interval("decoder_sparse_step", 1)
        listed = config.get("mlp_only_layers", list, [])
        layers = range(config.get("num_hidden_layers", int))
        dense = tuple(n for n in layers if n in listed or (n + 1) % step)
        return {"shape.dense_layers": dense}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the list, with a step of 1, which adds no layers."""
        return {"decoder_sparse_step": 1, "mlp_only_layers": list(model.shape.dense_layers)}


class ExpertLayers(ConfigField):
    """First and last layer with experts, and the step between them (ERNIE 4.5)."""

    def read(self, config: ConfigReader) -> Values:
        layers = config.get("num_hidden_layers", int)
        step = config.get_interval(_STEP, 1)
        start = config.get(_START, int, 1)
        end = config.get(_END, int, -1)
        sparse = self.sparse(start, layers - 1 if end == -1 else end, step, layers)
        return {"shape.dense_layers": tuple(n for n in range(layers) if n not in sparse)}

    @staticmethod
    def sparse(start: int, end: int, step: int, layers: int) -> list[int]:
        """Return the numbers of the layers with experts."""
        return [n for n in range(layers) if start <= n <= end and (n + 1) % step == 0]

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return first, last and step.

        Raises:
            ValueError: if the layers with experts are not such a sequence.
        """
        layers = model.shape.layers
        sparse = [n for n in range(layers) if n not in model.shape.dense]
        for step in range(1, layers + 1):
            if self.sparse(sparse[0], sparse[-1], step, layers) == sparse:
                return {_START: sparse[0], _END: sparse[-1], _STEP: step}
        raise ValueError(f"layers with experts are {sparse}; supported: every n-th in a range")


@dataclass(frozen=True)
class MixerKinds(ConfigField):
    """``layer_types``: full attention or another mixer for each layer."""

    other: str = "conv"
    full: IsFull | None = None
    """Determines the full layers if ``layer_types`` is absent."""

    def read(self, config: ConfigReader) -> Values:
        """Read the numbers of the layers with attention."""
        kinds = read_mixer_kinds(config, self.other, self.full)
        if FULL not in kinds:
            config.add_problem(f"layer_types must contain {FULL}")
        return {"shape.full_layers": layer_numbers(kinds, FULL)}

    def write(self, model: Any) -> Mapping[str, Any]:
        full = model.shape.full_layers
        layers = range(model.shape.layers)
        return {"layer_types": [FULL if n in full else self.other for n in layers]}


@dataclass(frozen=True)
class RecordSizes(ConfigField):
    """Sizes in a record nested in ``shape``, such as those of delta nets."""

    fields: Mapping[str, tuple[str, int | None]]
    """Field of ``config.json`` and default, by name of the size in the record."""
    part: str = "linear"
    """Name of the record in ``shape``."""

    def read(self, config: ConfigReader) -> Values:
        sizes = {size: config.get(f, int, default) for size, (f, default) in self.fields.items()}
        return {f"shape.{self.part}": sizes}

    def write(self, model: Any) -> Mapping[str, Any]:
        record = getattr(model.shape, self.part)
        return {field: getattr(record, size) for size, (field, _) in self.fields.items()}


KIMI = {
    "heads": ("num_heads", "linear_num_heads", 32),
    "head_dim": ("head_dim", "linear_head_dim", 128),
    "taps": ("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
}


class KimiDeltaNets(ConfigField):
    """Sizes of Kimi's delta nets, in ``linear_attn_config`` or in separate fields."""

    def read(self, config: ConfigReader) -> Values:
        """Read the sizes; check the lists of layers (from 1), which ``kimi_full`` reads."""
        inner = ConfigReader(config.get("linear_attn_config", dict, {}))
        full, other = LAYER_LISTS
        layers = [n for part in LAYER_LISTS for n in inner.get(part, list, [])]
        numbers = list(range(1, config.get("num_hidden_layers", int) + 1))
        if layers and sorted(map(repr, layers)) != sorted(map(repr, numbers)):
            inner.add_problem(f"{full} and {other} must list each of {len(numbers)} layers once")
        sizes = {
            size: inner.get(short, int, config.get(long, int, default))
            for size, (short, long, default) in KIMI.items()
        }
        try:
            inner.finish()
        except ValueError as error:
            config.add_problem(f"linear_attn_config: {str(error).removeprefix('config.json: ')}")
        return {"shape.linear": sizes}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the fields as in released folders."""
        shape = model.shape
        sizes = {short: getattr(shape.linear, size) for size, (short, *_) in KIMI.items()}
        full = [n + 1 for n in shape.full_layers]
        other = [n + 1 for n in range(shape.layers) if n not in shape.full_layers]
        heads = {"num_heads": shape.linear.heads or shape.heads}
        lists = dict(zip(LAYER_LISTS, (full, other), strict=True))
        return {"linear_attn_config": sizes | heads | lists}


LAYER_LISTS = "full_attn_layers", "kda_layers"


def kimi_full(config: ConfigReader, layer: int) -> bool:
    """Return whether a layer has full attention, by ``linear_attn_config`` or Kimi's default."""
    listed = config.get("linear_attn_config", dict, {}).get(LAYER_LISTS[0])
    if listed is None:
        return layer > 0 and layer % 4 == 0
    return layer + 1 in listed


class LingDeltaNets(ConfigField):
    """Sizes of Ling's delta nets, and the bound on their decays."""

    def read(self, config: ConfigReader) -> Values:
        """Read sizes and bound; ``head_dim`` is the default of their dims."""
        dim = config.get("head_dim", int, 128)
        bound = config.get("kda_lower_bound", float, -5.0)
        bounded = config.get("kda_safe_gate", bool, True)
        sizes = {
            "head_dim": config.get("linear_head_dim", int, dim),
            "taps": config.get("linear_conv_kernel_dim", int, 4),
            "decay_floor": bound if bounded else None,
        }
        return {"shape.linear": sizes}

    def write(self, model: Any) -> Mapping[str, Any]:
        net = model.shape.linear
        bounded = net.decay_floor is not None
        dim = net.head_dim
        gate = {"kda_safe_gate": bounded, "kda_lower_bound": net.decay_floor or -5.0}
        return gate | {"head_dim": dim, "linear_head_dim": dim, "linear_conv_kernel_dim": net.taps}


class ExpertList(ConfigField):
    """``moe_layers``, those with experts; by default every ``interleave_moe_layer_step``-th."""

    def read(self, config: ConfigReader) -> Values:
        layers = config.get("num_hidden_layers", int)
        step = config.get_interval("interleave_moe_layer_step", 1)
        sparse = config.get("moe_layers", list, list(range(step - 1, layers, step)))
        return {"shape.dense_layers": tuple(n for n in range(layers) if n not in sparse)}

    def write(self, model: Any) -> Mapping[str, Any]:
        layers = range(model.shape.layers)
        dense = model.shape.dense
        return {"moe_layers": [n for n in layers if n not in dense]}


class ChunkKinds(ConfigField):
    """Chunk length, and full layers with a temperature and without positions (Llama 4)."""

    def read(self, config: ConfigReader) -> Values:
        """Read chunk length, numbers of full layers, norms and temperature."""
        layers = config.get("num_hidden_layers", int)
        step = config.get_interval("no_rope_layer_interval", 4)
        default = [int((n + 1) % step != 0) for n in range(layers)]
        has_rope = config.get("no_rope_layers", list, default) or default
        if len(has_rope) < layers:
            config.add_problem(f"no_rope_layers has {len(has_rope)} entries for {layers} layers")
        kinds = [CHUNKED if rope else FULL for rope in has_rope[:layers]]
        if config.get("layer_types", list, kinds) != kinds:
            rule = f"{CHUNKED} where no_rope_layers is 1, and {FULL} where it is 0"
            config.add_problem(f"layer_types must be {rule}")
        full = layer_numbers(kinds, FULL)
        interval = config.get("floor_scale", int, 8192)
        scale = config.get("attn_scale", float, 0.1)
        tuned = config.get("attn_temperature_tuning", bool, True) and full and scale
        return {
            "shape.chunk": config.get("attention_chunk_size", int, 8192),
            "shape.full_layers": full,
            "shape.unit_norm": config.get("use_qk_norm", bool, True),
            "shape.temperature": Temperature(every=interval, scale=scale) if tuned else None,
        }

    def write(self, model: Any) -> Mapping[str, Any]:
        shape = model.shape
        tuned = model.shape.temperature
        has_rope = [int(n not in shape.full_layers) for n in range(shape.layers)]
        steps = {"floor_scale": tuned.every, "attn_scale": tuned.scale} if tuned else {}
        return steps | {
            "attention_chunk_size": shape.chunk,
            "no_rope_layers": has_rope,
            "layer_types": [CHUNKED if rope else FULL for rope in has_rope],
            "use_qk_norm": shape.unit_norm,
            "attn_temperature_tuning": tuned is not None,
        }


@dataclass(frozen=True)
class WindowKinds(ConfigField):
    """``sliding_window`` and ``layer_types``: full or sliding attention for each layer."""

    full: IsFull
    """Determines the full layers if ``layer_types`` is absent."""
    refuse_unused: bool = False
    """Whether a window without sliding layers is refused, as full layers depend on it."""
    unused_window: int | None = None
    """Value written if no layer is sliding, for classes that build the mask anyway."""

    def read(self, config: ConfigReader) -> Values:
        """Read window and numbers of full layers; neither if no layer is sliding."""
        window = config.get("sliding_window", int, None)
        kinds = read_mixer_kinds(config, SLIDING, self.full)
        if SLIDING not in kinds:
            if self.refuse_unused and window is not None:
                config.add_problem(f"sliding_window is given, but layer_types has no {SLIDING}")
            return {}
        if window is None:
            config.add_problem(f"sliding_window is missing, but layer_types has {SLIDING}")
        return {"shape.window": window, "shape.full_layers": layer_numbers(kinds, FULL)}

    def write(self, model: Any) -> Mapping[str, Any]:
        shape = model.shape
        full = range(shape.layers) if shape.window is None else shape.full_layers
        kinds = [FULL if n in full else SLIDING for n in range(shape.layers)]
        return {"sliding_window": shape.window or self.unused_window, "layer_types": kinds}


class RotaryByKind(Rotary):
    """``rope_parameters`` with separate values for full and sliding layers.

    The separate fields of released folders are the defaults.
    """

    def read(self, config: ConfigReader) -> Values:
        """Read both; those of sliding layers only if such layers exist and they differ."""
        config.ignore("rope_scaling")
        both = config.get("rope_parameters", dict, {})
        if not {FULL, SLIDING}.issuperset(both):
            config.add_problem(f"rope_parameters has keys other than {FULL} and {SLIDING}")
        context = {"max_position_embeddings": config.get("max_position_embeddings", int, None)}
        ropes: list[Rope] = []
        fraction = config.get("partial_rotary_factor", float, self.fraction)
        for kind, name, usual in (FULL, "rope_theta", self.theta), (SLIDING, _SLIDING_THETA, 1e4):
            inner = ConfigReader(context | {"rope_parameters": both.get(kind)})
            theta = config.get(name, float, usual)
            ropes.append(
                read_rope(inner, theta, scales_softmax=False, fraction=fraction, parameters={})
            )
            try:
                inner.raise_problems()
            except ValueError as error:
                config.add_problem(f"{kind}: {str(error).removeprefix('config.json: ')}")
        full, sliding = ropes
        kinds = config.get("layer_types", list, [SLIDING])
        differs = SLIDING in kinds and sliding != full
        return {"rope": full, "shape.window_rope": sliding if differs else None}

    def write(self, model: Any) -> Mapping[str, Any]:
        ropes = {FULL: model.rope, SLIDING: model.shape.window_rope or model.rope}
        written: dict[str, Any] = {}
        for kind, rope in ropes.items():
            plain = rope_fields(rope, model.context)
            own = {"rope_theta": rope.theta, "partial_rotary_factor": rope.fraction}
            written[kind] = (plain["rope_scaling"] or {"rope_type": "default"}) | own
        longest = rope_fields(model.rope, model.context)["max_position_embeddings"]
        return {"max_position_embeddings": longest, "rope_parameters": written}


def every_nth_full(field: str, default: int = 4) -> IsFull:
    """Return a function by which every n-th layer is full; ``field`` has n."""

    def full(config: ConfigReader, layer: int) -> bool:
        return (layer + 1) % config.get_interval(field, default) == 0

    return full


_PREFIX = "prefix_dense_sliding_window_pattern"
DENSE_ROPE = FieldValue(
    _PREFIX, "shape.dense_turn", int, 1, lambda n: n == 1, lambda has_rope: 1 if has_rope else 2
)
"""If 1, all dense layers have rotary positions; layer kinds determine the rest."""


def prefix_full(config: ConfigReader, layer: int) -> bool:
    """Return whether a layer is full; dense layers and others are counted separately."""
    first = config.get("first_k_dense_replace", int, 0)
    prefix = config.get_interval(_PREFIX, 1)
    step = config.get_interval("sliding_window_pattern", 4)
    if layer < first:
        return (layer + 1) % prefix == 0
    return (layer - first + 1) % step == 0


class WindowSwitch(ConfigField):
    """``use_sliding_window`` and ``max_window_layers``, which ``layer_types`` makes redundant."""

    def read(self, config: ConfigReader) -> Values:
        config.ignore("use_sliding_window", "max_window_layers")
        return {}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return whether there is a window."""
        return {"use_sliding_window": model.shape.window is not None}
