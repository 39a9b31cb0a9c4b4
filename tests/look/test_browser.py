"""The page in a browser: its numbers are PyTorch's, it fits, it follows the scheme, and it works by keyboard."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest
import torch

from fastweights.look.page import as_data, page, reads, replay_rule
from fastweights.ops.memory import fast_weight_memory
from fastweights.probe import attribute
from tests.look.recordings import MODELS, arrays, recorded

COMMITTED = Path(__file__).parents[2] / "results" / "look" / "demo.html"
WIDTHS = (1400, 390)
# Looks at the page as it is, uses it by keyboard, and tells the page around it.
PROBE = """<script>addEventListener("load", () => {
  const { data, views, show, replay } = look, $ = id => document.getElementById(id)
  const width = document.documentElement.clientWidth, box = element => element.getBoundingClientRect()
  const wide = () => [...document.querySelectorAll("body *")].filter(one => box(one).width > 1 &&
    !one.closest(".unseen") && (box(one).right > width + 1 || box(one).left < -1)).map(
    one => one.outerHTML.slice(0, 80))
  const small = () => Math.min(...[...document.querySelectorAll("svg.chart text")].filter(text => box(text).width).map(
    text => parseFloat(getComputedStyle(text).fontSize) * text.ownerSVGElement.getScreenCTM().a))
  const press = (target, key) => target.dispatchEvent(
    new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }))
  const layer = data.blocks.at(-1).layer, T = data.tokens.length, numbers = {}
  for (const rule of ["model", "sum", "delta"]) {
    const head = replay(layer, data.H, rule)
    numbers[rule] = { y: head.y.map(x => [...x]), middle: [...head.state(T >> 1).W], W: [...head.state(T - 1).W],
      earlier: [...head.state(2).W], weights: [...head.weights(T - 1)], shares: [...head.shares(T - 2)] }
  }
  const view = views.model, seen = { model: { wide: wide(), small: small() } }
  view.go(3); view.tokens[3].focus()
  const keys = { start: view.t, focus: document.activeElement === view.tokens[3] }
  press(view.tokens[3], "ArrowRight"); keys.right = view.t; keys.follows = document.activeElement === view.tokens[4]
  press(view.tokens[4], "ArrowLeft"); press(view.tokens[3], "ArrowLeft"); keys.left = view.t
  keys.spoken = $("live").textContent; keys.sources = $("sources").textContent
  press(view.tokens[2], "End"); keys.end = view.t; press(document.activeElement, "Home"); keys.home = view.t
  press(document.activeElement, " "); keys.plays = view.clock.running; press(document.activeElement, " ")
  keys.stops = !view.clock.running
  view.tokens[5].dispatchEvent(new PointerEvent("pointerenter", { pointerType: "mouse" }))
  keys.hovered = $("sources-title").textContent; keys.stayed = view.t
  press($("tab-model"), "ArrowRight"); keys.tab = document.activeElement.id; keys.hidden = $("panel-model").hidden
  seen.task = { wide: wide(), small: small() }
  const { task } = views.task, errors = rule => Math.max(...task.errors(rule))
  seen.live = { writes: task.writes, keys: task.S, sum: errors("sum"), delta: errors("delta"),
    before: Math.max(...task.history.sum.slice(0, task.S + 1)) }
  $("task-write").click(); seen.live.after = views.task.task.writes; seen.live.spoken = $("live").textContent
  const unnamed = [...document.querySelectorAll("button, select, input, canvas[role], svg[role]")].filter(one =>
    !(one.getAttribute("aria-label") || one.textContent.trim() || one.closest("label"))).map(one => one.id)
  const style = getComputedStyle(document.documentElement), variable = name => style.getPropertyValue(name).trim()
  const colour = name => [1, 3, 5].map(i => parseInt(variable(name).slice(i, i + 2), 16))
  const linear = part => part <= 10 ? part / 255 / 12.92 : ((part / 255 + .055) / 1.055) ** 2.4
  const light = ([r, g, b]) => .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b)
  const contrast = (one, other) => { const both = [light(one), light(other)].sort((a, b) => b - a)
    return (both[0] + .05) / (both[1] + .05) }
  const most = parseFloat(variable("--most")) / 100, paper = colour("--paper")
  const shaded = ["--plus", "--minus"].map(name => colour(name).map((c, i) => most * c + (1 - most) * paper[i]))
  const contrasts = [...shaded.map(one => contrast(one, colour("--ink"))), contrast(paper, colour("--soft"))]
  parent.postMessage({ page: new URLSearchParams(location.search).get("page"), width, seen, keys, unnamed, paper,
    contrasts, numbers: width > 1000 ? numbers : null, layer }, "*") })</script></body>"""
AROUND = """<!doctype html><style>:root { color-scheme: light dark }</style><body><script>
  const found = []; addEventListener("message", message => { found.push(message.data)
    document.title = JSON.stringify(found) })</script>"""


@pytest.fixture(scope="module")
def recordings():
    return {name: recorded(name) for name in MODELS}


@pytest.fixture(scope="module", params=["light", "dark"])
def looks(request, recordings, tmp_path_factory):
    """What a browser sees of pages, by name and width: of random models in light mode, of the committed one in both."""
    if shutil.which("chromium") is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    folder = tmp_path_factory.mktemp("browser")
    pages = {"committed": COMMITTED.read_text()}
    if request.param == "light":
        pages |= {name: page(recording) for name, recording in recordings.items()}
    frames = AROUND
    for name, html in pages.items():
        (folder / f"{name}.html").write_text(html.replace("</body>", PROBE))
        # A window is at least 500 pixels wide, a frame is as narrow as a phone.
        for width in WIDTHS if name in ("committed", "delta") else WIDTHS[:1]:
            size = f"width: {width}px; height: 900px; border: 0"
            frames += f'<iframe src="{name}.html?page={name}" style="{size}"></iframe>'
    (folder / "frames.html").write_text(frames)
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--blink-settings=preferredColorScheme={int(request.param == 'light')}", "--hide-scrollbars"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=10000", "--dump-dom"]
    address = (folder / "frames.html").as_uri()
    done = subprocess.run([*command, address], capture_output=True, text=True, timeout=120, check=False)
    title = re.search("<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert title and "CONSOLE" not in done.stderr, done.stderr[-2000:]
    found = {(look["page"], look["width"]): look for look in json.loads(unescape(title[1]))}
    assert found.keys() >= {("committed", width) for width in WIDTHS} and len(found) == frames.count("<iframe")
    return request.param, found


def test_the_numbers_are_those_of_pytorch(looks, recordings):
    for name, recording in recordings.items():
        if (name, 1400) not in looks[1]:
            continue
        numbers, data = looks[1][name, 1400]["numbers"], as_data(recording)
        given = arrays(data, data["blocks"][-1])
        close(numbers["model"]["y"], reads(given, recording.attention)[-1])
        wide = {key: x.transpose(0, 1)[None] for key, x in given.items()}
        call = {"rule": replay_rule(given), "normalization": "attention" if recording.attention else None}
        T = len(recording.tokens)
        for place, steps in {"earlier": 3, "middle": T // 2 + 1, "W": T}.items():
            _, state = fast_weight_memory(**{key: x[:, :steps] for key, x in wide.items()}, **call, backend="reference")
            close(numbers["model"][place], state.W[0, -1].flatten())
        parts = attribute(**wide, **call)
        close(numbers["model"]["weights"], parts.weights[0, -1, -1])
        close(numbers["model"]["shares"], parts.shares[0, -1, -2])
        beta = torch.ones(1).double() if "w" not in given else given["w"]
        square = given["k"].square().sum(-1)
        shortened = "e" not in given and not recording.attention
        beta = (beta / square.clamp(min=1) if shortened else beta.expand(square.shape)).T[None]
        heads = (wide["q"], wide["k"], wide["v"])
        for rule, gates in (("sum", {}), ("delta", {"beta": beta})):
            y, state = fast_weight_memory(*heads, rule=rule, normalization=call["normalization"], **gates)
            close(numbers[rule]["y"], y[0, :, -1])
            close(numbers[rule]["W"], state.W[0, -1].flatten())


def close(ours, theirs):
    ours = torch.tensor(ours, dtype=torch.float64)
    assert (ours - theirs).norm() <= 1e-9 * theirs.norm()


def test_nothing_is_wider_than_the_page(looks):
    for place, look in looks[1].items():
        for tab in ("model", "task"):
            assert look["seen"][tab]["wide"] == [], place
            assert look["seen"][tab]["small"] >= 10.5, "the height of a letter on the screen, in pixels"


def test_the_page_works_by_keyboard_and_names_what_it_shows(looks):
    for place, look in looks[1].items():
        keys, T = look["keys"], 63 if place[0] == "committed" else 35
        assert keys["start"] == 3 and keys["right"] == 4 and keys["left"] == 2 and keys["home"] == 0, place
        assert keys["focus"] and keys["follows"] and keys["plays"] and keys["stops"]
        assert keys["end"] >= T - 1 and keys["spoken"].startswith("Token 3, “") and "%" in keys["sources"]
        assert keys["hovered"].startswith("Where the read at “") and keys["stayed"] == 0
        assert keys["tab"] == "tab-task" and keys["hidden"] and look["unnamed"] == []


def test_the_sum_rule_fails_at_its_capacity_and_the_delta_rule_does_not(looks):
    for look in looks[1].values():
        live = look["seen"]["live"]
        assert live["writes"] == 2 * live["keys"] == 32 and live["before"] < 1e-12, "a value for each key fits"
        assert live["sum"] > 0.5 and live["delta"] < 1e-12
        assert live["after"] == 33 and live["spoken"].startswith("Write 33 overwrote key")


def test_the_page_follows_the_scheme_and_can_be_read(looks):
    for look in looks[1].values():
        assert min(look["paper"]) > 240 if looks[0] == "light" else max(look["paper"]) < 40
        assert min(look["contrasts"]) >= 4.5, "of text on a fully shaded token, and of hints"
