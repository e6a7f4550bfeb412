"""Default stages: what parts of a model weigh, and the split whose heaviest rank is lightest."""

import random
from itertools import combinations_with_replacement, pairwise

import pytest

from moefold.mesh.config import Sizes
from moefold.mesh.legality import size_violations
from moefold.mesh.loads import leveled_split, lightest_split, rank_loads
from moefold.mesh.pipeline import StageMapping, Stages, StageWeights, rank_of_stage
from moefold.model.config import Decoder, MultiToken
from moefold.parallel.config import Layout
from moefold.planner.case import Case
from moefold.planner.count import count
from moefold.planner.hardware import parse_cluster
from moefold.planner.layouts import make_dispatch, make_layout
from moefold.planner.published import published_model
from moefold.planner.task import task_from_model
from moefold.planner.time import estimate_time
from moefold.spec.decoder import model_needs, with_multi_token
from moefold.spec.stages import SEQ, stage_weights


def deepseek_v3(ahead: int = 1) -> Decoder:
    return with_multi_token(published_model("DeepSeek-V3").decoder, (MultiToken(),) * ahead)


def all_splits(layers: int, stages: int) -> list[list[int]]:
    """Return every number of layers of each stage, empty stages included."""
    bounds = combinations_with_replacement(range(layers + 1), stages - 1)
    return [[b - a for a, b in pairwise((0, *inner, layers))] for inner in bounds]


def test_the_lightest_split_is_exact() -> None:
    """No split of random layers has a lighter heaviest stage."""
    random_ = random.Random(3)
    for _ in range(60):
        layers = [random_.choice((1.0, 1.5, 4.0, 0.2)) for _ in range(random_.randint(1, 8))]
        stages = random_.randint(2, 4)
        ends = random_.choice((0.0, 0.7)), random_.choice((0.0, 2.5, 9.0))
        rank = list(range(stages))
        least = min(
            max(rank_loads(layers, s, rank, *ends)) for s in all_splits(len(layers), stages)
        )
        found = lightest_split(layers, stages, *ends)
        assert max(rank_loads(layers, found, rank, *ends)) == pytest.approx(least)


@pytest.mark.parametrize("way", ["round", "v"])
def test_ranks_with_several_stages(way: StageMapping) -> None:
    """Dense layers that weigh half, or ends of three layers, are spread over the ranks."""
    rank = [rank_of_stage(k, 2, way) for k in range(4)]
    layers = [0.5] * 4 + [1.0] * 4
    counts = leveled_split(layers, [2, 2, 2, 2], rank, 0.0, 3.0)
    least = min(max(rank_loads(layers, s, rank, 0.0, 3.0)) for s in all_splits(8, 4))
    assert sum(counts) == 8
    assert max(rank_loads(layers, counts, rank, 0.0, 3.0)) == least


def test_weights_are_the_counted_products() -> None:
    """Six FLOPs a parameter; norms of latents and the router are what the two differ by."""
    weights = stage_weights(deepseek_v3())
    flops = 2 * (sum(weights.layers) + weights.first + weights.last)
    assert flops == pytest.approx(count(deepseek_v3()).flops_per_token(SEQ), rel=0.003)
    main = stage_weights(deepseek_v3(0))
    assert main.layers == weights.layers
    # The multi-token layer is a layer, a head and the matrix that joins.
    assert weights.last == pytest.approx(2 * main.last + main.layers[-1] + 6 * 7168**2)


def test_frozen_weights_weigh_less() -> None:
    decoder = deepseek_v3(0)
    frozen = decoder.model_copy(update={"frozen": ("head.weight",)})
    assert stage_weights(frozen).last == pytest.approx(stage_weights(decoder).last * 2 / 3)


@pytest.mark.parametrize(("pp", "text"), [(4, "Et*16|(t*16|)*2t*13mL"), (8, "Et*8|(t*8|)*6t*5mL")])
def test_deepseek_v3_is_as_fast_as_by_hand(pp: int, text: str) -> None:
    """The planned step of the default stages is within 2 % of the best of many stated ones."""
    cluster = parse_cluster("h100x512")
    task = task_from_model(published_model("DeepSeek-V3"), cluster, 4096)
    layout = make_layout(Layout(sizes=f"pp{pp} ep64").split, dispatch=make_dispatch("alltoall"))

    def planned(stages: str | None) -> Case:
        return task.case(layout.model_copy(update={"stages": stages}), 1, "bf16")

    assert planned(None).stages.text == text
    seconds = estimate_time(planned(None)).seconds
    by_hand = []
    for last in range(1, 61 // pp + 1):
        for more in (0, 1):
            first = 61 // pp + more
            middle = Stages.balanced(pp - 2, 1, 61 - first - last).layer_counts
            stages = "|".join(("E" + "t" * first, *("t" * n for n in middle), "t" * last + "mL"))
            by_hand.append(estimate_time(planned(stages)).seconds)
    assert seconds <= 1.02 * min(by_hand)
    assert estimate_time(planned("even")).seconds > 1.05 * seconds


def test_the_even_split_on_request_and_where_it_is_as_good() -> None:
    decoder = deepseek_v3()
    sizes = "pp8 vpp2"
    even = Stages.balanced(8, 2, 61, 1)
    assert Layout(sizes=sizes, stages="even").stages_of(decoder) == even
    assert Layout(sizes=sizes).stages_of(decoder) != even
    assert not list(Layout(sizes=sizes, stages="even").violations(model_needs(decoder)))
    light = StageWeights((1.0,) * 10, last=0.4)
    assert Stages.weighted(4, 1, light) == Stages.balanced(4, 1, 10)
    assert Stages.weighted(2, 1, StageWeights((1.0,) * 4, last=2.0)).text == "Et*3|tL"


def test_multi_token_layers_are_on_one_stage_before_the_loss_or_with_it() -> None:
    needs = model_needs(deepseek_v3(2))
    (broken,) = size_violations(Sizes(pp=4), needs, stages="Et*20|t*41|m|mL")
    assert broken.rule == "must have every m in one stage"
    assert size_violations(Sizes(pp=4), needs, stages=broken.nearest) == []
    apart = "Et*20|t*41|mm|L"
    assert size_violations(Sizes(pp=4), needs, stages=apart) == []
    assert Stages.parse(apart).sent_rows == (1, 1, 3, 3)
