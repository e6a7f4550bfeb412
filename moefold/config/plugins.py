"""Plugins: import of Python files outside the package that register records."""

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
"""Prefix of the module names of plugins."""


def import_plugins(paths: Iterable[str | Path]) -> dict[str, str]:
    """Import Python files, which register their records on import.

    A file is imported once per content, under a module name made from its path and content, and
    stays in ``sys.modules`` so that its classes can be pickled.

    Returns:
        SHA-256 (hex) of each file by absolute path, in order; they are part of a run's identity.

    Raises:
        ValueError: a file does not exist, is no ``.py`` file, or fails during its import.
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
    """Return the content hash of the plugin that defines a class; empty for other classes."""
    module = part.__module__
    return [module.rpartition("_")[2]] if module.startswith(OUTSIDE) else []


def resolve(path: str | Path, relative_to: str | Path = ".") -> Path:
    """Return the absolute form of a path relative to a folder; ``~`` is the home folder."""
    # Unlike pathlib, os.path accepts the home of an unknown user and circular links.
    return Path(os.path.realpath(Path(relative_to, os.path.expanduser(path))))


class PluginImports:
    """Object whose unpickling imports the plugins of the process that pickled it.

    Pickle loads objects in the order of writing: those after this one find their classes.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a call of :func:`import_plugins` with the files that still exist."""
        modules = [module for name, module in sys.modules.items() if name.startswith(OUTSIDE)]
        files = [str(module.__file__) for module in modules]
        return import_plugins, ([file for file in files if Path(file).is_file()],)
