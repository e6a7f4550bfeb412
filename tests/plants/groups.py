"""Plant B34: an option that does not reach every group of ranks."""

from tests.plants.plant import Plant

WORLD = "tests/gloo/test_comm_world.py::"

PLANTS = (
    Plant(
        "b34",
        "groups are made with the backend's own time-out",
        WORLD + "test_b34_every_group_has_the_configured_time_out",
        "comm/world.py",
        "            timeout=timedelta(seconds=self.time_out_s),\n",
        "            timeout=None,\n",
    ),
)
