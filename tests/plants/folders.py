"""Plants of folders as tools leave them: scales, infinities, files that are none, adapters."""

from tests.plants.plant import Plant

FOLDERS = "tests/cpu/test_convert_folders.py::"
SCALES = FOLDERS + "test_scales_of_each_form_multiply_as_in_transformers"
PACKED = FOLDERS + "test_scales_of_packed_experts_multiply"
NUMBERS = FOLDERS + "test_weights_that_are_no_numbers_are_refused"
FILES = FOLDERS + "test_what_is_no_file_is_refused_at_once"
BESIDE = FOLDERS + "test_an_adapter_beside_its_bases_config_is_an_adapter"
LEFT = FOLDERS + "test_an_adapter_beside_a_model_is_said_wherever_the_folder_is_read"

LACKED = (
    "tests/cpu/test_convert_import.py::"
    "test_a_released_a_x_k1_has_norms_that_nothing_uses_and_no_selection_bias"
)
OPTIONAL = "tests/cpu/test_convert_import.py::test_tensors_that_folders_may_lack_are_zeros_and_said"

PLANTS = (
    Plant(
        "a tensor that a folder lacks is not a number",
        OPTIONAL,
        "convert/importer.py",
        "torch.nan if self._plan.parts[name] else 0.0",
        "torch.nan",
    ),
    Plant(
        "a folder may lack a tensor of one layer alone",
        OPTIONAL,
        "convert/plan.py",
        "if not any(piece.name in present for name in names",
        "if not all(piece.name in present for name in names",
    ),
    Plant(
        "a norm after a dense layer is refused",
        LACKED,
        "model/families/axk1.py",
        "if norm and int(norm[1]) in self.shape.dense:",
        "if norm and int(norm[1]) < 0:",
    ),
    Plant(
        "bytes of scales are numbers",
        SCALES,
        "convert/importer.py",
        "        scales = scales.view(E8M0)\n    grid",
        "        pass\n    grid",
    ),
    Plant(
        "scales of rows are those of blocks of one row",
        SCALES,
        "convert/plan.py",
        "        return 1, columns\n",
        "        return 1, 1\n",
    ),
    Plant(
        "every expert has the first one's scale",
        PACKED,
        "convert/plan.py",
        "return (rows, columns) if scales in whole else None",
        "return (rows, columns) if scales in whole - {(*lead, 1, 1)} else None",
    ),
    Plant(
        "an infinity passes",
        NUMBERS,
        "convert/source.py",
        '    return "an infinity" if math.isinf(low + high) else None\n',
        "    return None\n",
    ),
    Plant(
        "a device is a file",
        FILES,
        "files.py",
        "    if stat.S_ISREG(mode):\n",
        "    if stat.S_ISREG(mode) or stat.S_ISCHR(mode):\n",
    ),
    Plant(
        "an optimizer's state is a model's weights",
        BESIDE,
        "model/families/peft.py",
        'r"(model|pytorch_model|consolidated)',
        'r"(model|pytorch_model|consolidated|optimizer)',
    ),
    Plant(
        "explain does not say what lies beside a model",
        LEFT,
        "planner/notes.py",
        "(*parsed.notes, *parsed.left_out))",
        "parsed.notes)",
    ),
)
