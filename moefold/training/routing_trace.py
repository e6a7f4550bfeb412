"""Analysis of recorded routers' choices: a line of JSON per step and layer. Imports no torch.

N tokens of a step, K places for experts in a row, E experts, U and V distinct token ids of a step.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import log
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from safetensors import SafetensorError, safe_open

BUSIEST_FRACTION = 0.1
"""Fraction of experts, the busiest ones, whose fraction of all choices is reported."""
MAX_EXPERTS = 1 << 16
"""Larger numbers of experts in a recording are refused before anything of that size exists."""
MAX_PLACES = 4096
MAX_ID = 1 << 31
TOKEN = "token"
ID = "id"
CHOICES = "choices"
_LAYER = re.compile(r"layers\.\d{1,9}(\.[A-Za-z0-9_.]{1,80})?")
_FILE = re.compile(r"(\d{1,9})-of-(\d{1,9})")
_INTEGER_TYPES = frozenset({"I8", "I16", "I32", "I64"})


class RoutingError(ValueError):
    """A recording of routers' choices is incomplete or damaged, or of other tokens or layers."""


class RecordedFile:
    """One rank's file of choices; all names, types, shapes and values in it fit each other.

    M tokens of the file, K places of a layer.
    """

    def __init__(self, path: Path, file: Any) -> None:
        self._path = path
        self._file = file
        self.experts = self._read_experts()
        """Number of experts to choose from, by layer of this file."""
        self.token_M = self._integers(TOKEN, 1)
        self.id_M = self._integers(ID, 1)
        if len(self.id_M) != len(self.token_M):
            self._fail(f"has {len(self.token_M)} numbers of tokens and {len(self.id_M)} ids")
        for name, values_M in ((TOKEN, self.token_M), (ID, self.id_M)):
            if len(values_M) and (int(values_M.min()) < 0 or int(values_M.max()) >= MAX_ID):
                self._fail(f"{name} has values outside [0, {MAX_ID})")

    def chosen(self, key: str) -> Any:
        """Return a layer's choices [M, K], each in ``[-1 - experts, experts]``."""
        chosen_MK = self._integers(key, 2)
        experts = self.experts[key]
        rows, places = chosen_MK.shape
        if rows != len(self.token_M) or not 1 <= places <= MAX_PLACES:
            self._fail(
                f"{key} has the shape [{rows}, {places}] for {len(self.token_M)} tokens, which "
                f"have 1 to {MAX_PLACES} places each"
            )
        if rows and (int(chosen_MK.min()) < -1 - experts or int(chosen_MK.max()) > experts):
            self._fail(f"{key} has choices outside [{-1 - experts}, {experts}]")
        return chosen_MK

    def _read_experts(self) -> dict[str, int]:
        stored = json.loads((self._file.metadata() or {})[CHOICES])
        if not isinstance(stored, dict):
            self._fail(f"`{CHOICES}` in its header is not a mapping of layers to numbers")
        for key, number in stored.items():
            if not _LAYER.fullmatch(key):
                self._fail(f"{key[:40]!r} is not the name of a layer, such as 'layers.3'")
            if type(number) is not int or not 1 <= number <= MAX_EXPERTS:
                self._fail(f"{key} has {str(number)[:40]} experts; 1 to {MAX_EXPERTS} are possible")
        return {key: stored[key] for key in sorted(stored.keys() & set(self._file.keys()))}

    def _integers(self, name: str, dims: int) -> Any:
        """Return a tensor of whole numbers, once its header says that it is one."""
        if name not in self._file.keys():  # noqa: SIM118  (the library's object has no `in`)
            self._fail(f"has no tensor `{name}`")
        header = self._file.get_slice(name)
        dtype = header.get_dtype()
        shape = header.get_shape()
        if dtype not in _INTEGER_TYPES or len(shape) != dims:
            self._fail(f"`{name}` is {dtype} {list(shape)}, not whole numbers in {dims} dims")
        return self._file.get_tensor(name)

    def _fail(self, problem: str) -> NoReturn:
        raise RoutingError(f"{self._path}: {problem}; record the choices again")


@contextmanager
def open_recording(path: Path, library: str) -> Iterator[RecordedFile]:
    """Open a file of choices, as arrays of a library of safetensors (``np`` or ``pt``).

    Raises:
        RoutingError: if it is not such a file, or is damaged.
    """
    if not path.is_file():
        raise RoutingError(f"{path}: is not a file")
    try:
        with safe_open(path, library) as file:
            yield RecordedFile(path, file)
    except RoutingError:
        raise
    except (SafetensorError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise RoutingError(f"{path}: not a file of routers' choices: {error}") from error


class LayerChoices(NamedTuple):
    """A layer's choices in a step, ordered by token number."""

    experts: int
    id_N: np.ndarray
    chosen_NK: np.ndarray

    @property
    def expert_NK(self) -> np.ndarray:
        """Chosen experts, dropped ones included; E where a place is empty."""
        return np.where(self.chosen_NK < 0, -1 - self.chosen_NK, self.chosen_NK)

    def by_id(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return how often each token id chose each expert, without the pairs that never occur.

        These are the pairs' ids, ascending, their experts, and the counts.
        """
        size = self.experts + 1
        cell_NK = self.id_N.astype(np.int64).reshape(-1, 1) * size + self.expert_NK
        cells, counts = np.unique(cell_NK, return_counts=True)
        ids, experts = np.divmod(cells, size)
        filled = experts < self.experts
        return ids[filled], experts[filled], counts[filled]

    @property
    def load_E(self) -> np.ndarray:
        """How often each expert was chosen."""
        return np.bincount(self.expert_NK.ravel(), minlength=self.experts + 1)[: self.experts]


def read_step(files: list[Path]) -> dict[str, LayerChoices]:
    """Return a step's choices by layer, from the files of all ranks.

    Raises:
        RoutingError: if a file is damaged, or files disagree about a layer.
    """
    parts = dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]]()
    forms = dict[str, tuple[int, int]]()
    for path in files:
        with open_recording(path, "np") as file:
            for key, experts in file.experts.items():
                chosen_MK = file.chosen(key)
                form = experts, chosen_MK.shape[1]
                if forms.setdefault(key, form) != form:
                    raise RoutingError(
                        f"{path}: {key} chose {form[1]} of {form[0]} experts, but "
                        f"{forms[key][1]} of {forms[key][0]} in another file of the step"
                    )
                parts.setdefault(key, []).append((file.token_M, file.id_M, chosen_MK))
    layers = {}
    for key in sorted(parts, key=lambda key: int(key.split(".")[1])):
        token_N, id_N, chosen_NK = map(np.concatenate, zip(*parts[key], strict=True))
        order_N = token_N.argsort()
        layers[key] = LayerChoices(forms[key][0], id_N[order_N], chosen_NK[order_N])
    return layers


def concentration(layer: LayerChoices) -> dict[str, Any]:
    """Return how evenly experts are chosen: shares, entropy (1 is even), part of the busiest."""
    load_E = layer.load_E
    share_E = load_E / max(load_E.sum(), 1)
    filled = share_E[share_E > 0]
    busiest = np.sort(share_E)[::-1][: max(1, round(BUSIEST_FRACTION * layer.experts))]
    even = log(layer.experts) if layer.experts > 1 else 1.0
    return {
        "load": [round(float(share), 6) for share in share_E],
        "entropy": float(-(filled * np.log(filled)).sum() / even),
        "max_over_mean": float(share_E.max() * layer.experts),
        "busiest_tenth": float(busiest.sum()),
        "dead_experts": int((load_E == 0).sum()),
        "dropped": float((layer.chosen_NK < 0).mean()) if layer.chosen_NK.size else 0.0,
    }


def stability(before: LayerChoices, now: LayerChoices) -> dict[str, float]:
    """Return how much the choices of two steps have in common, as shares.

    ``load_kept`` is the overlap of the loads of both steps. ``choices_kept`` is the overlap of the
    choices of each token id that is in both steps, averaged over its tokens in ``now``;
    ``ids_kept`` is the share of tokens in ``now`` with such an id.
    """
    (id_P, expert_P, count_P) = before.by_id()
    (id_Q, expert_Q, count_Q) = now.by_id()
    size = now.experts + 1
    total_P = _totals(id_P, count_P)
    total_Q = _totals(id_Q, count_Q)
    kept_Q = np.isin(id_Q, id_P)
    _, at_P, at_Q = np.intersect1d(
        id_P * size + expert_P, id_Q * size + expert_Q, assume_unique=True, return_indices=True
    )
    shared = np.minimum(count_P[at_P] / total_P[at_P], count_Q[at_Q] / total_Q[at_Q])
    loads = [load_E / max(load_E.sum(), 1) for load_E in (before.load_E, now.load_E)]
    n_kept = count_Q[kept_Q].sum()
    return {
        "load_kept": float(np.minimum(*loads).sum()),
        "choices_kept": float((shared * total_Q[at_Q]).sum() / max(n_kept, 1)),
        "ids_kept": float(n_kept / max(count_Q.sum(), 1)),
    }


def _totals(ids_P: np.ndarray, counts_P: np.ndarray) -> np.ndarray:
    """Return for each pair the sum of the counts of its id."""
    _, inverse_P = np.unique(ids_P, return_inverse=True)
    return np.bincount(inverse_P, weights=counts_P)[inverse_P]


def iter_figures(folder: Path, tokens: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the figures of each step and layer; with ``tokens`` also each token's experts.

    Raises:
        RoutingError: if the folder holds no recording, or files of a step are missing.
    """
    previous = dict[str, LayerChoices]()
    steps = sorted(path for path in folder.glob("step-*") if path.name[5:].isdecimal())
    if not steps:
        raise RoutingError(f"{folder}: has no steps; train with train.routing.record={folder}")
    for step_folder in steps:
        layers = read_step(step_files(step_folder))
        for key, layer in layers.items():
            if key in previous and previous[key].experts != layer.experts:
                raise RoutingError(
                    f"{step_folder}: {key} has {layer.experts} experts, but "
                    f"{previous[key].experts} in the step before; name a recording of one run"
                )
            line: dict[str, Any] = {"step": int(step_folder.name.split("-")[1]), "layer": key}
            line |= {"tokens": len(layer.id_N), **concentration(layer)}
            line |= stability(previous[key], layer) if key in previous else {}
            if tokens:
                line |= {"ids": layer.id_N.tolist(), "experts": layer.chosen_NK.tolist()}
            yield line
        previous = layers


def step_files(folder: Path) -> list[Path]:
    """Return a step's files, one from each rank; raises ``RoutingError`` if some are missing."""
    paths = sorted(folder.glob("*-of-*.safetensors"))
    named = [_FILE.fullmatch(path.stem) for path in paths]
    places = {(int(match[1]), int(match[2])) for match in named if match}
    sizes = {ranks for _, ranks in places}
    complete = len(sizes) == 1 and len(paths) == max(sizes)
    if not complete or {rank for rank, _ in places} != set(range(len(paths))):
        contents = f"{len(paths)} files of {max(sizes, default=0)} ranks" if paths else "no choices"
        raise RoutingError(
            f"{folder}: has {contents}; name a folder in which train.routing.record has written "
            "every step completely"
        )
    return paths
