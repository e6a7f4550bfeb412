"""What holds for every test: one thread, no network, nothing asked of a service."""

import atexit
import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.compiled import compile_share
from tests.outside import forget

# Set before torch or tokenizers are imported by any test, and inherited by processes tests start.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "disabled"
os.environ["MPLBACKEND"] = "agg"
# PyTorch's store asks a name server about each address that connects. An answer that is lost costs
# five seconds otherwise.
os.environ["RES_OPTIONS"] = "timeout:1"

# No test depends on how fast a machine is; under CI the drawn cases are the same every time.
settings.register_profile("house", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("house")

# A shell that starts tests in the background has Ctrl-C ignored, and all that they start with it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Compile what workers have in common, each a part of it."""
    compile_share(config)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Twice as many workers as processors: tests wait for ranks, locks and time-outs."""
    return 2 * len(os.sched_getaffinity(0))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files whose tests start ranks evenly over the others, those of slow tests first.

    Ranks of one test after another have the machine; workers that came to such files at the same
    time would wait for each other. And a long file that began last would end alone.
    """
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    slow = {name for name, found in files.items() if any(map(is_slow, found))}
    in_turn = sorted(files, key=lambda name: name not in slow)
    of_ranks = [name for name in in_turn if "/gloo/" in name]
    others = [name for name in in_turn if "/gloo/" not in name]
    at = {name: (i + 0.5) / len(part) for part in (of_ranks, others) for i, name in enumerate(part)}
    items[:] = [item for name in sorted(files, key=at.__getitem__) for item in files[name]]


# Collecting tests makes a million objects that stay: no need to search them for cycles, and again.
gc.disable()


def pytest_collection_finish() -> None:
    """Leave what collecting has made out of what is searched for cycles."""
    gc.collect()
    gc.freeze()
    gc.enable()
    # Each run asks whether any are left out. To count a million takes a tenth of a second.
    count = gc.get_freeze_count()
    gc.get_freeze_count = lambda: count


# Extension modules complain of what is there at the interpreter's end. Not sooner: pytest itself
# collects five times before.
atexit.register(gc.unfreeze)


def is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


@pytest.fixture(autouse=True)
def parts_from_outside_go() -> Iterator[None]:
    """Forget what files from outside a test brought: ranks of later tests could not load it."""
    yield
    forget()
