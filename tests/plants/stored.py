"""Planted bugs: imported folders, optimizer state, the order of data."""

from tests.plants.plant import Plant

IMPORT = "tests/cpu/test_convert_import.py::"
BOTH = IMPORT + "test_every_tensor_arrives_exactly_from_both_layouts"
STRICT = IMPORT + "test_nothing_missing_left_over_or_of_another_shape_passes"
STATE = "test_state_goes_out_and_comes_back_exactly"
ORDER = "tests/cpu/test_data_loader.py::"

PLANTS = (
    Plant(
        "packed names are not known",
        BOTH,
        "model/families/names.py",
        'return mapping, "packed" if packed else "per_expert"',
        'return mapping, "per_expert"',
    ),
    Plant(
        "gate and up are exchanged",
        IMPORT + "test_each_expert_of_each_layer_is_in_its_place",
        "model/families/names.py",
        "((part,) if stacked else ())",
        "((1 - part,) if stacked else ())",
    ),
    Plant(
        "an expert is written where another belongs",
        IMPORT + "test_each_expert_of_each_layer_is_in_its_place",
        "model/families/names.py",
        "index = (() if expert is None else (expert,))",
        "index = (() if expert is None else (shape[0] - 1 - expert,))",
    ),
    Plant(
        "a missing tensor is passed over",
        STRICT,
        "convert/plan.py",
        '[f"{name} is missing" for name in missing]',
        "list[str]()",
    ),
    Plant(
        "a tensor that nobody reads is passed over",
        STRICT,
        "convert/plan.py",
        "        elif name not in uses:\n",
        "        elif name not in uses and not present:\n",
    ),
    Plant(
        "packed and single experts may stand beside each other",
        IMPORT + "test_a_packed_tensor_beside_single_experts_is_refused",
        "convert/plan.py",
        "        elif name not in uses:\n",
        '        elif name not in uses and ".experts." not in name:\n',
    ),
    Plant(
        "what is not written holds zeros",
        IMPORT + "test_a_part_that_is_not_written_stays_nan_and_is_refused",
        "convert/importer.py",
        "unfilled = torch.nan if self._plan.parts[name] else 0.0",
        "unfilled = 0.0",
    ),
    Plant(
        "steps start anew after loading",
        f"tests/cpu/test_optim_adamw.py::{STATE}",
        "optim/adamw.py",
        'self._add_state(name, "step", torch.zeros((), dtype=torch.int64))',
        "torch.zeros((), dtype=torch.int64)",
    ),
    Plant(
        "momenta start anew after loading",
        f"tests/cpu/test_optim_muon.py::{STATE}",
        "optim/muon.py",
        "self._momenta[name] = self._add_state(name, what, zeros_for(param))",
        "self._momenta[name] = zeros_for(param)",
    ),
    Plant(
        "the order hangs on the size of a micro-batch",
        ORDER + "test_data_order_is_the_same_after_any_stop_and_in_any_layout",
        "data/loader.py",
        "self._mixture.pick(number + i)",
        "self._mixture.pick(number + i + self.micro_batch)",
    ),
)
