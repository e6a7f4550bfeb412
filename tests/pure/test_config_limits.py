"""Run files made to take long: each is refused within seconds, with a bounded message."""

import time
from pathlib import Path

import pytest

from moefold.config.errors import MAX_LISTED, RunError
from moefold.config.load import MAX_FILES
from moefold.config.path_tree import PathTree
from moefold.run import load_run

SECONDS = 2.0
"""Processor time within which a file is refused, on a machine with other work."""
SOURCES = "".join(f" {{source: jsonl, files: [a{i}.jsonl]}}," for i in range(3000))
GOOD = """
name: a
model: {family: qwen3_moe, shape: {hidden: 16, layers: 1, heads: 2, kv_heads: 1, experts: 4,
  top_k: 2, expert_width: 16}}
optim: {kind: adamw, lr: 0.001}
train: {steps: 8, batch: 4}
"""
DATA = "data: {seq: 32, tokenizer: {kind: bpe, vocab: 300}, train: [{source: python_stdlib}]}\n"
FILES = {
    "a list of numbers": ("x: [" + "1," * 500_000 + "]", "more than 50000 values"),
    "anchored keys": ("".join(f"k{i}: &a{i} v\n" for i in range(30_000)), "more than 50000"),
    "fewer anchored keys": ("".join(f"k{i}: &a{i} v\n" for i in range(12_000)), "12,0"),
    "aliases of aliases": (
        "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 20)),
        "more than 50000",
    ),
    "unknown keys": ("".join(f"kkkk{i}: v\n" for i in range(4000)), "more"),
    "one key many times": ("kkkk: v\n" * 12_000, "12,0"),
    "unknown keys of a section": (
        GOOD + "watch: {" + "".join(f"kk{i}: 1, " for i in range(8000)) + "}\n" + DATA,
        "8,000 errors",
    ),
    "sources of one name": (
        GOOD + f"data: {{seq: 32, tokenizer: {{kind: bpe, vocab: 300}}, train: [{SOURCES}]}}\n",
        "and 2,959 more",
    ),
    "sources of no kind": (
        GOOD + f"data: {{seq: 32, train: [{'{source: nothing}, ' * 6000}]}}\n",
        "6,000 errors",
    ),
    "numbers for names": (GOOD + DATA + f"uses: [{'7, ' * 16_000}]\n", "uses"),
    "many bases": ("base: [" + "".join(f"b{i}.yaml, " for i in range(20_000)) + "]\n", "at most"),
    "many plug-ins": ("uses: [" + "".join(f"b{i}.py, " for i in range(8000)) + "]\n", "at most"),
    "a long text": (GOOD + DATA + f"layout: {{sizes: {'tp2' * 300_000}}}\n", "layout.sizes"),
    "long stages": (GOOD + DATA + f"layout: {{stages: '{'t' * 900_000}'}}\n", "layout.stages"),
    "repeated stages": (GOOD + DATA + "layout: {stages: '(t*99999999)*99999999'}\n", "stages"),
    "a long key": (f"? {'k' * 900_000}\n: 1\n", "unknown key"),
    "nested lists": (GOOD + DATA + "uses: " + "[" * 5000 + "\n", "nested deeper"),
}


def refused(path: Path) -> str:
    """Return the message of a refusal that came in time."""
    started = time.process_time()
    with pytest.raises(RunError) as caught:
        load_run(path)
    assert time.process_time() - started < SECONDS
    assert len(caught.value.violations) <= MAX_LISTED
    assert len(str(caught.value)) < 60_000
    return str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_takes_long_is_refused_in_time(tmp_path: Path, name: str) -> None:
    text, said = FILES[name]
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert said in refused(path)


def test_two_layers_of_many_keys_are_merged_in_time(tmp_path: Path) -> None:
    (tmp_path / "below.yaml").write_text("".join(f"kk{i}: 1\n" for i in range(10_000)))
    path = tmp_path / "run.yaml"
    path.write_text("base: below.yaml\n" + "".join(f"kk{i}: 2\n" for i in range(6000)))
    assert "10,0" in refused(path)


def test_values_of_all_layers_are_counted_together(tmp_path: Path) -> None:
    (tmp_path / "below.yaml").write_text(f"kk: [{'1, ' * 26_000}]\n")
    path = tmp_path / "run.yaml"
    path.write_text(f"base: below.yaml\nkm: [{'1, ' * 26_000}]\n")
    assert "that a run builds on hold more than 50000 values" in refused(path)


def test_bases_that_double_are_read_a_bounded_number_of_times(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"b{i}.yaml").write_text(f"base: [b{i + 1}.yaml, b{i + 1}.yaml]\n")
    (tmp_path / "b20.yaml").write_text(GOOD + DATA)
    assert f"builds on at most {MAX_FILES} files" in refused(tmp_path / "b0.yaml")


def test_paths_are_found_at_below_and_around() -> None:
    tree: PathTree[int] = PathTree()
    tree["a", "b", 0] = 1
    tree["a", "c"] = 2
    assert tree.nearest(("a", "b"), 0) == 1
    assert tree.nearest(("a", "b", 0, "deeper"), 0) == 1
    assert tree.nearest(("a", "x"), 0) == 1
    assert tree.nearest(("x",), 0) == 0
    assert tree.get(("a", "c"), 0) == 2 and tree.get(("a",), 0) == 0
    tree.drop(("a", "b"))
    assert dict(tree.items()) == {("a", "c"): 2}
    assert tree.nearest(("a", "b"), 0) == 2
    tree.drop(("a", "c"))
    assert tree.nearest(("a",), 0) == 0 and not dict(tree.items())
