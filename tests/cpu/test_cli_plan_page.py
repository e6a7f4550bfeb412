"""The page of ``moefold plan`` in a browser: every tab works by a click, at two sizes."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import matplotlib.image
import pytest

from moefold.cli.main import main

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium")

TABS = ("Overview", "Grids", "Memory", "Time", "Pipeline", "Imbalance", "Scaling")
SIZES = ((1280, 900), (420, 900))
# Clicks through all tabs and layouts, and leaves what it saw where --dump-dom shows it.
CLICKS = """<script>
window.addEventListener("error", (e) => { document.title = "broken: " + e.message; });
const seen = [];
const wait = () => new Promise((done) => setTimeout(done, 60));
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
(async () => {
  for (const layout of [...document.querySelectorAll("#which button")]) {
    layout.click();
    for (const button of [...document.querySelectorAll("nav button")]) {
      button.click();
      await wait();
      const main = document.getElementById("main");
      const all = (what) => main.querySelectorAll(what).length;
      seen.push({
        layout: layout.dataset.name, tab: button.textContent,
        shown: document.body.dataset.tab, pressed: layout.getAttribute("aria-pressed"),
        text: main.innerText.length, heads: all("h2"), tables: all("table"),
        marks: all("svg rect, svg path, .cells div"),
        bad: /NaN|undefined|null|Infinity/.test(main.innerText),
        cut: cutTables(main),
        wide: document.documentElement.scrollWidth - innerWidth });
    }
  }
  const pre = document.createElement("pre");
  pre.id = "seen";
  pre.textContent = JSON.stringify({ seen, title: document.title });
  document.body.append(pre);
})();
</script></body>"""


def browse(page: Path, *options: str, tab: str = "") -> str:
    """Run the browser on a page; return what it prints."""
    assert BROWSER is not None
    command = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--virtual-time-budget=20000", *options, f"file://{page}#{tab}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    return done.stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    words = ["plan", "tiny", "--cluster", "h100x8", "--batch", "32", "--layout", "pp2 ep2"]
    assert main([*words, "--html", str(path)]) == 0
    return path


def test_every_tab_works_by_a_click(page: Path) -> None:
    clicking = page.with_name("clicking.html")
    clicking.write_text(page.read_text("utf-8").replace("</body>", CLICKS), "utf-8")
    for width, height in SIZES:
        printed = browse(clicking, f"--window-size={width},{height}", "--dump-dom")
        found = re.search(r'<pre id="seen">(.*?)</pre>', printed, re.DOTALL)
        assert found, "the clicks did not come to their end"
        told = json.loads(html.unescape(found[1]))
        assert not told["title"].startswith("broken"), told["title"]
        assert {one["tab"] for one in told["seen"]} == set(TABS)
        layouts = {one["layout"] for one in told["seen"]}
        assert layouts >= {"given", "fastest"}
        assert len(told["seen"]) == len(layouts) * len(TABS), "each tab of each layout once"
        for one in told["seen"]:
            assert one["shown"] == one["tab"] and one["pressed"] == "true", one
            assert one["heads"] and one["text"] > 40 and one["marks"] + one["tables"] > 0, one
            assert not one["bad"], one
            assert not one["cut"], f"a table is cut rather than scrolled: {one}"
            assert one["wide"] <= 0, f"wider than the window: {one}"


@pytest.mark.parametrize(("theme", "size"), [("light", SIZES[0]), ("dark", SIZES[1])])
def test_it_can_be_seen_at_two_sizes(
    page: Path, theme: str, size: tuple[int, int], tmp_path: Path
) -> None:
    (width, height), shot = size, tmp_path / "shot.png"
    browse(page, f"--window-size={width},{height}", f"--screenshot={shot}", tab=f"Time,{theme}")
    pixels = matplotlib.image.imread(shot)[..., :3]
    assert pixels.shape[:2] == (height, width)
    corner = float(pixels[2, 2].mean())
    assert corner > 0.9 if theme == "light" else corner < 0.2
    assert len({tuple(p) for p in pixels[::4, ::4].reshape(-1, 3).round(2).tolist()}) > 20


def test_where_nothing_fits_the_page_says_what_would(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    words = ["plan", "OLMoE-1B-7B", "--cluster", "rtx4090x1", "--batch", "8"]
    assert main([*words, "--html", str(path)]) == 1
    printed = browse(path, "--window-size=420,900", "--dump-dom")
    shown = re.search(r"<main.*?</main>", printed, re.DOTALL)
    assert shown and "Nothing fits" in shown[0] and "adapter={kind: lora" in shown[0]
