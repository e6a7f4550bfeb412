"""The wheel has all that the program needs: it works where the repository is not."""

import os
import site
import subprocess
import sys
import zipfile
from pathlib import Path
from shutil import copytree

import pytest

ROOT = Path(__file__).parents[2]
PACKED = ("pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy and install it; return the Python that has it.

    What the wheel requires is borrowed from this environment, without its editable moefold.
    """
    source = tmp_path_factory.mktemp("source")
    copytree(ROOT / "moefold", source / "moefold", ignore=lambda *_: {"__pycache__"})
    for name in PACKED:
        (source / name).write_bytes((ROOT / name).read_bytes())
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(source)]
    build = [sys.executable, "-m", "pip", "wheel", *options, str(source)]
    subprocess.run(build, check=True, capture_output=True, cwd=source)
    environment = tmp_path_factory.mktemp("environment")
    create = [sys.executable, "-m", "venv", "--without-pip", str(environment)]
    subprocess.run(create, check=True, capture_output=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (wheel,) = source.glob("moefold-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()))
    python = environment / "bin" / "python"
    done = run(python, environment, "-c", "import moefold; print(moefold.__file__)")
    assert Path(done.stdout.strip()).is_relative_to(environment)
    return python


def run(python: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run an installed Python in a folder that has no copy of the package."""
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    told = {"cwd": folder, "env": environ, "capture_output": True, "text": True}
    return subprocess.run([str(python), *words], **told)  # type: ignore[call-overload]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["demo", "train.steps=20"], marks=pytest.mark.matrix),
        ["plan", "tiny", "--cluster", "h100x2"],
        ["verify", "tiny", "--layout", "tp2"],
    ],
    ids=["demo", "plan", "verify"],
)
def test_an_installed_wheel_works(installed: Path, words: list[str], tmp_path: Path) -> None:
    done = run(installed, tmp_path, "-m", "moefold", *words)
    assert done.returncode == 0, done.stderr[-2000:]
