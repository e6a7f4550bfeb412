"""Planted bugs: parts of a measured step, and what is named as its wall."""

from tests.plants.plant import Plant

TRACE = "tests/cpu/test_training_trace.py::"

PLANTS = (
    Plant(
        "an operator is counted with those that it calls",
        TRACE + "test_operators_are_counted_without_those_that_they_call",
        "training/trace.py",
        "max(since, operator.end)",
        "since",
    ),
    Plant(
        "walls do not add up: what overlaps counts twice",
        TRACE + "test_kernels_that_overlap_are_counted_once",
        "training/trace.py",
        "clipped(merged(intervals), window), taken)",
        "clipped(merged(intervals), window), [])",
    ),
    Plant(
        "a hidden exchange counts as exposed",
        TRACE + "test_only_what_the_computing_thread_waits_for_is_exposed",
        "training/trace.py",
        "if timed.thread == main else lane_waits",
        "",
    ),
    Plant(
        "an exchange that began earlier is exposed from its beginning",
        TRACE + "test_only_what_the_computing_thread_waits_for_is_exposed",
        "training/trace.py",
        "(max(arrived, call.since), timed.ended)))",
        "(arrived, timed.ended)))\n        exchanges.append((call.begun, timed.ended))",
    ),
    Plant(
        "a wait for a late rank is an exchange",
        TRACE + "test_a_wait_for_a_late_rank_is_no_exchange",
        "training/trace.py",
        "arrived = min(max(arrivals[call.key], call.begun), timed.ended)",
        "arrived = call.begun",
    ),
    Plant(
        "waits for experts are named only in forward",
        TRACE + "test_a_wait_for_a_late_rank_is_no_exchange",
        "training/trace.py",
        '(".combine", FORWARD), (".dispatch", BACKWARD)',
        '(".combine", FORWARD), (".dispatch", FORWARD)',
    ),
    Plant(
        "all waits for other stages are the bubble",
        TRACE + "test_the_wall_of_a_step",
        "planner/walls.py",
        'parts["stages"] = min(waits, longest - busy)',
        'parts["stages"] = 0.0',
    ),
    Plant(
        "planned walls leave out what the slowest stage takes more",
        TRACE + "test_planned_walls_add_up_to_the_planned_step",
        "planner/walls.py",
        '            walls["stages"] += part - kept\n',
        "",
    ),
    Plant(
        "the fullest expert rank is compared with the mean expert",
        TRACE + "test_the_load_of_experts",
        "training/trace.py",
        "loads.append(max(ranks) * len(ranks) / sum(ranks))",
        "loads.append(max(load) * len(load) / sum(load))",
    ),
)
