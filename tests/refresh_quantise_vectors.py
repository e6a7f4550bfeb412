"""Writes ``tests/data/quantised.npz``: codes and scales of other projects' quantisers.

``python -m tests.refresh_quantise_vectors FOLDER`` where FOLDER holds

* ``site/``: the wheels ``transformer_engine==2.20.2`` and ``torchao==0.18.0``, unpacked;
* ``src/te/``: ``tests/pytorch/references`` of TransformerEngine d0067d0;
* ``src/mx/``: microxcaling 7bc4195;
* ``src/dg_math.py``: ``deep_gemm/utils/math.py`` of DeepGEMM.

TransformerEngine's files are loaded by path with empty stand-ins for modules that need its build.
Each entry is named ``oracle/family/part``.
"""

import importlib.util
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.quantise_inputs import COLUMNS, SQUARE, families

FILE = Path(__file__).parent / "data" / "quantised.npz"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EVEN = COLUMNS // 32 * 32


def module(name: str, **names: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__dict__.update(names)
    sys.modules[name] = made
    return made


def loaded(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def transformer_engine(site: Path) -> dict[str, Any]:
    class Quantizer:
        def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
            self.rowwise_usage, self.columnwise_usage, self.internal = rowwise, columnwise, False

    top = "transformer_engine.pytorch"
    for name in ("transformer_engine", top, f"{top}.tensor", f"{top}.custom_recipes"):
        module(name).__path__ = []  # type: ignore[attr-defined]
    module(f"{top}.quantized_tensor", QuantizedTensorStorage=object, Quantizer=Quantizer)
    module(f"{top}.tensor.utils", is_custom=lambda x=None: True)
    module(f"{top}.constants", DType=None, TE_DType_To_Torch={})
    module("transformer_engine_torch")
    folder = site / "transformer_engine" / "pytorch" / "custom_recipes"
    names = ("reference_utils", "gemm", "reference_nvfp4", "reference_current_scaling")
    return {name: loaded(f"{top}.custom_recipes.{name}", folder / f"{name}.py") for name in names}


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    engine = transformer_engine(folder / "site")
    sys.path[:0] = [str(folder / "site"), str(folder / "src" / "te"), str(folder / "src")]
    from mx.formats import ElemFormat  # type: ignore[import-not-found]
    from mx.mx_ops import _quantize_mx  # type: ignore[import-not-found]
    from references.blockwise_quantizer_reference import (  # type: ignore[import-not-found]
        BlockwiseQuantizerReference,
    )
    from torchao.prototype.mx_formats.config import (  # type: ignore[import-not-found]
        ScaleCalculationMode,
    )
    from torchao.prototype.mx_formats.mx_tensor import to_mx  # type: ignore[import-not-found]

    deep = loaded("deep_gemm_math", folder / "src" / "dg_math.py")
    blockwise = BlockwiseQuantizerReference()
    nvfp4 = engine["reference_nvfp4"].NVFP4QuantizerRef
    found: dict[str, np.ndarray] = {}

    def note(name: str, **parts: Tensor) -> None:
        for part, values in parts.items():
            values = values.contiguous()
            held = values if values.dtype == torch.float32 else values.view(torch.uint8)
            found[f"{name}/{part}"] = held.numpy()

    def te_block(name: str, x: Tensor, power: bool, tile: tuple[int, int]) -> None:
        made = blockwise.quantize(
            x, E4M3, pow_2_scales=power, quant_tile_shape=tile, munge_scale_shapes=False
        )
        note(name, codes=made.data, scales=made.scale)

    for family, x in families().items():
        even = x[:, :EVEN].contiguous()
        for element, word in ((E4M3, "e4m3"), (E5M2, "e5m2")):
            scale, read, _ = engine["reference_current_scaling"]._scale_from_amax_tensor(
                torch.float32, x.abs().amax().view(1), element, eps=0.0, pow_2_scales=False
            )
            note(f"te_tensor_{word}/{family}", codes=(x * scale).to(element), scales=read)
        te_block(f"te_rows/{family}", x, True, (1, 128))
        te_block(f"te_rows_fp32/{family}", x, False, (1, 128))
        for rule in (ScaleCalculationMode.FLOOR, ScaleCalculationMode.RCEIL):
            scales, codes = to_mx(even, E4M3, 32, rule)
            word = "floor" if rule == ScaleCalculationMode.FLOOR else "up"
            note(f"torchao_{word}/{family}", codes=codes, scales=scales)
        read = _quantize_mx(
            even.clone(), 8, ElemFormat.fp8_e4m3, axes=[-1], block_size=32, round="even"
        )
        # It gives numbers, no codes: four bytes each.
        note(f"microxcaling_floor/{family}", values=read[:4])
        codes, scales = deep.per_token_cast_to_fp8(even, True, 32)
        note(f"deepgemm_up/{family}", codes=codes, scales=scales)
        for name, tile, rht in (("rows", (1, 16), True), ("square", (16, 16), False)):
            made = nvfp4(dtype=None, pow_2_scales=False, quant_tile_shape=tile, with_rht=rht)
            codes, scales, codes_t, scales_t, amax, amax_t = made._quantize(even)
            note(f"te_nvfp4_{name}/{family}", codes=codes, scales=scales, amax=amax)
            if name == "rows":
                note(f"te_nvfp4_turned/{family}", codes=codes_t, scales=scales_t, amax=amax_t)
    square = families(SQUARE, SQUARE)
    for family in ("normal", "wide"):
        te_block(f"te_square/{family}", square[family], True, (128, 128))
    np.savez_compressed(FILE, **found)  # type: ignore[arg-type]
    print(f"{len(found)} arrays, {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
