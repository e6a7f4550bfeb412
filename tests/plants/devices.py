"""Planted bugs: devices and links that a plan is made for."""

from tests.plants.plant import Plant

HARDWARE = "tests/pure/test_planner_hardware.py::"

PLANTS = (
    Plant(
        "links over PCIe keep the rate of those that are sold",
        HARDWARE + "test_links_are_those_that_are_stated",
        "planner/hardware.py",
        "rate = min(device.host_bandwidth, PCIE)",
        "rate = device.link_bandwidth",
    ),
    Plant(
        "two devices without a switch use the links to all others",
        HARDWARE + "test_without_a_switch_a_pair_has_one_of_the_links",
        "planner/hardware.py",
        "return rate * (ranks - 1) / (self.domain - 1)",
        "return rate",
    ),
    Plant(
        "a described device has the host of another",
        HARDWARE + "test_a_device_is_described_in_a_file",
        "planner/hardware.py",
        "        host=sheet.host,\n",
        "",
    ),
    Plant(
        "a chip is planned in a precision that it lacks",
        HARDWARE + "test_a_plan_in_a_precision_that_the_chip_lacks_is_refused",
        "planner/plan.py",
        "    require_recipe(cluster.device, task.number_formats.recipe)\n",
        "",
    ),
    Plant(
        "devices alone in their hosts meet over links",
        HARDWARE + "test_links_are_those_that_are_stated",
        "planner/hardware.py",
        "            rate = network\n",
        "            pass\n",
    ),
)
