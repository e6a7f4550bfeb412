"""Plugins: importing Python files from outside the package that register records of their own."""

import hashlib
import os
import re
import sys
from collections.abc import Iterable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from moefold.files import named

OUTSIDE = "outside_"
"""How the names of modules made of such files begin."""


def import_plugins(paths: Iterable[str | Path]) -> dict[str, str]:
    """Import Python files so that they can register their parts.

    A file is imported once per content, under a module name of its own made from its path and
    content, and stays in ``sys.modules`` so that classes in it can be pickled.

    Returns:
        Absolute path to SHA-256 (hex) of each file, in order; the hashes enter a run's identity.

    Raises:
        ValueError: where a file does not exist, is no ``.py`` file, or fails while it is imported.
    """
    found: dict[str, str] = {}
    for path in map(resolve, paths):
        if path.suffix != ".py" or not path.is_file():
            what = "is not a Python file" if path.exists() else "does not exist"
            raise ValueError(f"{path} {what}")
        with named(path):
            content = path.read_bytes()
        found[str(path)] = digest = hashlib.sha256(content).hexdigest()
        place = hashlib.sha256(str(path).encode()).hexdigest()
        name = re.sub(r"\W", "_", f"{OUTSIDE}{path.stem}_{place[:8]}_{digest[:8]}")
        if name in sys.modules:
            continue
        spec = spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = module_from_spec(spec)
        try:
            exec(compile(content, str(path), "exec"), module.__dict__)
        except Exception as error:
            del sys.modules[name]
            said = f"{type(error).__name__}: {error}"
            raise ValueError(f"{path} failed while it was imported: {said}") from error
    return found


def version_of(part: type) -> list[str]:
    """Return what tells the content of the file from outside that a class is of; else nothing."""
    module = part.__module__
    return [module.rpartition("_")[2]] if module.startswith(OUTSIDE) else []


def resolve(path: str | Path, relative_to: str | Path = ".") -> Path:
    """Return the absolute form of a path that is relative to a folder; ``~`` is the home."""
    # Neither refuses what pathlib does: a home of nobody, links in a circle.
    return Path(os.path.realpath(Path(relative_to, os.path.expanduser(path))))


class PluginImports:
    """Imports, where it is unpickled, the plugins that were imported where it was pickled.

    Pickle loads in the order in which it wrote: what stands behind this finds its classes.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Say what loads it."""
        modules = [module for name, module in sys.modules.items() if name.startswith(OUTSIDE)]
        files = [str(module.__file__) for module in modules]
        return import_plugins, ([file for file in files if Path(file).is_file()],)
