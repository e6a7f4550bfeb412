"""Fields of ``config.json`` for the kind of each layer: dense or MoE, full attention or other."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moefold.layers.config import Rope, Temperature
from moefold.model.families.fields import ConfigField, FieldValue, Rotary, Values
from moefold.model.families.hub import REQUIRED, ConfigReader, read_rope, rope_fields

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_SLIDING = "swa_rope_theta"
Full = Callable[[ConfigReader, int], bool]
"""A function that decides whether a layer has full attention."""
_START, _END, _STEP = "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"


def kinds_of(config: ConfigReader, name: str, both: tuple[str, str], usual: Any) -> list[str]:
    """Read the kind of each layer, one of two; ``usual`` is the default."""
    layers, (one, other) = config.take("num_hidden_layers", int), both
    kinds = config.take(name, list, usual)
    if len(kinds) != layers or not all(kind in both for kind in kinds):
        config.refuse(f"{name} must be {one} or {other} for each of {layers} layers")
    return kinds


def mixers_of(config: ConfigReader, other: str, full: Full | None) -> list[str]:
    """Read ``layer_types``; by default ``full`` decides which layers have full attention."""
    usual: Any = REQUIRED
    if full is not None and not config.present("layer_types"):
        layers = range(config.take("num_hidden_layers", int))
        usual = [FULL if full(config, n) else other for n in layers]
    return kinds_of(config, "layer_types", (FULL, other), usual)


def numbers(kinds: list[str], kind: str) -> tuple[int, ...]:
    """Return the numbers of the layers of a kind."""
    return tuple(n for n, one in enumerate(kinds) if one == kind)


@dataclass(frozen=True)
class DenseKinds(ConfigField):
    """``mlp_layer_types``: ``dense`` or ``sparse`` per layer; by default the first are dense."""

    first: int = 1
    stated: str | None = None
    """Field with the number of dense layers, if kinds are absent."""

    def read(self, config: ConfigReader) -> Values:
        """Read the numbers of the dense layers."""
        layers = config.take("num_hidden_layers", int)
        first = config.take(self.stated, int, self.first) if self.stated else self.first
        default = ["dense"] * first + ["sparse"] * (layers - first)
        kinds = kinds_of(config, "mlp_layer_types", ("dense", "sparse"), default[:layers])
        return {"shape.dense_layers": numbers(kinds, "dense")}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the list."""
        dense, layers = model.shape.dense, range(model.shape.layers)
        return {"mlp_layer_types": ["dense" if n in dense else "sparse" for n in layers]}


class DenseSteps(ConfigField):
    """``mlp_only_layers`` and ``decoder_sparse_step``, which determine the layers with experts."""

    def read(self, config: ConfigReader) -> Values:
        """Read the numbers of the dense layers."""
        step = config.step("decoder_sparse_step", 1)
        named = config.take("mlp_only_layers", list, [])
        layers = range(config.take("num_hidden_layers", int))
        return {"shape.dense_layers": tuple(n for n in layers if n in named or (n + 1) % step)}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the list, and a step of 1, which adds no layer to it."""
        return {"decoder_sparse_step": 1, "mlp_only_layers": list(model.shape.dense_layers)}


class ExpertLayers(ConfigField):
    """First and last layer with experts, and the step between such layers (ERNIE 4.5)."""

    def read(self, config: ConfigReader) -> Values:
        """Read the numbers of the dense layers."""
        layers, step = config.take("num_hidden_layers", int), config.step(_STEP, 1)
        start, end = config.take(_START, int, 1), config.take(_END, int, -1)
        sparse = self.sparse(start, layers - 1 if end == -1 else end, step, layers)
        return {"shape.dense_layers": tuple(n for n in range(layers) if n not in sparse)}

    @staticmethod
    def sparse(start: int, end: int, step: int, layers: int) -> list[int]:
        """Return the numbers of the layers with experts."""
        return [n for n in range(layers) if start <= n <= end and (n + 1) % step == 0]

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return first, last and step.

        Raises:
            ValueError: if the layers with experts are no such sequence.
        """
        layers = model.shape.layers
        wanted = [n for n in range(layers) if n not in model.shape.dense]
        for step in range(1, layers + 1):
            if self.sparse(wanted[0], wanted[-1], step, layers) == wanted:
                return {_START: wanted[0], _END: wanted[-1], _STEP: step}
        raise ValueError(f"layers with experts are {wanted}; supported: every n-th in a range")


@dataclass(frozen=True)
class ConvolvedKinds(ConfigField):
    """``layer_types``: full attention or another mixer for each layer."""

    other: str = "conv"
    full: Full | None = None
    """Decides whether a layer has full attention, if kinds are absent."""

    def read(self, config: ConfigReader) -> Values:
        """Read the numbers of the layers with attention."""
        kinds = mixers_of(config, self.other, self.full)
        if FULL not in kinds:
            config.refuse(f"layer_types must contain {FULL}")
        return {"shape.full_layers": numbers(kinds, FULL)}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the list."""
        full, layers = model.shape.full_layers, range(model.shape.layers)
        return {"layer_types": [FULL if n in full else self.other for n in layers]}


@dataclass(frozen=True)
class RecordSizes(ConfigField):
    """Sizes in a record within ``shape``, such as those of delta nets."""

    names: Mapping[str, tuple[str, int | None]]
    """Field of ``config.json`` and default, by our name of the size."""
    part: str = "linear"
    """Name of the record in ``shape``."""

    def read(self, config: ConfigReader) -> Values:
        """Read all sizes."""
        sizes = {ours: config.take(name, int, usual) for ours, (name, usual) in self.names.items()}
        return {f"shape.{self.part}": sizes}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return all sizes."""
        held = getattr(model.shape, self.part)
        return {name: getattr(held, ours) for ours, (name, _) in self.names.items()}


KIMI = {
    "heads": ("num_heads", "linear_num_heads", 32),
    "head_dim": ("head_dim", "linear_head_dim", 128),
    "taps": ("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
}


class NestedNets(ConfigField):
    """Sizes of Kimi's delta nets, in ``linear_attn_config`` or in separate fields."""

    def read(self, config: ConfigReader) -> Values:
        """Read the sizes, and check the lists of layers (from 1), which another entry reads."""
        inner = ConfigReader(config.take("linear_attn_config", dict, {}))
        layers = [n for part in LISTS for n in inner.take(part, list, [])]
        every = list(range(1, config.take("num_hidden_layers", int) + 1))
        if layers and sorted(map(repr, layers)) != sorted(map(repr, every)):
            inner.refuse(f"{LISTS[0]} and {LISTS[1]} must list each of {len(every)} layers once")
        sizes = {
            ours: inner.take(short, int, config.take(long, int, usual))
            for ours, (short, long, usual) in KIMI.items()
        }
        try:
            inner.finish()
        except ValueError as error:
            config.refuse(f"linear_attn_config: {str(error).removeprefix('config.json: ')}")
        return {"shape.linear": sizes}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the fields as in released folders."""
        shape = model.shape
        sizes = {short: getattr(shape.linear, ours) for ours, (short, *_) in KIMI.items()}
        full = [n + 1 for n in shape.full_layers]
        other = [n + 1 for n in range(shape.layers) if n not in shape.full_layers]
        heads = {"num_heads": shape.linear.heads or shape.heads}
        return {"linear_attn_config": sizes | heads | dict(zip(LISTS, (full, other), strict=True))}


LISTS = "full_attn_layers", "kda_layers"


def listed_full(config: ConfigReader, layer: int) -> bool:
    """Return whether a layer has full attention, by ``linear_attn_config`` or Kimi's default."""
    stated = config.take("linear_attn_config", dict, {}).get(LISTS[0])
    return layer > 0 and layer % 4 == 0 if stated is None else layer + 1 in stated


class BoundedNets(ConfigField):
    """Sizes of Ling's delta nets, and the bound of their decays."""

    def read(self, config: ConfigReader) -> Values:
        """Read sizes and bound; ``head_dim`` is the default of their dims."""
        dim = config.take("head_dim", int, 128)
        bound = config.take("kda_lower_bound", float, -5.0)
        bounded = config.take("kda_safe_gate", bool, True)
        sizes = {
            "head_dim": config.take("linear_head_dim", int, dim),
            "taps": config.take("linear_conv_kernel_dim", int, 4),
            "decay_floor": bound if bounded else None,
        }
        return {"shape.linear": sizes}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return sizes and bound."""
        net = model.shape.linear
        bounded, dim = net.decay_floor is not None, net.head_dim
        gate = {"kda_safe_gate": bounded, "kda_lower_bound": net.decay_floor or -5.0}
        return gate | {"head_dim": dim, "linear_head_dim": dim, "linear_conv_kernel_dim": net.taps}


class ExpertList(ConfigField):
    """``moe_layers``, the layers with experts; default: each ``interleave_moe_layer_step``-th."""

    def read(self, config: ConfigReader) -> Values:
        """Read the numbers of the dense layers."""
        layers = config.take("num_hidden_layers", int)
        step = config.step("interleave_moe_layer_step", 1)
        sparse = config.take("moe_layers", list, list(range(step - 1, layers, step)))
        return {"shape.dense_layers": tuple(n for n in range(layers) if n not in sparse)}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return the list."""
        layers, dense = range(model.shape.layers), model.shape.dense
        return {"moe_layers": [n for n in layers if n not in dense]}


class ChunkKinds(ConfigField):
    """Chunk length, and full layers, which have a temperature and no positions (Llama 4)."""

    def read(self, config: ConfigReader) -> Values:
        """Read chunk length, numbers of full layers, norms and temperature."""
        layers = config.take("num_hidden_layers", int)
        step = config.step("no_rope_layer_interval", 4)
        usual = [int((n + 1) % step != 0) for n in range(layers)]
        turns = config.take("no_rope_layers", list, usual) or usual
        if len(turns) < layers:
            config.refuse(f"no_rope_layers has {len(turns)} entries for {layers} layers")
        kinds = [CHUNKED if turn else FULL for turn in turns[:layers]]
        if config.take("layer_types", list, kinds) != kinds:
            rule = f"{CHUNKED} where no_rope_layers is 1, and {FULL} where it is 0"
            config.refuse(f"layer_types must be {rule}")
        full = numbers(kinds, FULL)
        every = config.take("floor_scale", int, 8192)
        scale = config.take("attn_scale", float, 0.1)
        tuned = config.take("attn_temperature_tuning", bool, True) and full and scale
        return {
            "shape.chunk": config.take("attention_chunk_size", int, 8192),
            "shape.full_layers": full,
            "shape.unit_norm": config.take("use_qk_norm", bool, True),
            "shape.temperature": Temperature(every=every, scale=scale) if tuned else None,
        }

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return all fields."""
        shape, tuned = model.shape, model.shape.temperature
        turns = [int(n not in shape.full_layers) for n in range(shape.layers)]
        steps = {"floor_scale": tuned.every, "attn_scale": tuned.scale} if tuned else {}
        return steps | {
            "attention_chunk_size": shape.chunk,
            "no_rope_layers": turns,
            "layer_types": [CHUNKED if turn else FULL for turn in turns],
            "use_qk_norm": shape.unit_norm,
            "attn_temperature_tuning": tuned is not None,
        }


@dataclass(frozen=True)
class WindowKinds(ConfigField):
    """``sliding_window`` and ``layer_types``: full or sliding attention for each layer."""

    full: Full
    """Decides whether a layer has full attention, if kinds are absent."""
    some: bool = False
    """Whether a window without sliding layers is refused, as full layers depend on it."""
    idle: int | None = None
    """What is written if no layer is sliding, for a class that builds the mask all the same."""

    def read(self, config: ConfigReader) -> Values:
        """Read window and numbers of full layers; neither if no layer is sliding."""
        window = config.take("sliding_window", int, None)
        kinds = mixers_of(config, SLIDING, self.full)
        if SLIDING not in kinds:
            if self.some and window is not None:
                config.refuse(f"sliding_window is given, but layer_types has no {SLIDING}")
            return {}
        if window is None:
            config.refuse(f"sliding_window is missing, but layer_types has {SLIDING}")
        return {"shape.window": window, "shape.full_layers": numbers(kinds, FULL)}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return both fields."""
        shape = model.shape
        full = range(shape.layers) if shape.window is None else shape.full_layers
        kinds = [FULL if n in full else SLIDING for n in range(shape.layers)]
        return {"sliding_window": shape.window or self.idle, "layer_types": kinds}


class KindRotary(Rotary):
    """``rope_parameters`` with separate values for full and sliding layers, by kind.

    Defaults are the separate fields of released folders.
    """

    def read(self, config: ConfigReader) -> Values:
        """Read both; those of sliding layers only if there are any and they differ."""
        config.skip("rope_scaling")
        both = config.take("rope_parameters", dict, {})
        if not {FULL, SLIDING}.issuperset(both):
            config.refuse(f"rope_parameters has keys other than {FULL} and {SLIDING}")
        context = {"max_position_embeddings": config.take("max_position_embeddings", int, None)}
        found: list[Rope] = []
        fraction = config.take("partial_rotary_factor", float, self.fraction)
        for kind, name, usual in ((FULL, "rope_theta", self.theta), (SLIDING, _SLIDING, 1e4)):
            inner = ConfigReader(context | {"rope_parameters": both.get(kind)})
            theta = config.take(name, float, usual)
            found.append(
                read_rope(inner, theta, scales_softmax=False, fraction=fraction, unstated={})
            )
            try:
                inner.refuse_all()
            except ValueError as error:
                config.refuse(f"{kind}: {str(error).removeprefix('config.json: ')}")
        full, sliding = found
        kinds = config.take("layer_types", list, [SLIDING])
        differs = SLIDING in kinds and sliding != full
        return {"rope": full, "shape.window_rope": sliding if differs else None}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return both in ``rope_parameters``."""
        ropes = {FULL: model.rope, SLIDING: model.shape.window_rope or model.rope}
        written: dict[str, Any] = {}
        for kind, rope in ropes.items():
            plain = rope_fields(rope, model.context)
            own = {"rope_theta": rope.theta, "partial_rotary_factor": rope.fraction}
            written[kind] = (plain["rope_scaling"] or {"rope_type": "default"}) | own
        longest = rope_fields(model.rope, model.context)["max_position_embeddings"]
        return {"max_position_embeddings": longest, "rope_parameters": written}


def every_full(stated: str, usual: int = 4) -> Full:
    """Return a function by which every n-th layer is full, where field ``stated`` is n."""

    def full(config: ConfigReader, layer: int) -> bool:
        return (layer + 1) % config.step(stated, usual) == 0

    return full


_PREFIX = "prefix_dense_sliding_window_pattern"
DENSE_TURN = FieldValue(
    _PREFIX, "shape.dense_turn", int, 1, lambda n: n == 1, lambda turns: 1 if turns else 2
)
"""With 1 all dense layers have positions; kinds of layers determine the rest."""


def prefix_full(config: ConfigReader, layer: int) -> bool:
    """Return whether a layer is full; dense layers and others are counted separately."""
    first = config.take("first_k_dense_replace", int, 0)
    prefix = config.step(_PREFIX, 1)
    step = config.step("sliding_window_pattern", 4)
    return (layer + 1) % prefix == 0 if layer < first else (layer - first + 1) % step == 0


class WindowSwitch(ConfigField):
    """``use_sliding_window`` and ``max_window_layers``, which kinds of layers make redundant."""

    def read(self, config: ConfigReader) -> Values:
        """Accept any values."""
        config.skip("use_sliding_window", "max_window_layers")
        return {}

    def write(self, model: Any) -> Mapping[str, Any]:
        """Return whether there is a window."""
        return {"use_sliding_window": model.shape.window is not None}
