"""Forks and imported weights on several ranks: taken alike, and said once."""

import subprocess
import sys
from pathlib import Path

from moefold.cli.main import main
from tests.cpu.test_cli_fork import LEFT_OUT, SMALL, fork_of, hub, own_data, same_model


def test_ranks_say_once_what_is_left_out_and_fork_alike(tmp_path: Path) -> None:
    """Read from the folder or from what was imported of it, the run is the same to the last bit."""
    folder, imported = hub(tmp_path / "hub", "deepseek_v3", mtp=True), tmp_path / "imported"
    words = ["train", str(folder), own_data(tmp_path), *SMALL, "--nproc", "2", "--layout", "pp2"]
    command = [sys.executable, "-m", "moefold", *words, "--folder", str(tmp_path / "out")]
    told = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert told.returncode == 0, told.stderr
    assert told.stderr.count(LEFT_OUT) == 1
    assert main(["import", str(folder), str(imported)]) == 0
    new = tmp_path / "new"
    assert main([*words, "--folder", str(imported), "--fork", str(new)]) == 0
    assert fork_of(new)["taken"] == ["weights"]
    assert same_model(new / "step-00000000", imported / "step-00000000")
    assert same_model(new / "step-00000004", tmp_path / "out" / "step-00000004")
