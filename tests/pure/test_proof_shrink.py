"""Shrinking a run keeps its kinds of parts and makes its sizes small and divisible."""

import pytest

from moefold.layers.kinds.gqa import Gqa
from moefold.layers.kinds.mla import Mla
from moefold.model.config import Block
from moefold.moe.config import Moe
from moefold.parallel.config import Layout
from moefold.planner.count import count
from moefold.proof.shrink import shrink
from moefold.run import Run, load_run, recipes
from moefold.spec.decoder import model_needs

LAYOUTS = ["tp2", "tp2 cp2 ep8 etp2", "pp4 vpp2 ep4", "cp4 ep4", "tp4 etp4"]


def kind(block: Block) -> tuple:
    """What of a layer must outlive shrinking."""
    attention, ffn = block.attention, block.ffn
    of_attention: tuple = (type(attention), attention.rope)  # type: ignore[attr-defined]
    if isinstance(attention, Gqa):
        of_attention += (attention.qk_norm, attention.heads > attention.kv_heads)
    if isinstance(attention, Mla):
        of_attention += (attention.q_rank is None,)
    if not isinstance(ffn, Moe):
        return of_attention, type(ffn)
    router, shared = ffn.router, ffn.shared
    of_router = (router.score, router.order, router.renormalise, router.epsilon, router.scale)
    of_router += (router.groups is None, router.selection_bias, router.top_k == 1)
    of_shared = None if shared is None else shared.gate
    return of_attention, type(ffn), of_router, of_shared, ffn.capacity, ffn.balance


def run_of(name: str) -> Run:
    return load_run(name, ["layout={}"])


@pytest.mark.parametrize("sizes", LAYOUTS)
@pytest.mark.parametrize("name", sorted(recipes()))
def test_a_recipe_keeps_its_kinds_and_fits_the_layout(name: str, sizes: str) -> None:
    run, layout = run_of(name), Layout(sizes=sizes)
    if list(layout.violations(run.needs)):
        pytest.skip("not legal for the recipe itself")
    subject = shrink(run, [layout])
    small, large = subject.decoder, run.decoder
    assert not list(layout.violations(model_needs(small, subject.rows)))
    assert {kind(block) for block in small.blocks} == {kind(block) for block in large.blocks}
    firsts = [kind(block) for block in small.blocks]
    assert list(dict.fromkeys(firsts)) == list(dict.fromkeys(kind(b) for b in large.blocks))
    assert small.tied == large.tied and small.norm_epsilon == large.norm_epsilon
    assert count(small).parameters < 200_000 and len(small.blocks) <= 8


def test_several_layouts_share_one_model() -> None:
    run = run_of("qwen3_30b_a3b")
    layouts = [Layout(sizes=sizes) for sizes in ("tp2", "ep8", "cp4", "pp2")]
    subject = shrink(run, layouts)
    asked = model_needs(subject.decoder, subject.rows)
    assert not [found for layout in layouts for found in layout.violations(asked)]


def test_stages_that_a_layout_names_keep_their_layers() -> None:
    run = run_of("demo")
    assert len(run.decoder.blocks) == 4
    named = Layout(sizes="pp2", stages="Et|tttL")
    assert len(shrink(run, [named]).decoder.blocks) == 4


def test_numbers_go_narrow_only_when_asked() -> None:
    run, layout = run_of("demo"), Layout()
    assert shrink(run, [layout]).precision == "fp64"
    assert shrink(run, [layout], "bf16").precision == "bf16"


def test_clipping_is_seen_where_a_run_clips() -> None:
    run = run_of("demo")
    clipped = shrink(run, [Layout()]).optim.clip_norm  # type: ignore[attr-defined]
    assert clipped is not None and clipped < run.optim.clip_norm
    free = load_run("demo", ["optim.clip_norm=null"])
    assert shrink(free, [Layout()]).optim.clip_norm is None  # type: ignore[attr-defined]
