"""Plots of a run: ``loss.png``, ``expert_load.png`` and ``moved.png``.

L layers, E experts in the layer with the most.
"""

from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from torch import Tensor

from moefold.checkpoint.load import Reader
from moefold.spec.decoder import LORA_A, LORA_B
from moefold.training.formatting import count
from moefold.training.hooks.base import Figures, Hook, JobView
from moefold.training.hooks.config import Plots
from moefold.training.model_checkpoint import ModelTensors
from moefold.training.report import loss_chart, loss_unit
from moefold.training.run_folder import History, evenly_spaced

INK = "#1f2430"
SOFT = "#7b8496"
TRAIN = "#4c78d8"
HELD_OUT = "#d1495b"
MAX_PANELS = 8
"""Maximum number of layers whose loads are plotted over time."""
AVERAGED_CHECKS = 20
"""Number of newest checks whose mean is plotted as the current load."""


class PlotsHook(Hook):
    """Plots from the files in the run's folder, so that a resumed run shows its whole past."""

    def __init__(self, record: Plots) -> None:
        self._every = record.every

    def on_step(self, job: JobView, metrics: Figures) -> None:
        """Plot if the step is due."""
        if job.step_number % self._every == 0 and job.step_number < job.last_step:
            draw_plots(job.folder)

    def on_stop(self, job: JobView, error: BaseException | None) -> None:
        """Plot the end of the run, however it ended, except after Ctrl-C."""
        if not isinstance(error, KeyboardInterrupt):
            draw_plots(job.folder)


def draw_plots(folder: Path) -> list[Path]:
    """Write every plot for which the folder's files have data; return the paths.

    Titles name the folder: runs that fine-tune one base are all named after it.
    """
    history = History.read(folder)
    title = folder.resolve().name
    paths = []
    figures = {"loss": loss_figure(history, title), "expert_load": load_figure(history, title)}
    for name, figure in figures.items():
        if figure is not None:
            path = folder / f"{name}.png"
            part = folder / f".{name}.part.png"
            figure.savefig(part, dpi=144)
            part.replace(path)
            paths.append(path)
    return paths


def loss_figure(history: History, title: str) -> Figure | None:
    """Plot training and held-out loss, in bits per byte where bytes were measured."""
    chart = loss_chart(history)
    train, *held_out_lines = chart["lines"]
    steps = train["x"]
    smooth = train.get("smooth", train["y"])
    if len(steps) < 2:
        return None
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, train["y"], color=TRAIN, alpha=0.22, linewidth=0.8)
    axes.plot(steps, smooth, color=TRAIN, linewidth=1.8, label=train["name"])
    ends = [(train["name"], smooth[-1], TRAIN)]
    start_values = list[float]()
    for line in held_out_lines:
        if line["x"]:
            style = {"color": HELD_OUT, "markersize": 3.5, "linewidth": 1.8}
            axes.plot(line["x"], line["y"], "o-", **style)
            name = line["name"] if len(held_out_lines) > 1 else "held out"
            if line["x"][0] == 0:
                start_values.append(1.02 * line["y"][0])
                name += f" {line['y'][0]:.2f} →"
            ends.append((name, line["y"][-1], HELD_OUT))
    for name, value in chart["marks"]:
        axes.axhline(value, color=SOFT, linestyle=(0, (4, 3)), linewidth=1.1)
        ends.append((name, value, SOFT))
    # The loss of the first steps would compress everything of interest at the bottom.
    top = max([smooth[len(smooth) // 25], *(1.12 * v for _, v, _ in ends), *start_values])
    low = min([*smooth, *(v for _, v, _ in ends)])
    highest = max(*(v for line in chart["lines"] for v in line["y"]), *(v for _, v, _ in ends))
    if highest > low:
        top = min(top, highest + 0.06 * (highest - low))
    axes.set_ylim(low - 0.06 * (top - low), top)
    axes.set_xlim(0, steps[-1])
    axes.locator_params(axis="x", integer=True)
    _label_ends(axes, ends)
    tokens = history.lines[-1].get("tokens")
    after = f" ({count(tokens)} tokens)" if tokens else ""
    axes.set_xlabel(f"step{after}", color=INK)
    axes.set_ylabel(loss_unit(history), color=INK)
    _finish(axes, f"{title}: loss")
    return figure


def load_figure(history: History, title: str) -> Figure | None:
    """Plot each expert's load: the current one of every layer, and that of some over time."""
    if (loads := history.load()) is None:
        return None
    steps, layers, load = loads
    panels = min(len(layers), MAX_PANELS)
    shown_layers = [round(number) for number in np.linspace(0, len(layers) - 1, panels)]
    columns = min(len(shown_layers), 4)
    rows = -(-len(shown_layers) // columns)
    heights = [0.9 + max(1.2, 0.28 * len(layers)), 1.8 * rows]
    figure = Figure(figsize=(10, sum(heights)), layout="constrained")
    (current_panel,), (over_time,) = figure.subfigures(2, 1, squeeze=False, height_ratios=heights)
    peak = float(np.nanpercentile(load, 99.5))
    norm = TwoSlopeNorm(1.0, 0.0, max(peak, 1.5))
    axes = current_panel.add_subplot()
    current = np.ma.masked_invalid(load[-AVERAGED_CHECKS:]).mean(axis=0)
    image = _draw_heat_map(axes, current, layers, norm)
    _finish(axes, f"{title}: load of each expert, step {steps[-1]}", grid=False)
    bar = current_panel.colorbar(image, ax=axes, pad=0.01, fraction=0.05, aspect=7 * heights[0])
    bar.set_label("load over the mean", color=INK)
    bar.outline.set_visible(False)
    shown_checks = evenly_spaced(steps)
    grid = over_time.subplots(rows, columns, squeeze=False, sharey=True)
    for number, panel in enumerate(grid.flat):
        if number >= len(shown_layers):
            panel.set_visible(False)
            continue
        index = shown_layers[number]
        # Nearest, so that no check is blended with its neighbours.
        panel.imshow(
            load[shown_checks, index].T, aspect="auto", norm=norm, cmap="PuOr_r",
            interpolation="nearest",
            extent=(steps[0], max(steps[-1], steps[0] + 1), load.shape[2] - 0.5, -0.5),
        )  # fmt: skip
        panel.locator_params(axis="x", integer=True)
        if len(steps) == 1:
            panel.set_xticks(steps)
        _finish(panel, f"layer {layers[index]} over steps", grid=False, size=9)
        if number % columns == 0:
            panel.set_ylabel("expert", color=INK)
    return figure


def adapter_changes(tensors: ModelTensors) -> tuple[list[str], np.ndarray]:
    """Return layers [L], and ``|scale * B A| / |W|`` [L, E] over all matrices of each expert.

    Norms are Frobenius norms; that of the product is computed from ``B^T B`` and ``A A^T``. Layers
    with fewer than E experts are padded with NaN.
    """
    squares: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, scale in tensors.scales.items():
        layer, _, weight = name.removeprefix("layers.").partition(".")
        if "experts" not in weight.split("."):
            continue
        a, b = (tensors.stored(name + end).double() for end in (LORA_A, LORA_B))
        b = b.flatten(1, -2)
        product_E = scale**2 * ((b.mT @ b) * (a @ a.mT)).sum((1, 2)).clamp(min=0)
        weight_E = tensors.stored(name).double().flatten(1).square().sum(1)
        squares.setdefault(layer, []).append((product_E, weight_E))
    layers = sorted(squares, key=int)
    shares: list[Tensor] = []
    for pairs in map(squares.__getitem__, layers):
        product_E, weight_E = (torch.stack(parts).sum(0) for parts in zip(*pairs, strict=True))
        shares.append((product_E / weight_E).sqrt())
    out = np.full((len(layers), max(map(len, shares), default=0)), np.nan)
    for row, share_E in zip(out, shares, strict=True):
        row[: len(share_E)] = share_E.numpy()
    return layers, out


def draw_adapter_changes(checkpoint: Path, path: Path, title: str) -> bool:
    """Plot how far adapters moved a checkpoint's experts; return whether any expert has one."""
    with Reader(checkpoint) as reader:
        layers, shares = adapter_changes(
            ModelTensors(reader, reader.manifest.meta.get("adapters", {}))
        )
    if not layers:
        return False
    figure = Figure(figsize=(9, 0.9 + max(1.2, 0.28 * len(layers))), layout="constrained")
    percent = np.ma.masked_invalid(100 * shares)
    low = float(percent.min())
    high = float(percent.max())
    norm = TwoSlopeNorm(float(np.ma.mean(percent)), low - 1e-9, high + 1e-9)
    axes = figure.add_subplot()
    image = _draw_heat_map(axes, percent, layers, norm)
    _finish(axes, f"{title}: change of each expert by adapters", grid=False)
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.05)
    bar.set_label("% of its weights' norm", color=INK)
    bar.outline.set_visible(False)
    figure.savefig(path, dpi=144)
    return True


def _draw_heat_map(axes: Axes, load: np.ma.MaskedArray, layers: list[str], norm: TwoSlopeNorm):
    image = axes.imshow(load, aspect="auto", norm=norm, cmap="PuOr_r", interpolation="nearest")
    axes.set_xlabel("expert", color=INK)
    axes.set_ylabel("layer", color=INK)
    ticks = range(0, len(layers), -(-len(layers) // 16))
    axes.set_yticks(ticks, [layers[i] for i in ticks])
    if load.shape[1] <= 16:
        axes.set_xticks(range(load.shape[1]))
        for (row, column), value in np.ma.ndenumerate(load):
            if value is not np.ma.masked:
                dark = norm(value) < 0.2 or norm(value) > 0.8
                colour = "white" if dark else INK
                axes.text(
                    column, row, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8
                )
    return image


def _label_ends(axes: Axes, ends: list[tuple[str, float, str]]) -> None:
    """Write each line's name and end value to the right of the axes, pushed apart."""
    low, high = axes.get_ylim()
    gap = 0.055 * (high - low)
    sorted_ends = sorted(ends, key=lambda end: end[1])
    positions = [value for _, value, _ in sorted_ends]
    for i in range(1, len(positions)):
        positions[i] = max(positions[i], positions[i - 1] + gap)
    for (name, value, colour), y in zip(sorted_ends, positions, strict=True):
        axes.annotate(
            f"{name} {value:.2f}", (1.01, y), xycoords=("axes fraction", "data"), va="center",
            color=colour, fontsize=9.5, fontweight="bold" if colour == HELD_OUT else None,
            annotation_clip=False,
        )  # fmt: skip


def _finish(axes: Axes, title: str, grid: bool = True, size: float = 12) -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=size, fontweight="bold")
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(grid and side in ("left", "bottom"))
        axes.spines[side].set_color(SOFT)
    axes.tick_params(colors=SOFT, labelcolor=INK, labelsize=9, length=3 if grid else 0)
    if grid:
        axes.grid(axis="y", color="#e6e8ee", linewidth=0.8)
        axes.set_axisbelow(True)
