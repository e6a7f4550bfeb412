"""Devices as data: complete, each number with its source, and named in words people type."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from moefold.planner import hardware
from moefold.planner.hardware import (
    FORMAT_OF,
    Device,
    catalogue,
    device_by_name,
    find_device,
    parse_cluster,
)

FILE = Path(hardware.__file__).with_name("devices.json")

NAMES = {"A100", "H100", "H200", "H800", "H20", "B200", "B300", "GB200", "GB300", "Ascend910"}


def test_every_device_is_there_and_every_number_has_a_source() -> None:
    entries = json.loads(FILE.read_text("utf-8"))["devices"]
    assert set(catalogue()) == set(entries) == NAMES
    for entry in entries.values():
        assert set(entry) == {one.name for one in fields(Device)} - {"name", "rates"}
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
    with pytest.raises(ValueError, match=r"such as h100x256|known are A100"):
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
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_driver_s_name_is_that_of_the_chip_or_of_none(driver: str, name: str | None) -> None:
    found = find_device(driver)
    assert (found.name if found else None) == name
