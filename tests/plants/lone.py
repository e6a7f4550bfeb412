"""Plants in one rank that runs without the others: what it hears, its size, what it costs."""

from tests.plants.plant import Plant

ALIKE = "tests/cpu/test_comm_lone.py::test_every_rank_says_what_this_one_says"
BYTES = "tests/gloo/test_rank_alone.py::test_a_rank_sends_as_many_bytes_alone"
TASK = "tests/pure/test_rank_task.py::"
REFUSED = TASK + "test_all_that_is_wrong_with_a_rank_is_said_at_once"
SMALLER = TASK + "test_a_smaller_step_has_the_layers_the_layout_and_the_schedule_of_the_run"
ROOMS = TASK + "test_rooms_of_rows_shrink_with_the_rows"
COSTS = TASK + "test_exchanges_cost_what_their_links_carry"

PLANTS = (
    Plant(
        "a lone rank's sums are of its own values alone",
        ALIKE,
        "comm/lone.py",
        "                x.mul_(self._size)\n",
        "                pass\n",
    ),
    Plant(
        "a lone rank receives what it sends to the first rank",
        ALIKE,
        "comm/lone.py",
        "x.split(list(send))[self._index]",
        "x.split(list(send))[0]",
    ),
    Plant(
        "a lone rank routes by its own rows",
        BYTES,
        "training/rank_step.py",
        "    router.choose = choose\n",
        "",
    ),
    Plant(
        "a lone rank of the number of ranks is one of them",
        REFUSED,
        "training/rank_task.py",
        "rank >= max(world, 1)",
        "rank > max(world, 1)",
    ),
    Plant(
        "a lone rank's smaller step has stages of its own",
        SMALLER,
        "training/rank_task.py",
        'update={"stages": case.stages.text}',
        "update={}",
    ),
    Plant(
        "a lone rank's smaller step keeps the room of all rows",
        ROOMS,
        "training/rank_task.py",
        "ceil(dispatch.max_rows * share)",
        "dispatch.max_rows",
    ),
    Plant(
        "a lone rank's sums cost half of what they do",
        COSTS,
        "training/rank_task.py",
        "calls * 2 * ring_seconds(whole / 2, reach, cluster",
        "calls * ring_seconds(whole / 2, reach, cluster",
    ),
    Plant(
        "a lone rank's messages between nodes cost what they do within one",
        COSTS,
        "training/rank_task.py",
        "near = _reach(cluster, ranks[:2])",
        "near = GroupReach(2, 2)",
    ),
)
