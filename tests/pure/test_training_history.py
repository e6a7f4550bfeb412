"""A run's past read back, and the page made of it."""

import base64
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moefold.cli.main import main
from moefold.training.report import MAX_POINTS, render_report, summary
from moefold.training.run_folder import (
    BASELINES_FILE,
    EVENTS_FILE,
    LOAD_FILE,
    METRICS_FILE,
    Curve,
    History,
    log_event,
)


def line(step: int, **more: Any) -> dict[str, Any]:
    """One step's figures."""
    return {"step": step, "tokens": 100 * step, "lm_loss": 4.0, "step_time_s": 2.0, **more}


def history(**more: Any) -> History:
    """Four steps, evaluated at the second and the fourth."""
    second = line(2, val_loss=3.0, **held_out("code", 3.0, 1.5))
    last = line(4, val_loss=2.0, **held_out("code", 2.0, 1.25))
    return History([line(1), second, line(3), last], **more)


def held_out(name: str, loss: float, bits: float) -> dict[str, float]:
    """What an evaluation says of one held-out set."""
    return {f"val/{name}/loss": loss, f"val/{name}/bits_per_byte": bits}


class Page(HTMLParser):
    """What a page holds: its data, and whatever it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.data: Any = None
        self.fetched: list[str] = []
        self.headings: list[str] = []
        self._inside: tuple[str, str | None] = ("", None)
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self._inside = (tag, given.get("id"))
        self.fetched += [f"{tag} {v}" for k, v in attrs if k in ("src", "href") and v]

    def handle_endtag(self, tag: str) -> None:
        self._inside = ("", None)

    def handle_data(self, data: str) -> None:
        if self._inside == ("script", "data"):
            self.data = json.loads(data)
        elif self._inside[0] == "h1":
            self.headings.append(data)


def test_an_empty_folder_is_an_empty_history(tmp_path: Path) -> None:
    """Nothing is invented."""
    found = History.read(tmp_path)
    assert found == History() and found.load() is None and len(found.curve("lm_loss")) == 0
    with pytest.raises(ValueError, match="no metrics yet"):
        summary(found)


def test_a_folder_is_read_back(tmp_path: Path) -> None:
    """Baselines come from their file."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lm_loss": null}\n{"step": 2')
    (tmp_path / BASELINES_FILE).write_text('{"xz": 1.8}')
    found = History.read(tmp_path)
    assert len(found.lines) == 1 and np.isnan(found.curve("lm_loss").values[-1])
    assert found.baselines == {"xz": 1.8}


def test_bits_per_byte_come_from_the_newest_evaluation() -> None:
    """2 nats a token are 1.25 bits per byte there."""
    assert history().bits_per_byte_per_nat() == pytest.approx(1.25 / 2.0)
    assert History([line(1)]).bits_per_byte_per_nat() is None


def test_the_bits_per_byte_of_several_sets_hang_on_none_of_their_losses() -> None:
    """A hard set of few tokens and an easy one of many: 0.5 and 0.4 bits per byte for a nat."""
    both = held_out("hard", 4.0, 2.0) | held_out("easy", 1.0, 0.4)
    found = History([line(1, val_loss=1.1, **both)])
    assert found.bits_per_byte_per_nat() == pytest.approx(0.45)


def test_smoothing_follows_and_passes_over_gaps() -> None:
    """A constant stays itself; NaN neither spreads nor counts."""
    values = np.array([2.0, np.nan, 2.0, 2.0])
    assert Curve(np.arange(4), values).smooth(10).tolist() == [2.0] * 4
    steps = np.concatenate([np.zeros(200), np.ones(200)])
    smooth = Curve(np.arange(400), steps).smooth(20)
    assert smooth[199] == 0 and 0.55 < smooth[219] < 0.7 and smooth[399] > 0.999


def test_layers_of_other_widths_stand_beside_each_other() -> None:
    """1 is a fair share in each; layers are sorted as numbers."""
    loads = [{"step": 5, "load": {"10": [0.5, 0.5], "2": [0.25, 0.25, 0.5, 0.0]}}]
    found = History(loads=loads).load()
    assert found is not None
    _, layers, load = found
    assert layers == ["2", "10"]
    assert load[0, 0].tolist() == [1.0, 1.0, 2.0, 0.0]
    assert load[0, 1, :2].tolist() == [1.0, 1.0] and np.isnan(load[0, 1, 2:]).all()


def test_goodput_counts_standstill_and_steps_done_twice() -> None:
    """4 steps of 2 s, in 16 s since the first start."""
    events = [
        {"event": "start", "time": 100.0, "step": 0},
        {"event": "start", "time": 109.0, "step": 2},
        {"event": "stop", "time": 116.0, "step": 4},
    ]
    facts = summary(history(events=events))
    assert facts["restarts"] == 1 and facts["goodput"] == pytest.approx(0.5)
    assert facts["wall_s"] == 16.0


def test_a_run_still_going_is_as_old_as_its_steps() -> None:
    """Without a stop the newest event is the start; the steps since then took time too."""
    facts = summary(history(events=[{"event": "start", "time": 100.0, "step": 0}]))
    assert facts["wall_s"] == 8.0 and facts["goodput"] == 1.0


def test_the_page_holds_everything_and_fetches_nothing() -> None:
    """Curves, marks, loads; a name with markup stays text."""
    loads = [{"step": s, "load": {"0": [0.25, 0.75]}} for s in (2, 4)]
    text = render_report(history(loads=loads, baselines={"bigram": 2.6}), "<b>run</b>", "runs/x")
    found = Page(text)
    assert found.fetched == [] and "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert found.headings == ["<b>run</b>"]
    charts = {chart["title"]: chart for chart in found.data["charts"]}
    loss = charts["Loss, bits per byte"]
    assert [entry["name"] for entry in loss["lines"]] == ["training", "code"]
    assert loss["lines"][0]["y"] == [2.5] * 4  # 4 nats at 1.25 / 2 bits per byte each
    assert loss["lines"][1]["x"] == [2, 4] and loss["marks"] == [["bigram table", 2.6]]
    heat = found.data["heat"]
    codes = np.frombuffer(base64.b64decode(heat["codes"]), np.uint8).reshape(heat["shape"])
    assert codes.tolist() == [[[32, 96]]] * 2
    assert ["1.250", "bits per byte, code"] in found.data["cards"]


def test_long_curves_are_thinned_to_their_means() -> None:
    """The page stays small however long the run."""
    steps = 10 * MAX_POINTS + 3
    lines = [line(s + 1, grad_norm=float(s % 2)) for s in range(steps)]
    charts = {c["title"]: c for c in Page(render_report(History(lines), "a", "b")).data["charts"]}
    (entry,) = charts["Gradient norm"]["lines"]
    assert len(entry["x"]) <= MAX_POINTS and entry["x"][-1] == steps
    assert set(np.round(entry["y"][:-1], 1)) <= {0.4, 0.5, 0.6}


def test_a_run_without_experts_or_bytes_has_a_page_too() -> None:
    """Nats, and no heat map."""
    found = Page(render_report(History([line(1, val_loss=3.0), line(2)]), "a", "b")).data
    assert found["heat"] is None
    assert found["charts"][0]["title"] == "Loss, nats per token"


def test_a_utilisation_above_one_is_not_shown(tmp_path: Path) -> None:
    """Folders of earlier versions hold such figures."""
    lines = [line(1, mfu=3.37), line(2, mfu=0.4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert summary(History.read(tmp_path))["median_mfu"] == 0.4


def test_what_is_no_number_is_no_figure(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_text('{"step": 1, "val_loss": [], "mfu": "x", "lr": null}\n')
    assert History.read(tmp_path).lines == [{"step": 1, "lr": None}]


@pytest.mark.parametrize("load", ["[]", "3", '{"0": 3}', '{"0": ["a"]}'])
def test_loads_that_are_no_shares_are_named(tmp_path: Path, load: str) -> None:
    (tmp_path / LOAD_FILE).write_text(f'{{"step": 4, "load": {load}}}\n')
    with pytest.raises(ValueError, match=r"expert_load\.jsonl, step 4: load must map each layer"):
        History.read(tmp_path)


def test_figures_that_are_not_finite_keep_no_answer_from_being_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A skipped step has no loss, and a run whose weights are not finite no bits per byte."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is not JSON")

    bad = line(1, val_loss=None, **{"val/code/bits_per_byte": None}) | {"lm_loss": None}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(bad) + "\n")
    assert main(["report", str(tmp_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert facts["lm_loss"] is facts["val/code/bits_per_byte"] is None
    assert "best_step/code" not in facts
    assert Page(render_report(History([bad]), "a", "b")).data["cards"]
    log_event(tmp_path, "spike", grad_norm=float("nan"))
    (event,) = (tmp_path / EVENTS_FILE).read_text().splitlines()
    assert json.loads(event, parse_constant=refuse)["grad_norm"] is None


def test_a_loss_of_pairs_is_no_loss_of_tokens() -> None:
    history_of_pairs = History([line(1, **{"preference/margin": 0.0}), line(2)])
    found = Page(render_report(history_of_pairs, "a", "b")).data
    assert found["charts"][0]["title"] == "Loss, per pair"
