"""Integers on a device: the rule about narrow ones, kept by the package and shown to notice."""

from pathlib import Path

import pytest

from tests.house import indices
from tests.house.tree import functions, modules

ROOT = Path(__file__).parents[2]

# A line that overflows, what the rule says, and its twin that does not.
LINES = [
    ("y = offs_E * columns", "multiplies the narrow offs_E", "y = offs_E.long() * columns"),
    ("y = columns * rows.cu_seqlens", "multiplies the narrow rows.cu_seqlens", "y = rows_T * 2"),
    ("y = offs_E[e] * columns", "multiplies the narrow offs_E[e]", "y = offs_E[e] + columns"),
    ("y = (offs_E + 1) ** 2", "multiplies the narrow offs_E + 1", "y = offs_E.to(torch.int64)"),
    ("y = offs_E.mul(columns)", "multiplies the narrow offs_E", "y = offs_E.sub(columns)"),
    ("y = torch.mul(offs_E, 2)", "multiplies the narrow offs_E", "y = torch.add(offs_E, 2)"),
    ("a = offs_E - 1\n    b = a.view(-1)\n    y = b << 3", "multiplies the narrow b", "b = 2 << 3"),
    ("y = x_TD[offs_E]", "indexes by the narrow offs_E", "y = x_TD[copy_R]"),
    ("y = x_TD[:, offs_E - 1]", "indexes by the narrow offs_E - 1", "y = x_TD[:, 1]"),
    ("y = x_TD.index_select(0, offs_E)", "indexes by the narrow offs_E", "y = x_TD[offs_E > 1]"),
    (
        "y = torch.gather(x_TD, 0, torch.where(m, offs_E, 0))",
        "indexes by the narrow torch.where(m, offs_E, 0)",
        "y = torch.gather(x_TD, 0, torch.where(m, copy_R, 0))",
    ),
    (
        "v, i = offs_E.sort()\n    x_TD.scatter_add_(0, v, x_TD)",
        "indexes by the narrow v",
        "v, i = offs_E.sort()\n    x_TD.scatter_add_(0, i, x_TD)",
    ),
    (
        "a, b = offs_E, copy_R\n    y = a * 2",
        "multiplies the narrow a",
        "a, b = offs_E, copy_R\n    y = b * 2",
    ),
    ("y = x_TD.to(torch.int32)", "makes a narrow integer here", "y = x_TD.to(torch.int64)"),
    ("y = x_TD.int()", "makes a narrow integer here", "y = x_TD.long()"),
    (
        "y = torch.arange(9, dtype=torch.int32)",
        "makes a narrow integer here",
        "y = torch.searchsorted(offs_E, x_T) * columns",
    ),
    ("y = F.grouped_mm(x_TD, w, offs=offs_E) * offs_E", "multiplies the narrow offs_E",
     "y = F.grouped_mm(x_TD, w, offs=offs_E) * 2"),
]  # fmt: skip


def noticed(folder: Path, line: str) -> list[str]:
    file = folder / "moefold/kernels/a.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"import torch\n\n\ndef f(x_TD, offs_E, copy_R, m, e):\n    {line}\n")
    return indices.narrow_integers(folder)


def test_no_product_and_no_index_is_narrow() -> None:
    """Plant: int32 indices for a gather; the place of a row from an int32 offset."""
    breaches = indices.narrow_integers(ROOT)
    assert not breaches, f"{indices.narrow_integers.__doc__}\n" + "\n".join(breaches)


@pytest.mark.parametrize(("bad", "said", "good"), LINES, ids=[bad for bad, _, _ in LINES])
def test_a_narrow_factor_or_index_is_noticed(
    bad: str, said: str, good: str, tmp_path: Path
) -> None:
    last = 5 + bad.count("\n")
    assert noticed(tmp_path / "bad", bad) == [f"moefold/kernels/a.py:{last}: {said}"]
    assert noticed(tmp_path / "good", good) == []


def test_every_function_that_makes_narrow_integers_exists() -> None:
    known = {
        f"{module.path}::{node.name}"
        for module in modules(ROOT).values()
        for node in functions(module.nodes)
    }
    assert known >= indices.MAKES_NARROW
