"""Checkpoints of tensors on an accelerator: same bytes, little memory, filled in place."""

from pathlib import Path

import torch

from moefold.checkpoint.load import Reader
from moefold.checkpoint.save import save
from moefold.checkpoint.verify import verify
from tests.cpu.checkpoint_tools import load


def test_tensors_of_a_device_come_back(tmp_path: Path) -> None:
    tensors = {
        "w": torch.randn(3000, 1000, device="cuda"),
        "turned": torch.randn(500, 30, device="cuda").t(),
        "half": torch.randn(77, device="cuda", dtype=torch.bfloat16),
        "flags": torch.rand(33, device="cuda") > 0.5,
        "scalar": torch.tensor(5, device="cuda"),
        "empty": torch.empty(0, 3, device="cuda"),
        "quantized": torch.randn(9, device="cuda").to(torch.float8_e4m3fn),
    }
    path = save(tmp_path / "device", 1, tensors, {})
    on_host = save(tmp_path / "host", 1, {n: t.cpu() for n, t in tensors.items()}, {})
    assert (path / "manifest.json").read_bytes() == (on_host / "manifest.json").read_bytes()
    assert verify(path) == []
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    before = torch.cuda.memory_allocated()
    with Reader(path) as reader:
        for name, target in targets.items():
            reader.read_into(name, target)
    assert torch.cuda.memory_allocated() == before
    loaded = load(path)[0]
    for name, tensor in tensors.items():
        assert torch.equal(targets[name].cpu().float(), tensor.cpu().float())
        assert torch.equal(loaded[name].float(), tensor.cpu().float())
