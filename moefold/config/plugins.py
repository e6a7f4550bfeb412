"""Plugins: Python files outside the package that register records on import."""

import hashlib
import os
import re
import sys
from collections.abc import Iterable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from moefold.files import path_in_errors

MODULE_PREFIX = "outside_"
"""Prefix of the module names of plugins."""


def import_plugins(paths: Iterable[str | Path]) -> dict[str, str]:
    """Import Python files, which register their records on import.

    A file is imported once per content, under a module name derived from its path and content, and
    stays in ``sys.modules`` so that its classes can be pickled.

    Returns:
        SHA-256 (hex) of each file by absolute path, in order: part of a run's identity.

    Raises:
        ValueError: a file does not exist, is not a ``.py`` file, or fails during import.
    """
    hashes: dict[str, str] = {}
    for path in map(resolve_path, paths):
        if path.suffix != ".py" or not path.is_file():
            problem = "is not a Python file" if path.exists() else "does not exist"
            raise ValueError(f"{path} {problem}")
        with path_in_errors(path):
            content = path.read_bytes()
        hashes[str(path)] = digest = hashlib.sha256(content).hexdigest()
        path_hash = hashlib.sha256(str(path).encode()).hexdigest()
        name = re.sub(r"\W", "_", f"{MODULE_PREFIX}{path.stem}_{path_hash[:8]}_{digest[:8]}")
        if name in sys.modules:
            continue
        spec = spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = module_from_spec(spec)
        try:
            exec(compile(content, str(path), "exec"), module.__dict__)
        except Exception as error:
            del sys.modules[name]
            message = f"{type(error).__name__}: {error}"
            raise ValueError(f"{path} failed while it was imported: {message}") from error
    return hashes


def plugin_hash(cls: type) -> list[str]:
    """Return the content hash of the plugin that defines a class; empty for other classes."""
    module = cls.__module__
    return [module.rpartition("_")[2]] if module.startswith(MODULE_PREFIX) else []


def resolve_path(path: str | Path, relative_to: str | Path = ".") -> Path:
    """Return the absolute path for a path relative to a folder; ``~`` is the home folder."""
    # Unlike pathlib, os.path accepts unknown users' homes and circular links.
    return Path(os.path.realpath(Path(relative_to, os.path.expanduser(path))))


class PluginImports:
    """Imports the pickling process's plugins when unpickled.

    Pickle loads objects in the order of writing, so later objects find their classes.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a call of :func:`import_plugins` with the files that still exist."""
        modules = [module for name, module in sys.modules.items() if name.startswith(MODULE_PREFIX)]
        files = [str(module.__file__) for module in modules]
        return import_plugins, ([file for file in files if Path(file).is_file()],)
