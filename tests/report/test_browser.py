"""The page in a browser, on a desk and on a phone, on light and on dark paper."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

COMMITTED = Path(__file__).parents[2] / "results" / "index.html"
WIDTHS = (1400, 390)
# The page has no script of its own. This one unfolds everything, looks, and tells the page around it.
PROBE = """<script>addEventListener("load", () => {
  document.querySelectorAll("details").forEach(fold => { fold.open = true })
  const width = document.documentElement.clientWidth, box = element => element.getBoundingClientRect()
  const colours = text => text.match(/[\\d.]+/g).slice(0, 3).map(part => {
    const share = part / 255; return share <= .04045 ? share / 12.92 : ((share + .055) / 1.055) ** 2.4 })
  const light = text => { const [r, g, b] = colours(text); return .2126 * r + .7152 * g + .0722 * b }
  const paper = light(getComputedStyle(document.body).backgroundColor)
  const contrast = colour => { const both = [light(colour), paper].sort((a, b) => b - a)
    return (both[0] + .05) / (both[1] + .05) }
  const cells = [...document.querySelectorAll("th, td")].filter(cell => box(cell).width > 1 || cell.textContent)
  const shown = [...document.querySelectorAll(".plot svg")].filter(svg => box(svg).width > 100)
  const texts = shown.flatMap(svg => [...svg.querySelectorAll("text")].map(text => [svg, text]))
  parent.postMessage({ page: new URLSearchParams(location.search).get("page"), width, paper,
    overflow: document.documentElement.scrollWidth - width,
    cut: cells.filter(cell => !cell.closest(".scroll") && !cell.closest("thead") && (box(cell).right > width + 1 ||
      box(cell).right > box(cell.closest("table").parentElement).right + 1)).map(cell => cell.textContent.slice(0, 40)),
    wide: [...document.querySelectorAll(".scroll")].filter(box_ => box(box_).right > width + 1).length,
    cells: cells.length, plots: document.querySelectorAll(".plot").length, shown: shown.length,
    outside: shown.filter(svg => box(svg).right > width + 1).length,
    smallest: Math.min(...texts.map(([svg, text]) => parseFloat(getComputedStyle(text).fontSize) *
      svg.getScreenCTM().a)),
    faintest: Math.min(...texts.map(([, text]) => contrast(getComputedStyle(text).fill))),
    thumbnails: [...document.querySelectorAll(".thumb use")].filter(use => use.getBBox().width > 50).length
  }, "*") })</script></body>"""
AROUND = """<!doctype html><style>:root { color-scheme: light dark }</style><body><script>
  const found = []; addEventListener("message", message => { found.push(message.data)
    document.title = JSON.stringify(found) })</script>"""


@pytest.fixture(scope="module", params=["light", "dark"])
def looks(request, built, tmp_path_factory):
    """What a browser sees of the page just built and of the committed one, by name and width."""
    if shutil.which("chromium") is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    folder = tmp_path_factory.mktemp("browser")
    frames = AROUND
    for name, path in (("built", built.path), ("committed", COMMITTED)):
        copy = folder / f"{name}.html"
        copy.write_text(path.read_text().replace("</body>", PROBE))
        # A window is at least 500 pixels wide, a frame is as narrow as a phone.
        for width in WIDTHS:
            size = f"width: {width}px; height: 900px; border: 0"
            frames += f'<iframe src="{copy.name}?page={name}" style="{size}"></iframe>'
    (folder / "frames.html").write_text(frames)
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--blink-settings=preferredColorScheme={int(request.param == 'light')}", "--hide-scrollbars"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=10000", "--dump-dom"]
    page = (folder / "frames.html").as_uri()
    done = subprocess.run([*command, page], capture_output=True, text=True, timeout=120, check=False)
    title = re.search("<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title and "CONSOLE" not in done.stderr, done.stderr[-2000:]
    found = {(look["page"], look["width"]): look for look in json.loads(unescape(title[1]))}
    assert found.keys() == {(name, width) for name in ("built", "committed") for width in WIDTHS}
    return request.param, found


def test_nothing_is_wider_than_the_page(looks):
    for place, look in looks[1].items():
        assert look["overflow"] <= 0 and not look["cut"] and not look["wide"] and not look["outside"], place
        assert look["cells"] > 100


def test_plots_can_be_read(looks):
    for (name, width), look in looks[1].items():
        assert look["shown"] == look["plots"] >= 6 and look["thumbnails"] >= 6, name
        assert look["smallest"] >= (10.5 if width == 390 else 12), "the height of a letter on the screen, in pixels"


def test_page_and_plots_follow_the_scheme(looks):
    scheme, found = looks
    for look in found.values():
        assert look["paper"] > 0.9 if scheme == "light" else look["paper"] < 0.02
        assert look["faintest"] >= 3, "contrast with the paper"
