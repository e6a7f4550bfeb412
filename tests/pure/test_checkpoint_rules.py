"""What the checkpoint room holds true without tensors: tiling, records, no pickle, no torch."""

import ast
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import moefold.checkpoint.config
from moefold.checkpoint.config import CheckpointPolicy
from moefold.checkpoint.manifest import HeaderEntry, StartAndShape, shard_header, tiles

ROOM = Path(moefold.checkpoint.config.__file__).parent


def cells(shape: tuple[int, ...], box: StartAndShape) -> list[tuple[int, ...]]:
    """Return the indices in a box, those outside of the shape too."""
    at, size = box
    return list(itertools.product(*(range(a, a + n) for a, n in zip(at, size, strict=True))))


@st.composite
def boxes_in(draw: st.DrawFn) -> tuple[tuple[int, ...], list[StartAndShape]]:
    """Draw a shape and boxes: a random cut of it, now and then with one box changed."""
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=0, max_size=3)))
    boxes: list[StartAndShape] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 4))):
        at, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        splits = [d for d, n in enumerate(size) if n > 1]
        if not splits:
            boxes.append((at, size))
            continue
        d = draw(st.sampled_from(splits))
        cut = draw(st.integers(1, size[d] - 1))
        later = (*at[:d], at[d] + cut, *at[d + 1 :])
        boxes += [(at, (*size[:d], cut, *size[d + 1 :]))]
        boxes += [(later, (*size[:d], size[d] - cut, *size[d + 1 :]))]
    if shape and draw(st.booleans()):
        i, d = draw(st.integers(0, len(boxes) - 1)), draw(st.integers(0, len(shape) - 1))
        at, size = boxes[i]
        if draw(st.booleans()):
            boxes[i] = ((*at[:d], draw(st.integers(0, 4)), *at[d + 1 :]), size)
        else:
            boxes[i] = (at, (*size[:d], draw(st.integers(0, 4)), *size[d + 1 :]))
    return shape, draw(st.permutations(boxes))


@given(boxes_in())
def test_tiling_is_what_counting_every_cell_says(
    case: tuple[tuple[int, ...], list[StartAndShape]],
) -> None:
    shape, boxes = case
    counted = sorted(cell for box in boxes for cell in cells(shape, box))
    whole = cells(shape, ((0,) * len(shape), shape))
    inside = all(a + n <= s for at, size in boxes for a, n, s in zip(at, size, shape, strict=True))
    assert tiles(shape, boxes) == (inside and counted == whole)


def test_tiling_of_many_slices_is_quick() -> None:
    """A thousand experts in rows and columns take milliseconds, not a comparison of all pairs."""
    rows: list[StartAndShape] = [((e, c * 8), (1, 8)) for e in range(4096) for c in range(4)]
    assert tiles((4096, 32), rows)
    assert not tiles((4096, 32), [*rows[:-1], rows[0]])
    assert not tiles((2,), [])


@pytest.mark.parametrize(
    "field",
    [{"every": 0}, {"keep": 0}, {"keep_every": 0}, {"shard_bytes": 10}, {"attempts": 0},
     {"on_failure": "ignore"}, {"keep": "3"}, {"keep": True}],
)  # fmt: skip
def test_a_policy_refuses_what_makes_no_sense(field: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        CheckpointPolicy.model_validate(field)


def test_headers_are_padded_to_whole_words() -> None:
    for length in range(1, 20):
        raw = shard_header({"x" * length: HeaderEntry("F32", (1,), 0, 4)})
        assert len(raw) % 8 == 0
        assert int.from_bytes(raw[:8], "little") == len(raw) - 8


def test_no_file_of_the_room_can_unpickle() -> None:
    """Neither pickle nor what uses it is imported or called anywhere in the room."""
    for file in ROOM.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            found = set()
            if isinstance(node, ast.Import):
                found = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found = {(node.module or "").partition(".")[0]}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                found = {f"{node.value.id}.{node.attr}"}
            elif isinstance(node, ast.Name):
                found = {node.id}
            wrong = {"pickle", "marshal", "shelve", "joblib", "torch.load", "torch.save", "eval",
                     "exec", "numpy.load"}  # fmt: skip
            assert not found & wrong, f"{file.name}:{node.lineno}"


def test_looking_at_a_checkpoint_needs_no_torch() -> None:
    names = ["config", "verify", "folder", "lock", "manifest"]
    imports = "; ".join(f"import moefold.checkpoint.{name}" for name in names)
    code = f"import sys; {imports}; import moefold.cli.checkpoint; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
