"""Planted bugs: time-outs that do not reach a group, operations in an order that hangs."""

from tests.plants.plant import Plant

NCCL = "tests/cpu/test_comm_nccl.py::"
WORLD = "tests/gloo/test_comm_world.py::"

PLANTS = (
    Plant(
        "groups are made with the backend's own time-out",
        WORLD + "test_every_group_has_the_configured_time_out",
        "comm/world.py",
        "            timeout=limit,\n",
        "            timeout=None,\n",
    ),
    Plant(
        "who waits for the first rank's word gives up as early as in any operation",
        "tests/gloo/test_comm_watch.py::test_the_first_rank_may_work_longer_than_the_time_out",
        "comm/world.py",
        "limit = timedelta(seconds=HOST_TIME_OUT_S)",
        "limit = timedelta(seconds=time_out_s)",
    ),
    Plant(
        "each rank warms its pipeline up from its own place on",
        NCCL + "test_a_pipeline_warms_up",
        "comm/world.py",
        "in neighbour_pairs(group.size):",
        "in sorted(neighbour_pairs(group.size), key=lambda pair: group.index not in pair[1:]):",
    ),
    Plant(
        "both directions of a pipeline share a channel",
        NCCL + "test_both_directions_of_a_pipeline_pass",
        "comm/world.py",
        "if _is_ordered() else None",
        "if bulk else None",
    ),
    Plant(
        "bulk's cap of processors is left on what a pass waits for",
        NCCL + "test_nccl_is_told_what_goes_first",
        "comm/world.py",
        "    if bulk:\n        options.config.max_ctas",
        "    if options is not None:\n        options.config.max_ctas",
    ),
)
