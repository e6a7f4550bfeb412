"""The rules of the house, kept by the package, and each shown to notice what it forbids."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.house import imports, shape, words

ROOT = Path(__file__).parents[2]
Rule = Callable[[Path], list[str]]

RULES: list[Rule] = [
    imports.point_down,
    imports.kept_apart,
    imports.no_cycles,
    imports.no_torch,
    imports.loads_without_torch,
    imports.no_local_imports,
    imports.one_import_of_triton,
    imports.only_comm_talks,
    shape.file_sizes,
    shape.function_sizes,
    shape.function_p90,
    shape.one_value_a_line,
    shape.record_sizes,
    shape.one_meaning,
    shape.never_written,
    shape.empty_inits,
    shape.handed_on,
    shape.documented,
    shape.annotated,
    words.words_at_home,
    words.never_waits,
    words.docstrings_stand_alone,
    words.references_exist,
    words.arguments_exist,
    words.nothing_left_behind,
]

RECORD = '"""Base."""\n\n\nclass Record:\n    """A record."""\n'
DEFERRED = "TO" + "DO"


def fields(count: int, kind: str = "int") -> str:
    return "".join(f"    x{i}: {kind} = 0\n" for i in range(count))


def record(body: str) -> dict[str, str]:
    head = '"""R."""\n\nfrom moefold.config.base import Record\n\n\n'
    text = f'{head}class Part(Record):\n    """A part."""\n\n{body}'
    return {"moefold/config/base.py": RECORD, "moefold/moe/config.py": text}


def lines(count: int) -> str:
    return "".join(f"    x = {i}\n" for i in range(count))


# What is planted, and what the rule must say: the place first.
FAULTS: list[tuple[str, Rule, dict[str, str], str]] = [
    (
        "two classes of one name",
        shape.one_meaning,
        {"moefold/moe/a.py": "class C: ...\n", "moefold/optim/b.py": "\nclass C: ...\n"},
        "moefold/optim/b.py:2: class C is also one of moefold/moe/a.py",
    ),
    (
        "upward",
        imports.point_down,
        {"moefold/comm/a.py": "import moefold.moe.b\n", "moefold/moe/b.py": ""},
        "moefold/comm/a.py:1: floor 1 imports moefold.moe.b of floor 4",
    ),
    (
        "upward, for types only",
        imports.point_down,
        {
            "moefold/layers/a.py": "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from moefold.moe.b import C\n",
            "moefold/moe/b.py": "class C: ...\n",
        },
        "moefold/layers/a.py:3: floor 3 imports moefold.moe.b of floor 4",
    ),
    (
        "upward, from a room's config.py, relative",
        imports.point_down,
        {"moefold/moe/config.py": "from . import b\n", "moefold/moe/b.py": ""},
        "moefold/moe/config.py:1: floor 0 imports moefold.moe.b of floor 4",
    ),
    (
        "sideways",
        imports.point_down,
        {"moefold/optim/a.py": "from moefold.data.b import c\n", "moefold/data/b.py": "c = 1\n"},
        "moefold/optim/a.py:1: optim imports moefold.data.b of its own floor 2",
    ),
    (
        "config/ knows a feature",
        imports.point_down,
        {"moefold/config/a.py": "import moefold.mesh.b\n", "moefold/mesh/b.py": ""},
        "moefold/config/a.py:1: config/ knows no field",
    ),
    (
        "a room without a floor",
        imports.point_down,
        {"moefold/attic/a.py": ""},
        "moefold/attic/a.py:1: room 'attic' has no floor",
    ),
    (
        "the engine asks the planner",
        imports.kept_apart,
        {
            "moefold/parallel/pipeline/a.py": "\nfrom moefold.planner.b import c\n",
            "moefold/planner/b.py": "c = 1\n",
        },
        "moefold/parallel/pipeline/a.py:2: parallel imports moefold.planner.b: the engine runs",
    ),
    (
        "the planner reads a record of training",
        imports.kept_apart,
        {
            "moefold/planner/a.py": "from moefold.training.losses.config import c\n",
            "moefold/training/losses/config.py": "c = 1\n",
        },
        "moefold/planner/a.py:1: planner imports moefold.training.losses.config: training asks",
    ),
    (
        "a cycle, through a function",
        imports.no_cycles,
        {
            "moefold/moe/a.py": "import moefold.moe.b\n",
            "moefold/moe/b.py": "\ndef f():\n    from moefold.moe import c\n",
            "moefold/moe/c.py": "from moefold.moe.a import x\n",
        },
        "moefold/moe/a.py:1: import cycle: moefold.moe.a -> moefold.moe.b -> moefold.moe.c -> ",
    ),
    (
        "torch in a torch-free room",
        imports.no_torch,
        {"moefold/planner/a.py": "\ndef f():\n    import torch.nn\n"},
        "moefold/planner/a.py:3: imports torch.nn, and this file is torch-free",
    ),
    (
        "torch at second hand",
        imports.no_torch,
        {
            "moefold/run.py": "from moefold.data.config import x\n",
            "moefold/data/config.py": "from moefold.data.deep import x\n",
            "moefold/data/deep.py": "from torch import Tensor as x\n",
        },
        "moefold/run.py:1: imports torch through moefold.data.config -> moefold.data.deep",
    ),
    (
        "torch behind the scenes",
        imports.loads_without_torch,
        {"moefold/mesh/a.py": "import importlib\nimportlib.import_module('torch.nn')\n"},
        "moefold/mesh/a.py:1: does not load without torch: ImportError: torch",
    ),
    (
        "torch where a command is described",
        imports.loads_without_torch,
        {"moefold/cli/a.py": "import torch\n"},
        "moefold/cli/a.py:1: does not load without torch",
    ),
    (
        "an import inside a function",
        imports.no_local_imports,
        {"moefold/moe/a.py": "\ndef f():\n    import moefold.moe.b\n", "moefold/moe/b.py": ""},
        "moefold/moe/a.py:3: imports moefold.moe.b inside a function",
    ),
    (
        "a second import of Triton",
        imports.one_import_of_triton,
        {
            "moefold/kernels/fused.py": "import triton\n",
            "moefold/kernels/a.py": "import torch\nimport triton.language as tl\n",
        },
        "moefold/kernels/a.py:2: imports triton; kernels/fused.py",
    ),
    (
        "a collective outside of comm/",
        imports.only_comm_talks,
        {
            "moefold/comm/a.py": "import torch.distributed\n",
            "moefold/layers/a.py": "import torch\n\ntorch.distributed.all_reduce(x)\n",
            "moefold/parallel/a.py": "from torch.distributed.fsdp import fully_shard\n",
        },
        "moefold/layers/a.py:3: uses torch.distributed.all_reduce; comm/ alone",
    ),
    (
        "torch.distributed by another name",
        imports.only_comm_talks,
        {"moefold/moe/a.py": "from torch import distributed as d\n"},
        "moefold/moe/a.py:1: uses torch.distributed; comm/ alone",
    ),
    (
        "a long file",
        shape.file_sizes,
        {"moefold/a.py": "\n" * 701},
        "moefold/a.py:701: 701 lines",
    ),
    (
        "a long function",
        shape.function_sizes,
        {"moefold/a.py": "class A:\n  def f(self):\n" + lines(100)},
        "moefold/a.py:2: f has 101 lines",
    ),
    (
        "too many longish functions",
        shape.function_p90,
        {"moefold/a.py": "".join(f"def f{i}():\n{lines(51 if i > 9 else 2)}" for i in range(12))},
        "2 of 12 functions exceed 50 lines: moefold/a.py:",
    ),
    (
        "unrelated values assigned in one line",
        shape.one_value_a_line,
        {"moefold/moe/a.py": "x = y = 1\nx, y = y, x\nx, y = divmod(7, 2)\na, b = x, y\n"},
        "moefold/moe/a.py:4: (a, b): a line for each",
    ),
    (
        "a large record",
        shape.record_sizes,
        record(fields(16)),
        "moefold/moe/config.py:6: Part has 16 fields",
    ),
    (
        "a record of switches",
        shape.record_sizes,
        record(fields(5, "bool | None")),
        "moefold/moe/config.py:6: Part has 5 booleans",
    ),
    (
        "a record large by inheritance",
        shape.record_sizes,
        record(fields(15))
        | {
            "moefold/moe/more.py": "from moefold.moe import config\n"
            "from moefold.moe.config import Part\n\n\nclass More(Part):\n    y: int = 0\n"
        },
        "moefold/moe/more.py:5: More has 16 fields",
    ),
    (
        "a record that rewrites itself",
        shape.record_sizes,
        record("    def model_post_init(self, context):\n        self.x = 1\n"),
        "moefold/moe/config.py:9: Part.model_post_init: a record never rewrites",
    ),
    (
        "a global",
        shape.never_written,
        {"moefold/a.py": "def f():\n    global x\n    x = 1\n"},
        "moefold/a.py:2: global x",
    ),
    (
        "asking for an attribute",
        shape.never_written,
        {"moefold/a.py": "y = hasattr(3, 'x')\n"},
        "moefold/a.py:1: hasattr",
    ),
    (
        "silence",
        shape.never_written,
        {"moefold/a.py": "try:\n    x = 1\nexcept Exception:\n    pass\n"},
        "moefold/a.py:3: catches everything",
    ),
    (
        "names handed on from a room",
        shape.empty_inits,
        {"moefold/moe/__init__.py": "from moefold.moe.b import c\n"},
        "moefold/moe/__init__.py:1: is not empty",
    ),
    (
        "the package loads itself",
        shape.empty_inits,
        {"moefold/__init__.py": "def f():\n    from moefold.api import train\n"},
        "moefold/__init__.py:2: from moefold.api import train",
    ),
    (
        "a name handed on from nowhere",
        shape.handed_on,
        {"moefold/__init__.py": "_MODULES = {'train': 'moefold.api'}\n", "moefold/api.py": ""},
        "moefold/__init__.py:1: hands on train from moefold.api, which does not",
    ),
    (
        "a name of the Python face that is not handed on",
        shape.handed_on,
        {"moefold/__init__.py": "_MODULES = {}\n", "moefold/api.py": "def train(): ...\n"},
        "moefold/__init__.py:1: does not hand on train of moefold/api.py",
    ),
    (
        "an undocumented method",
        shape.documented,
        {"moefold/a.py": '"""A."""\nclass B:\n    """B."""\n    def f(self):\n        ...\n'},
        "moefold/a.py:4: f has no docstring",
    ),
    (
        "an undocumented file",
        shape.documented,
        {"moefold/a.py": "x = 1\n"},
        "moefold/a.py:1: the file has no docstring",
    ),
    (
        "an argument of unknown kind",
        shape.annotated,
        {"moefold/a.py": "class B:\n    def __init__(self, x, *rest): ...\n"},
        "moefold/a.py:2: __init__ leaves x, rest without annotation",
    ),
    (
        "a result of unknown kind",
        shape.annotated,
        {"moefold/a.py": "async def f(x: int, *, y=1): ...\n"},
        "moefold/a.py:1: f leaves y, its result without annotation",
    ),
    (
        "a feature in the machinery",
        words.words_at_home,
        {"moefold/training/trainer.py": "import moefold\nflag = run.use_MoE\n"},
        "moefold/training/trainer.py:2: names 'MoE'",
    ),
    (
        "a docstring that leans on another",
        words.docstrings_stand_alone,
        {"moefold/a.py": '"""A likeness."""\nx = 1\n"""The same again."""\n'},
        "moefold/a.py:3: a docstring begins with 'The same'",
    ),
    (
        "a reference to what is gone",
        words.references_exist,
        {"moefold/a.py": '"""Done by :func:`merge`."""\n\n\ndef join(): ...\n'},
        "moefold/a.py:1: refers to merge, which is not defined",
    ),
    (
        "a reference to what went elsewhere",
        words.references_exist,
        {"moefold/a.py": "# Done by ``moefold.b.join``.\n", "moefold/c.py": "def join(): ...\n"},
        "moefold/a.py:1: refers to moefold.b.join, which is not defined",
    ),
    (
        "an argument that is gone",
        words.arguments_exist,
        {
            "moefold/a.py": "def f(rows: int) -> None:\n"
            '    """Run.\n\n    Args:\n        rows: how many.\n        lines: how many.\n    """\n'
        },
        "moefold/a.py:1: f has no argument lines, which its docstring describes",
    ),
    (
        "work put off",
        words.nothing_left_behind,
        {"docs/tour.md": f"fine\n{DEFERRED}: write\n"},
        f"docs/tour.md:2: puts work off: '{DEFERRED}'",
    ),
    (
        "a folder of one machine",
        words.nothing_left_behind,
        {"Makefile": "demo:\n\tcd /ro" + "ot/x\n"},
        "Makefile:2: a folder of one machine",
    ),
]

# Lines that stall a device, and their twins that do not.
WAITING = [
    ("n = x_TD.sum().item()", "n_ = x_TD.sum()"),
    ("n = counts_E.tolist()", "n = names.split()"),
    ("n = x_TD.cpu()", "n = x_TD.to(y_TD)"),
    ('n = x_TD.to("cpu")', "n = x_TD.to(device)"),
    ("n = (x_TD > 0).nonzero()", "n = np.nonzero(table)"),
    ("n = x_TD[x_TD > 0]", "n = x_TD[:rows]"),
    ("keep = ids_T >= 0\n    n = x_TD[keep]", "keep = ids_T >= 0\n    n = x_TD * keep"),
    ("x_TD[~pad] = 0", "x_TD[rows_R] = 0"),
    ("n = x_TD[valid_T]", "n = x_TD[order_R]"),
    ("n = torch.where(x_TD)", "n = torch.where(keep_T, x_T, 0)"),
    ("n = rows.repeat_interleave(counts_E)", "n = rows.repeat_interleave(group, 1)"),
    (
        "n = torch.repeat_interleave(a, counts_E)",
        "n = torch.repeat_interleave(a, counts_E, output_size=r)",
    ),
    ("n = int(counts_E.max())", "n = int(counts_E.shape[0])"),
    (
        "if x_TD.isnan().any():\n        raise ValueError",
        "if x_TD is None:\n        raise ValueError",
    ),
    ("n = 1 if counts_E[0] else 2", "n = 1 if x_TD.numel() else 2"),
]


def plant(folder: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    breaches = rule(ROOT)
    assert not breaches, f"{rule.__doc__}\n" + "\n".join(breaches)


@pytest.mark.parametrize(
    ("rule", "files", "said"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_the_rule_notices(rule: Rule, files: dict[str, str], said: str, tmp_path: Path) -> None:
    breaches = rule(plant(tmp_path, files))
    assert any(text.startswith(said) for text in breaches), breaches
    assert len(breaches) == 1 or rule is imports.no_torch, breaches


def test_every_rule_is_shown_to_notice() -> None:
    shown = {rule for _, rule, _, _ in FAULTS} | {words.never_waits}
    assert shown == set(RULES)


@pytest.mark.parametrize(("bad", "good"), WAITING, ids=[bad for bad, _ in WAITING])
def test_what_waits_for_the_device_is_noticed(bad: str, good: str, tmp_path: Path) -> None:
    body = "def f(x_TD, counts_E):\n    "
    paths = plant(tmp_path, {"moefold/moe/a.py": body + bad, "moefold/kernels/b.py": body + good})
    (breach,) = words.never_waits(paths)
    assert breach.startswith("moefold/moe/a.py:") and breach.endswith("waits for the device")


def test_waiting_is_free_where_a_count_is_read_on_purpose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def counts(x_E):\n    return x_E.tolist()\n\n\ndef other(x_E):\n    return x_E.item()\n"
    root = plant(tmp_path, {"moefold/moe/a.py": text})
    monkeypatch.setattr(words, "MAY_WAIT", {"moefold/moe/a.py::counts"})
    assert [b.split(":")[1] for b in words.never_waits(root)] == ["6"]


def test_every_function_that_may_wait_exists() -> None:
    known = {
        f"{module.path}::{node.name}"
        for module in words.modules(ROOT).values()
        for node in words.functions(module.nodes)
    }
    assert known >= words.MAY_WAIT
