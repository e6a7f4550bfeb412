"""Analysis of recorded routers' choices: a line of JSON per step and layer. Imports no torch.

N tokens of a step, K places for experts in a row, E experts, U and V distinct token ids of a step.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

BUSIEST_FRACTION = 0.1
"""Fraction of experts, the busiest ones, whose fraction of all choices is reported."""


class RoutingError(ValueError):
    """A recording of routers' choices is incomplete, or of other tokens or layers."""


@contextmanager
def open_recording(path: Path, library: str) -> Iterator[tuple[Any, dict[str, int]]]:
    """Open a file of choices; also yield the number of experts to choose from, by layer.

    Raises:
        RoutingError: if it is not such a file, or is damaged.
    """
    try:
        with safe_open(path, library) as file:
            yield file, json.loads(file.metadata()["choices"])
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
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

    def by_id(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct ids [U], and how often each chose each expert [U, E]."""
        known_U, at_N = np.unique(self.id_N, return_inverse=True)
        size = self.experts + 1
        cell_NK = at_N.reshape(-1, 1) * size + self.expert_NK
        counts = np.bincount(cell_NK.ravel(), minlength=len(known_U) * size)
        return known_U, counts.reshape(len(known_U), size)[:, :-1]


def read_step(files: list[Path]) -> dict[str, LayerChoices]:
    """Return a step's choices by layer, from the files of all ranks."""
    parts = dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]]()
    experts = dict[str, int]()
    for path in files:
        with open_recording(path, "np") as (file, choices):
            token_N, id_N = file.get_tensor("token"), file.get_tensor("id")
            for key in choices.keys() & set(file.keys()):
                experts[key] = choices[key]
                parts.setdefault(key, []).append((token_N, id_N, file.get_tensor(key)))
    layers = {}
    for key in sorted(parts, key=lambda key: int(key.split(".")[1])):
        token_N, id_N, chosen_NK = map(np.concatenate, zip(*parts[key], strict=True))
        order_N = token_N.argsort()
        layers[key] = LayerChoices(experts[key], id_N[order_N], chosen_NK[order_N])
    return layers


def concentration(layer: LayerChoices) -> dict[str, Any]:
    """Return how evenly experts are chosen: shares, entropy (1 is even), part of the busiest."""
    load_E = np.bincount(layer.expert_NK.ravel(), minlength=layer.experts + 1)[: layer.experts]
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
        "dropped": float((layer.chosen_NK < 0).mean()),
    }


def stability(before: LayerChoices, now: LayerChoices) -> dict[str, float]:
    """Return how much the choices of two steps have in common, as shares.

    ``load_kept`` is the overlap of the loads of both steps. ``choices_kept`` is the overlap of the
    choices of each token id that is in both steps, averaged over its tokens in ``now``;
    ``ids_kept`` is the share of tokens in ``now`` with such an id.
    """
    (ids_U, counts_UE), (ids_V, counts_VE) = before.by_id(), now.by_id()
    _, at_U, at_V = np.intersect1d(ids_U, ids_V, assume_unique=True, return_indices=True)

    def overlap(*counts: np.ndarray) -> np.ndarray:
        shares = [count / count.sum(-1, keepdims=True).clip(1) for count in counts]
        return np.minimum(*shares).sum(-1)

    weight_V = counts_VE[at_V].sum(1)
    kept_V = overlap(counts_UE[at_U], counts_VE[at_V])
    return {
        "load_kept": float(overlap(counts_UE.sum(0), counts_VE.sum(0))),
        "choices_kept": float((kept_V * weight_V).sum() / max(weight_V.sum(), 1)),
        "ids_kept": float(weight_V.sum() / max(counts_VE.sum(), 1)),
    }


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
    ranks = {int(path.stem.rpartition("-")[2]) for path in paths}
    if len(ranks) != 1 or len(paths) != max(ranks):
        contents = f"{len(paths)} files of {max(ranks)} ranks" if paths else "no choices"
        raise RoutingError(
            f"{folder}: has {contents}; name a folder in which train.routing.record has written "
            "every step completely"
        )
    return paths
