"""Planted bugs: models that are grown."""

from tests.plants.plant import Plant

UPCYCLED = "tests/cpu/test_convert_growth.py::test_an_upcycled_model_is_its_dense_one"
SAME = "tests/cpu/test_convert_growth.py::test_a_mixture_grows_into_one_that_computes_the_same"
FACTOR = (
    "tests/cpu/test_convert_growth.py::test_the_factor_gives_the_output_of_the_dense_feed_forward"
)

PLANTS = (
    Plant(
        "rows of the router are not repeated",
        UPCYCLED,
        "convert/growth.py",
        "torch.randn(shape, generator=rng)).repeat(shards, 1)",
        "torch.randn(shards * copies, shape[1], generator=rng))",
    ),
    Plant(
        "shards of a copy stand beside one another, their router's rows do not",
        UPCYCLED,
        "convert/growth.py",
        "for shard in range(shards) for copy in range(copies)]",
        "for copy in range(copies) for shard in range(shards)]",
    ),
    Plant(
        "a shard's output counts once",
        UPCYCLED,
        "convert/growth.py",
        "else (1.0, factor)",
        "else (1.0, 1.0)",
    ),
    Plant(
        "a new layer adds what the one before it adds",
        SAME,
        "convert/growth.py",
        "return torch.zeros_like(tensor) if inserted and name.endswith(OUTPUTS) else tensor",
        "return tensor",
    ),
    Plant(
        "what stands twice is read as twice as much",
        SAME,
        "convert/growth.py",
        "(times[-1] if summed else 1)",
        "1",
    ),
    Plant(
        "copies of an expert are as many times as much",
        SAME,
        "convert/growth.py",
        "scale = 1 / times if times > 1 and unnormalised else 1.0",
        "scale = 1.0",
    ),
    Plant(
        "the published scaling takes another root of the factor",
        FACTOR,
        "convert/growth.py",
        "root = factor ** (1 / 3)",
        "root = factor ** (1 / 2)",
    ),
    Plant(
        "probabilities over all experts are taken for normalised weights",
        FACTOR,
        "convert/growth.py",
        "return shards if router.renormalise else shards * router.experts / router.top_k",
        "return shards",
    ),
    Plant(
        "the number of experts per token is left out of upcycling's factor",
        FACTOR,
        "convert/growth.py",
        "shards * router.experts / router.top_k",
        "shards * router.experts",
    ),
)
