"""What ``config.json`` says of quantised weights: which formats are read, and how others convert.

FP8 weights have a scale per block, per row or per tensor, whose shape states which; MXFP4 needs no
size, as its blocks are fixed. Other formats are refused with the way to weights that are read.
"""

from collections.abc import Mapping
from typing import Any

FP8_METHODS = ("fp8", "fbgemm_fp8", "mxfp8")
"""Methods that store FP8 codes in E4M3 and scales beside them."""
MXFP8_BLOCK = (1, 32)
"""Rows and columns of a block of MXFP8 (OCP Microscaling Formats 1.0)."""
_BNB_SETTINGS = ("bnb_4bit_", "llm_int8_")
"""Prefixes of settings of bitsandbytes, which say nothing unless weights are loaded by it."""
_LOAD = 'python -c "from transformers import AutoModelForCausalLM as M{imports}; {lines}"'
_BNB = "M.from_pretrained('FOLDER').dequantize().save_pretrained('NEW')"
_COMPRESSED = (
    "M.from_pretrained('FOLDER', dtype='bfloat16', quantization_config=C(dequantize=True))"
    ".save_pretrained('NEW')"
)
CONVERSIONS: Mapping[str, str] = {
    "bitsandbytes": _LOAD.format(imports="", lines=_BNB),
    "compressed-tensors": _LOAD.format(imports=", CompressedTensorsConfig as C", lines=_COMPRESSED),
}
"""Commands that write a folder that is read, by method, where ``transformers`` can do so."""
_ORIGINAL = (
    "hf download BASE --local-dir NEW (BASE is what the folder was quantised from, in README.md "
    "under base_model)"
)


def is_empty(settings: Any) -> bool:
    """Return whether a ``quantization_config`` states no quantisation: a leftover of a tool."""
    if not isinstance(settings, Mapping):
        return settings is None
    method = settings.get("quant_method")
    if method not in (None, "bitsandbytes"):
        return False
    loads = [settings.get(f"load_in_{bits}bit") for bits in (4, 8)]
    rest = (value for key, value in settings.items() if not key.startswith(_BNB_SETTINGS))
    return not any(loads) and (method is not None or not any(rest))


def block_of(settings: Any) -> tuple[int, int] | None:
    """Return rows and columns of FP8 blocks, None where scales alone say what shares one.

    Raises:
        ValueError: if the format is not read, with the command that converts it.
    """
    settings = settings if isinstance(settings, Mapping) else {}
    method = settings.get("quant_method")
    if method == "mxfp4":
        return None
    if method not in FP8_METHODS:
        known = ", ".join(repr(name) for name in (*FP8_METHODS, "mxfp4"))
        way = CONVERSIONS.get(str(method), _ORIGINAL)
        raise ValueError(
            f"quantization_config has quant_method {method!r}, which is not read; "
            f"read are {known}; convert with: {way}"
        )
    if settings.get("expert_dtype", "fp8") != "fp8":
        raise ValueError(
            f"quantization_config has expert_dtype {settings['expert_dtype']!r}; supported: 'fp8'"
        )
    if method == "mxfp8":
        return MXFP8_BLOCK
    block = settings.get("weight_block_size")
    if block is None:
        return None
    sizes = block if isinstance(block, list) else []
    if len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError(
            f"quantization_config has weight_block_size {block!r}; must be two positive integers, "
            "or null where each matrix or row has one scale"
        )
    return sizes[0], sizes[1]
