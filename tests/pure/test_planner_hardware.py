"""Devices as data: complete, each number with its source, and named in words people type."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from moefold.config.errors import RunError
from moefold.planner import hardware
from moefold.planner.curves import constants, device_note
from moefold.planner.hardware import (
    FORMAT_OF,
    Device,
    StatedLinks,
    catalogue,
    device_by_name,
    find_device,
    parse_cluster,
    require_recipe,
)
from moefold.planner.network import GroupReach, ring_seconds
from moefold.planner.plan import plan

FILE = Path(hardware.__file__).with_name("devices.json")

NAMES = {"A100", "H100", "H200", "H800", "H20", "B200", "B300", "GB200", "GB300", "Ascend910"}
SHEETS = {
    "RTX3090", "RTX4090", "RTX5090", "A6000", "L40S", "A100-40GB", "A100-PCIe", "A100-PCIe-40GB",
    "GH200", "MI300X", "MI325X", "MI355X",
}  # fmt: skip
"""Devices whose data sheets are known and whose runs are not."""


def test_every_device_is_there_and_every_number_has_a_source() -> None:
    entries = json.loads(FILE.read_text("utf-8"))["devices"]
    assert set(catalogue()) == set(entries) == NAMES | SHEETS
    for entry in entries.values():
        assert set(entry) == {one.name for one in fields(Device)} - {"name", "rates", "curves"}
        stated = [*entry["peaks"].values(), *(entry[name] for name in entry if name != "peaks")]
        assert all(len(source) > 3 for _, source in stated)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_numbers_are_in_their_units(name: str) -> None:
    """A slip by a factor of a thousand in any field shows."""
    one = device_by_name(name)
    assert 40e9 < one.memory_bytes < 400e9
    assert 1e12 < one.memory_bandwidth < 10e12
    assert 100e9 < one.link_bandwidth <= 900e9
    assert 20e9 < one.nic_bandwidth <= 100e9 < 20 * one.host_bandwidth
    assert 100e12 < one.peak("bf16") < 3e15
    assert one.peak("fp32") < one.peak("bf16") <= one.peak("fp8") <= one.peak("fp4")
    assert 300 <= one.watts <= 1500


@pytest.mark.parametrize("name", sorted(SHEETS))
def test_a_data_sheet_is_in_its_units(name: str) -> None:
    """A slip by a factor of a thousand, or of two for sparsity or both directions, shows."""
    one = device_by_name(name)
    assert 0.9 < one.memory_bytes / (one.nominal_gb * 2**30) <= 1
    assert 0.7e12 < one.memory_bandwidth < 10e12
    assert 20e9 < one.link_bandwidth < (60e9 if one.links == "pcie" else 600e9)
    assert 1e9 < one.nic_bandwidth <= 50e9 and 25e9 <= one.host_bandwidth <= 200e9
    assert 70 < one.peak("bf16") / one.memory_bandwidth < 450, "FLOPs per byte of dense products"
    for wide, narrow in (("bf16", "fp8"), ("fp8", "fp4")):
        if narrow in dict(one.peaks):
            assert 1.9 < one.peak(narrow) / one.peak(wide) <= 4.01
    assert 250 <= one.watts <= 1500
    assert "not measured" in device_note(one) and not device_note(device_by_name("h100"))


def test_a_format_that_a_device_lacks_runs_as_the_next_wider() -> None:
    assert device_by_name("a100").peak("fp4") == device_by_name("a100").peak("bf16")
    assert device_by_name("h100").peak("fp4") == device_by_name("h100").peak("fp8") == 1979e12
    assert set(FORMAT_OF.values()) == {"fp32", "bf16", "fp8", "fp4"}


def test_a_cluster_is_read_from_a_word() -> None:
    one = parse_cluster("h100x1024")
    assert (one.device.name, one.devices, one.per_node, one.domain) == ("H100", 1024, 8, 8)
    rack = parse_cluster("GB200x144")
    assert (rack.per_node, rack.domain) == (4, 72)


@pytest.mark.parametrize("word", ["h100", "h100x", "x8", "h100x0", "h100xmany", "tpux8"])
def test_other_words_are_refused_with_what_there_is(word: str) -> None:
    with pytest.raises(ValueError, match=r"such as |known are A100"):
        parse_cluster(word)


def test_a_cluster_has_a_million_devices_at_most() -> None:
    assert parse_cluster("h100x1000000").devices == 10**6
    with pytest.raises(ValueError, match="h100x1000001': must have at most 1,000,000 devices"):
        parse_cluster("h100x1000001")


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA RTX 6000 Ada Generation", None),
        ("NVIDIA L40S", "L40S"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_driver_s_name_is_that_of_the_chip_or_of_none(driver: str, name: str | None) -> None:
    found = find_device(driver)
    assert (found.name if found else None) == name


@pytest.mark.parametrize(
    ("word", "name", "devices"),
    [
        ("rtx4090x1", "RTX4090", 1),
        ("RTX-4090 x 2", "RTX4090", 2),
        ("4090x8", "RTX4090", 8),
        ("mi300x64", "MI300X", 64),
        ("mi300xx64", "MI300X", 64),
        ("a100_40gbx32", "A100-40GB", 32),
        ("a100-80gbx8", "A100", 8),
        ("a100-pcie-40x4", "A100-PCIe-40GB", 4),
    ],
)
def test_a_device_is_named_as_people_do(word: str, name: str, devices: int) -> None:
    found = parse_cluster(word)
    assert (found.device.name, found.devices) == (name, devices)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("rtx4091x1", "nearest: RTX4090"),
        ("mi350xx8", "nearest: MI355X"),
        ("rtx4090", "such as rtx4090x8"),
        ("gaudi3x8", '"memory_gb_s": 1600'),
    ],
)
def test_an_unknown_device_is_answered_with_the_nearest_or_how_to_describe_it(
    word: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        parse_cluster(word)


def test_links_are_those_that_are_stated() -> None:
    """Plant: PCIe keeps the rate of NVLink."""
    switched = parse_cluster("a100-40gbx32")
    stated = parse_cluster("a100-40gbx32", StatedLinks.parse("pcie", 4, 6.25))
    assert switched.connections == (
        "8 connected by switched links of 300 GB/s each, 25 GB/s of network per device beyond"
    )
    assert stated.connections == (
        "4 connected by PCIe of 25 GB/s each, 6.25 GB/s of network per device beyond"
    )
    assert (stated.domain, stated.per_node, stated.device.domain) == (4, 4, 4)
    assert parse_cluster("h100x1").connections == "a single device"
    slower = parse_cluster("h100x8", StatedLinks.parse("pcie:20"))
    assert slower.connections == "8 connected by PCIe of 20 GB/s each"
    rates = constants().rates("A100", "moefold", "")
    whole = GroupReach(4, 4)
    times = [ring_seconds(1e12, whole, cluster, rates.nic_gather) for cluster in (switched, stated)]
    assert times[1] / times[0] == pytest.approx(300 / 25, rel=1e-4)
    alone = parse_cluster("h100x8", StatedLinks.parse(node=1))
    assert alone.connections == "connected by 50 GB/s of network per device alone"
    assert alone.link_rate(1) == alone.device.nic_bandwidth


def test_without_a_switch_a_pair_has_one_of_the_links() -> None:
    mesh = parse_cluster("mi300xx16")
    assert mesh.connections.startswith("8 connected by direct links without a switch, 64 GB/s")
    assert [mesh.link_rate(ranks) / 64e9 for ranks in (2, 4, 8)] == [1, 3, 7]
    switched = parse_cluster("h100x16")
    assert switched.link_rate(2) == switched.link_rate(8) == 450e9
    four = parse_cluster("a100x4", StatedLinks.parse("mesh", 4))
    assert [four.link_rate(ranks) / 100e9 for ranks in (2, 4)] == [1, 3]


@pytest.mark.parametrize(
    ("word", "options", "said"),
    [
        ("h100x8", {"links": "nvlnk"}, "must be switch, mesh or pcie"),
        ("h100x8", {"links": "swich"}, "nearest: switch"),
        ("h100x8", {"links": "-5"}, r"--links -5: must be 0.01 .* nearest: 0.01"),
        ("h100x8", {"links": "pcie:"}, "--links without a number"),
        ("h100x8", {"links": "1e9"}, "nearest: 100000"),
        ("h100x8", {"links": "nan"}, "nearest: 0.01"),
        ("h100x8", {"node": 0}, "nearest: 1"),
        ("h100x16", {"node": 16}, "at most 8 as sold; nearest: 8"),
        ("h100x16", {"network_gb": 0.0}, "--network-gb 0: must be"),
        ("rtx4090x2", {"links": "switch"}, "sold with PCIe alone; nearest: pcie"),
    ],
)
def test_links_that_cannot_be_are_refused_with_the_nearest(
    word: str, options: dict, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        parse_cluster(word, StatedLinks.parse(**options))


@pytest.mark.parametrize(
    ("device", "recipe", "nearest"),
    [
        ("a100", "fp8_block", "bf16"),
        ("a100", "nvfp4", "bf16"),
        ("h100", "mxfp8", "fp8_tensor"),
        ("h100", "nvfp4", "fp8_tensor"),
        ("rtx4090", "nvfp4", "fp8_tensor"),
        ("mi355x", "nvfp4", "mxfp8"),
    ],
)
def test_a_recipe_that_a_chip_lacks_is_refused(device: str, recipe: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"precision {recipe}: .* nearest: {nearest} "):
        require_recipe(device_by_name(device), recipe)
    require_recipe(device_by_name(device), nearest)


def test_a_plan_in_a_precision_that_the_chip_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"precision mxfp8: A100 has no units .* nearest: bf16"):
        plan("tiny", "a100x1", overrides=["train.quantise={kind: mxfp8}"])


SHEET = {
    "name": "MyChip", "memory_gb": 64, "memory_gb_s": 1600, "tflops": {"bf16": 376, "fp8": 752},
    "links": {"gb_s": 56, "node": 8}, "network_gb_s": 25, "host": "grace", "curves": "blackwell",
}  # fmt: skip


def test_a_device_is_described_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(SHEET))
    found = parse_cluster(f"{file}x16")
    device = found.device
    assert (device.name, device.memory_bytes, device.peak("fp8")) == ("MyChip", 64e9, 752e12)
    assert (device.link_bandwidth, device.nic_bandwidth, found.domain) == (56e9, 25e9, 8)
    assert "those of Blackwell" in device_note(device)
    rates = constants().rates("MyChip", "moefold", "", (), device)
    grace = constants().rates("GB200", "moefold", "")
    assert (rates.launch_s, rates.gemm) == (grace.launch_s, grace.gemm)
    require_recipe(device, "fp8_block")
    file.write_text(json.dumps({name: SHEET[name] for name in [*SHEET][:4]}))
    with pytest.raises(ValueError, match="no link rate is known; state it by --links"):
        parse_cluster(f"{file}x2")
    with pytest.raises(ValueError, match="network is not known"):
        parse_cluster(f"{file}x16", StatedLinks.parse("pcie:25", 8))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"memory_gb_s": None}, "memory_gb_s"),
        ({"links": {"gb_s": -1}}, r"links.gb_s = -1(.|\n)*nearest"),
        ({"links": {"gb_s": 5, "node": 1}}, r"links.node = 1(.|\n)*nearest: 2"),
        ({"tflops": {}}, "tflops.bf16"),
        ({"hots": "x86"}, "hots(.|\\n)*did you mean host"),
        ({"block_scales": ["nvfp4"]}, "nvfp4 needs the rate tflops.fp4"),
        ({"name": "h100"}, r"known device(.|\n)*nearest: 'My h100'"),
    ],
)
def test_a_described_device_is_checked_field_by_field(
    tmp_path: Path, change: dict, said: str
) -> None:
    file = tmp_path / "mine.json"
    kept = {name: value for name, value in (SHEET | change).items() if value is not None}
    file.write_text(json.dumps(kept))
    with pytest.raises(RunError, match=said):
        parse_cluster(f"{file}x8")
