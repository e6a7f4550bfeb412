"""Pictures of a run: they open, and show what was written."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from moefold.training.hooks import plots
from moefold.training.hooks.plots import HELD_OUT, TRAIN, draw_plots, load_figure, loss_figure
from moefold.training.run_folder import BASELINES_FILE, LOAD_FILE, METRICS_FILE, History


def write(folder: Path, steps: int = 60, layers: int = 3, experts: int = 4) -> History:
    """Write what a run of some steps writes, and read it back."""
    lines = []
    for step in range(1, steps + 1):
        line = {"step": step, "tokens": 100 * step, "lm_loss": 2.0 + 4.0 / step}
        if step % 20 == 0:
            line |= {"val_loss": 2.0 + 2.0 / step, "val/code/loss": 2.0 + 2.0 / step}
            line |= {"val/code/bits_per_byte": 1.0 + 1.0 / step}
        lines.append(line)
    load = {str(i): [0.4] + [0.6 / (experts - 1)] * (experts - 1) for i in range(layers)}
    loads = [{"step": step, "load": load} for step in range(10, steps + 1, 10)]
    for name, content in ((METRICS_FILE, lines), (LOAD_FILE, loads)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in content))
    (folder / BASELINES_FILE).write_text('{"bigram": 2.6, "xz": 1.8}')
    return History.read(folder)


def share_of(picture: np.ndarray, colour: str) -> float:
    """Share of the pixels that are about of a colour."""
    return float((np.abs(picture[:, :, :3] - to_rgb(colour)).max(axis=2) < 0.04).mean())


def test_pictures_open_and_have_their_curves(tmp_path: Path) -> None:
    """Both curves are there in their colours, and no draft is left."""
    write(tmp_path)
    drawn = draw_plots(tmp_path)
    assert [path.name for path in drawn] == ["loss.png", "expert_load.png"]
    picture = imread(drawn[0])
    assert picture.shape[0] > 500 and picture.shape[1] > 1000
    assert share_of(picture, TRAIN) > 1e-3 and share_of(picture, HELD_OUT) > 1e-3
    assert imread(drawn[1]).std() > 0.05
    assert {path.name for path in tmp_path.glob("*.png")} == {path.name for path in drawn}


def test_pictures_name_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that fine-tune one base have its name."""
    titles: list[str] = []
    for figure in ("loss_figure", "load_figure"):
        monkeypatch.setattr(plots, figure, lambda history, title: titles.append(title))
    (tmp_path / "tuned").mkdir()
    write(tmp_path / "tuned")
    monkeypatch.chdir(tmp_path / "tuned")
    assert draw_plots(Path(".")) == [] and titles == ["tuned", "tuned"]


def test_pictures_of_few_steps_are_filled_and_name_whole_steps(tmp_path: Path) -> None:
    """What falls little still fills the picture; no step is a fraction, none is to come."""
    lines = [{"step": step, "lm_loss": 6.0 - step / 100} for step in (1, 2, 3, 4)]
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    loads = {"step": 4, "load": {"0": [0.5, 0.5]}}
    (tmp_path / LOAD_FILE).write_text(json.dumps(loads) + "\n")
    history = History.read(tmp_path)
    figure, load = loss_figure(history, "trial"), load_figure(history, "trial")
    assert figure is not None and load is not None
    (axes,) = figure.axes
    assert axes.get_ylim()[1] == pytest.approx(5.99, abs=0.01)
    assert all(tick == round(tick) for tick in axes.get_xticks())
    assert load.axes[-1].get_xticks().tolist() == [4]


def test_the_loss_is_drawn_in_bits_per_byte(tmp_path: Path) -> None:
    """2 nats were measured as 1 bit per byte; the baselines are level lines."""
    figure = loss_figure(write(tmp_path), "trial")
    assert figure is not None
    (axes,) = figure.axes
    raw, _, held_out, bigram, xz = axes.get_lines()
    assert axes.get_ylabel() == "bits per byte"
    assert np.asarray(raw.get_ydata())[0] == pytest.approx(3.0)
    assert np.asarray(held_out.get_xdata()).tolist() == [20, 40, 60]
    assert set(np.asarray(bigram.get_ydata())) == {2.6} and set(np.asarray(xz.get_ydata())) == {1.8}
    texts = {text.get_text() for text in axes.texts}
    assert {"bigram table 2.60", "xz -9e 1.80", "held out 1.02"} <= texts


def test_without_held_out_text_the_loss_is_drawn_in_nats(tmp_path: Path) -> None:
    """Baselines are in bits per byte and are left out."""
    history = History([{"step": s, "lm_loss": 5.0} for s in (1, 2, 3)], baselines={"xz": 1.8})
    figure = loss_figure(history, "trial")
    assert figure is not None and figure.axes[0].get_ylabel() == "nats per token"
    assert len(figure.axes[0].get_lines()) == 2


def test_another_loss_than_the_held_out_texts_is_named_and_has_no_bits(tmp_path: Path) -> None:
    """A divergence from a teacher of 0.1 nats is not 0.05 bits per byte of any text."""
    history = replace(write(tmp_path), events=[{"event": "start", "loss": "distill"}])
    figure = loss_figure(history, "trial")
    assert figure is not None and figure.axes[0].get_ylabel() == "nats per token"
    texts = {text.get_text() for text in figure.axes[0].texts}
    assert {"training (distill) 2.07", "held out 2.03"} <= texts


def test_there_is_no_picture_of_nothing(tmp_path: Path) -> None:
    """One step is no curve; a model without experts has no load; NaN is no point."""
    assert loss_figure(History([{"step": 1, "lm_loss": 5.0}]), "a") is None
    assert loss_figure(History([{"step": s, "lm_loss": None} for s in (1, 2, 3)]), "a") is None
    assert load_figure(History(), "a") is None
    assert draw_plots(tmp_path) == []


def test_a_check_stands_at_its_step_however_far_the_next_one_is(tmp_path: Path) -> None:
    """Ten steps apart, then a hundred: the last of the first ones is near the picture's left."""
    steps = [*range(10, 60, 10), *range(150, 550, 100)]
    loads = [{"step": step, "load": {"0": [step / 1000, 1 - step / 1000]}} for step in steps]
    (tmp_path / LOAD_FILE).write_text("".join(json.dumps(line) + "\n" for line in loads))
    figure = load_figure(History.read(tmp_path), "trial")
    assert figure is not None
    shown = np.asarray(figure.axes[-1].get_images()[0].get_array())[0] / 2
    assert shown.shape == (45,), "as many columns as the smallest gap asks for"
    for column, share in enumerate(shown):
        step = 10 + 10 * column
        assert abs(1000 * share - step) == pytest.approx(min(abs(s - step) for s in steps))


def test_the_heat_map_has_a_row_per_layer(tmp_path: Path) -> None:
    """Values are shares of a fair load: 0.4 of 4 experts is 1.6."""
    figure = load_figure(write(tmp_path, layers=30), "trial")
    assert figure is not None
    now, *over_time = [axes for axes in figure.axes if axes.get_images()]
    values = np.asarray(now.get_images()[0].get_array())
    assert values.shape == (30, 4) and values[7, 0] == pytest.approx(1.6)
    assert len(over_time) == 8
    assert over_time[-1].get_title(loc="left") == "layer 29 over steps"
