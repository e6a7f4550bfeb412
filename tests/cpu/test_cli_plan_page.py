"""The pages of ``moefold plan``: in a browser every tab works by a click at two sizes, and a served
page answers; without one, the server refuses what is not its own page.
"""

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import matplotlib.image
import pytest
from planning.chromium import BROWSER, Chromium

from moefold.cli.main import main

in_a_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium")

TABS = ("Overview", "Grids", "Memory", "Time", "Pipeline", "Imbalance", "Scaling")
SIZES = ((1280, 900), (420, 900))
# Clicks through all tabs and layouts, and returns what it saw.
CLICKS = """(async () => {
const seen = [];
const wait = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
// Tables whose last column is out of reach even when they are scrolled to their end.
const cutTables = (main) => [...main.querySelectorAll("table")].filter((one) => {
  const frame = one.closest(".scroll") || one.parentElement;
  frame.scrollLeft = 1e6;
  const right = (what) => what.getBoundingClientRect().right;
  const last = [...one.querySelectorAll("tr > *:last-child")].map(right);
  const beyond = Math.max(...last) - right(frame);
  frame.scrollLeft = 0;
  const hidden = frame.scrollWidth > frame.clientWidth + 1;
  return beyond > 1 || (hidden && frame.tabIndex !== 0);
}).length;
for (const name of [...document.querySelectorAll("#which button")].map((one) => one.dataset.name)) {
  document.querySelector(`#which button[data-name="${name}"]`).click();
  for (const button of [...document.querySelectorAll("nav button")]) {
    button.click();
    await wait();
    const main = document.getElementById("main");
    const all = (what) => main.querySelectorAll(what).length;
    const layout = document.querySelector(`#which button[data-name="${name}"]`);
    seen.push({
      layout: name, tab: button.textContent,
      shown: document.body.dataset.tab, pressed: layout.getAttribute("aria-pressed"),
      text: main.innerText.length, heads: all("h2"), tables: all("table"),
      marks: all("svg rect, svg path, .cells div"),
      bad: /NaN|undefined|null|Infinity/.test(main.innerText.replace(/recompute: null/g, "")),
      cut: cutTables(main),
      wide: document.documentElement.scrollWidth - innerWidth });
  }
}
document.querySelector("nav button").click();
return seen;
})()"""
# Settles when the form's answer is complete or refused.
ANSWERED = """new Promise((done) => {
  const look = () => ["done", "refused", "failed"].includes(document.body.dataset.answer)
    ? done(document.body.dataset.answer) : setTimeout(look, 20);
  look();
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with Chromium() as one:
        yield one


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    words = ["plan", "tiny", "--cluster", "h100x8", "--batch", "32", "--layout", "pp2 ep2"]
    assert main([*words, "--html", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "moefold", "plan", "tiny", "--cluster", "h100x2"]
    command += ["--serve", "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    yield server.stdout.readline().strip()
    server.terminate()
    server.stdout.close()
    server.wait()


def seen_by_clicks(browser: Chromium) -> list[dict[str, Any]]:
    """Click through a page; check what holds of every tab."""
    seen = browser.run(CLICKS)
    layouts = {one["layout"] for one in seen}
    assert {one["tab"] for one in seen} == set(TABS)
    assert len(seen) == len(layouts) * len(TABS), "each tab of each layout once"
    for one in seen:
        assert one["shown"] == one["tab"] and one["pressed"] == "true", one
        assert one["heads"] and one["text"] > 40 and one["marks"] + one["tables"] > 0, one
        assert not one["bad"], one
        assert not one["cut"], f"a table is cut rather than scrolled: {one}"
        assert one["wide"] <= 0, f"wider than the window: {one}"
    return seen


@in_a_browser
def test_every_tab_works_by_a_click(page: Path, browser: Chromium) -> None:
    for width, height in SIZES:
        browser.open(f"file://{page}", width, height)
        layouts = {one["layout"] for one in seen_by_clicks(browser)}
        assert layouts >= {"given", "fastest"}


@in_a_browser
@pytest.mark.parametrize(("theme", "size"), [("light", SIZES[0]), ("dark", SIZES[1])])
def test_it_can_be_seen_at_two_sizes(
    page: Path, browser: Chromium, theme: str, size: tuple[int, int], tmp_path: Path
) -> None:
    (width, height), shot = size, tmp_path / "shot.png"
    browser.open(f"file://{page}#Time,{theme}", width, height)
    browser.picture(shot)
    pixels = matplotlib.image.imread(shot)[..., :3]
    assert pixels.shape[1] == width and pixels.shape[0] >= height
    corner = float(pixels[2, 2].mean())
    assert corner > 0.9 if theme == "light" else corner < 0.2
    assert len({tuple(p) for p in pixels[::4, ::4].reshape(-1, 3).round(2).tolist()}) > 20


@in_a_browser
def test_where_nothing_fits_the_page_says_what_would(tmp_path: Path, browser: Chromium) -> None:
    path = tmp_path / "plan.html"
    words = ["plan", "OLMoE-1B-7B", "--cluster", "rtx4090x1", "--batch", "8"]
    assert main([*words, "--html", str(path)]) == 1
    browser.open(f"file://{path}", *SIZES[1])
    shown = browser.run("document.getElementById('main').innerText")
    assert "Nothing fits" in shown and "adapter={kind: lora" in shown


# ----------------------------------------------------------------------------- served


def typed(browser: Chromium, **texts: str) -> str:
    """Type into the form as a person does; return the state of the answer when it is complete."""
    for name, text in texts.items():
        browser.run(
            f"inputs.{name}.value = {json.dumps(text)}; document.body.dataset.answer = 'typed';"
            f"inputs.{name}.dispatchEvent(new Event('input')); 1"
        )
    return browser.run(ANSWERED)


@in_a_browser
def test_a_served_page_answers(url: str, browser: Chromium) -> None:
    browser.open(url, *SIZES[1])
    assert browser.run(ANSWERED) == "done"
    table = "document.querySelector('.cardlike').innerText"
    before = browser.run(table)
    assert "tiny on 2 H100" in browser.run("document.title")
    # One input changes the table; the command line that asks the same follows.
    assert typed(browser, batch="64") == "done"
    assert browser.run(table) != before
    assert "--batch 64" in browser.run("document.getElementById('command').innerText")
    seen_by_clicks(browser)
    # A row is copied as a fragment of a run file.
    browser.run("document.querySelector('.cardlike button.copy:enabled').click(); 1")
    assert "micro_batch:" in browser.run("document.getElementById('runfile').innerText")
    # A wrong input is said beside its field, with the nearest legal value, which a click takes.
    assert typed(browser, batch="0") == "refused"
    field = "document.getElementById('field-batch')"
    assert "--batch 0: must be" in browser.run(f"{field}.innerText")
    for legal in ("1", "4"):  # then what the run's own layout needs, which searches do not
        browser.run(f"{field}.querySelector('.wrong button').click(); 1")
        assert browser.run(ANSWERED) == "done" and browser.run("inputs.batch.value") == legal
    assert browser.run("document.querySelectorAll('[data-wrong]').length") == 0


def sent(url: str, method: str, path: str = "", **headers: str) -> tuple[int, str]:
    """Send a request with a body of the form; return status and text."""
    parts = urlsplit(url)
    assert parts.hostname == "127.0.0.1"
    connection = http.client.HTTPConnection(parts.hostname, parts.port or 0, timeout=60)
    body = json.dumps({"model": "tiny", "cluster": "h100x1x"}) if method == "POST" else None
    given = {"Content-Type": "application/json"} | {
        k.replace("_", "-"): v for k, v in headers.items()
    }
    connection.request(method, parts.path + path, body, given)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_only_its_own_page_is_answered(url: str) -> None:
    """DNS rebinding, posts of other pages, and addresses without the secret are refused."""
    own = url.partition("/")[2].strip("/").partition("/")[0]
    status, text = sent(url, "POST", "answer", Origin=f"http://{own}")
    assert status == 200 and json.loads(text)["complaints"][0]["field"] == "cluster"
    tunnel = {"Host": "localhost:9000", "Origin": "http://localhost:9000"}
    assert sent(url, "POST", "answer", **tunnel)[0] == 200
    assert sent(url, "GET", Host="evil.example")[0] == 421
    assert sent(url, "POST", "answer", Host="127.0.0.1.evil.example")[0] == 421
    assert sent(url, "POST", "answer", Origin="http://evil.example")[0] == 403
    assert sent(url, "POST", "answer", Origin="null")[0] == 403
    assert sent(url, "POST", "answer", Sec_Fetch_Site="cross-site")[0] == 403
    assert sent(url, "POST", "answer", Content_Type="text/plain")[0] == 403
    assert sent(url, "GET", "../other/")[0] == 404
    assert sent(f"http://{own}/", "GET")[0] == 404


def test_what_serves_needs_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    for words, why in (
        (["--serve", "--json"], "leave out --html and --json"),
        (["--serve", "--port", "70000"], "nearest: 65535"),
        (["tiny", "--cluster", "h100x1", "--port", "8000"], "for --serve"),
        (["tiny"], "required: --cluster; or --serve"),
    ):
        assert main(["plan", *words]) == 2
        assert why in " ".join(capsys.readouterr().err.split())
