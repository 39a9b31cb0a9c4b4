"""A recording as one HTML file that replays it: no network, no other file."""

import base64
import json
import math
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fastweights
from fastweights.look.record import RecordedBlock, Recording, replay_rule
from fastweights.ops.memory import fast_weight_memory
from fastweights.report.markup import document
from fastweights.report.style import stylesheet

TEMPLATE = Path(__file__).parent / "template"
SCRIPTS = ("memory.js", "drawing.js", "model.js", "task.js", "start.js")
ARRAYS = ("q", "k", "v", "a", "e", "w")
# Vectors are whole numbers of 16 bits times one scale for each head.
STEPS = 32767


def page(recording: Recording) -> str:
    """Return the page."""
    content = {name: (TEMPLATE / name).read_text(encoding="utf-8") for name in ("page.html", *SCRIPTS)}
    title = escape(f"The memory of {recording.name}")
    # A text may say "</script>", and the page's own must not end there.
    data = json.dumps(as_data(recording), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    script = "\n".join(content[name] for name in SCRIPTS)
    body = content["page.html"]
    # Data last: what a text says is not looked at for places to fill.
    for place, what in (("{title}", title), ("{script}", script), ("{data}", data)):
        body = body.replace(place, what)
    return document(title, stylesheet(TEMPLATE / "page.css"), body)


def bytes_per_layer(block: RecordedBlock) -> int:
    """Return about how many bytes of the page a layer takes."""
    return sum(len(json.dumps(entry)) for entry in _entries(block).values())


def as_data(recording: Recording) -> dict[str, Any]:
    """Return what the page's script reads."""
    first = recording.blocks[0].arrays
    known = [cost for cost in recording.bits if cost is not None]
    return {
        "model": recording.name,
        "version": fastweights.__version__,
        "rule": recording.rule.name,
        "update": recording.rule.description,
        "map": recording.feature_map,
        "normalization": recording.normalization,
        "attention": recording.attention,
        "tied": "e" in first and first["e"] is first.get("w"),
        "layers": recording.n_layers,
        "H": first["k"].shape[0],
        "D": first["k"].shape[2],
        "M": first["v"].shape[2],
        "tokens": recording.tokens,
        "bits": [None if cost is None else round(cost, 2) for cost in recording.bits],
        "start": recording.start,
        "perplexity": round(2 ** (sum(known) / len(known)), 1) if known else None,
        "rounding": _largest_difference(recording),
        "blocks": [{"layer": block.number, **_entries(block)} for block in recording.blocks],
    }


def _entries(block: RecordedBlock) -> dict[str, Any]:
    return dict.fromkeys(ARRAYS) | {name: _entry(name, x) for name, x in block.arrays.items()}


def _entry(name: str, x: Tensor) -> dict[str, Any]:
    """Return an array as text: (H, T) in float32, (H, T, N) in 16 bits with a scale for each head.

    Of decays per key channel, which are near 1, it is 1 - a that is kept.
    """
    if x.dim() == 2:
        return {"numbers": _text(x.float().numpy().astype("<f4"))}
    kept = (1 - x if name == "a" else x).double()
    scale = kept.abs().amax((1, 2)) / STEPS
    whole = (kept / torch.where(scale > 0, scale, 1)[:, None, None]).round()
    return {"scales": [float(f"{s:.9g}") for s in scale.tolist()], "whole": _text(whole.numpy().astype("<i2"))}


def _text(x: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(x).tobytes()).decode()


def decoded(name: str, entry: dict[str, Any], shape: tuple[int, ...]) -> Tensor:
    """Return an array in float64 as the page's script reads it; shape is (H, T) or (H, T, N)."""
    if "numbers" in entry:
        return torch.from_numpy(np.frombuffer(base64.b64decode(entry["numbers"]), "<f4").astype("f8")).view(shape[:2])
    whole = torch.from_numpy(np.frombuffer(base64.b64decode(entry["whole"]), "<i2").astype("f8")).view(shape)
    scaled = whole * torch.tensor(entry["scales"], dtype=torch.float64)[:, None, None]
    return 1 - scaled if name == "a" else scaled


def _largest_difference(recording: Recording) -> float:
    """Return by how much rounding changes reads at most: |difference| / |read|, both as norms over a head's text."""
    worst = 0.0
    for block in recording.blocks:
        rounded = {name: decoded(name, _entry(name, x), tuple(x.shape)) for name, x in block.arrays.items()}
        ours, theirs = (reads(arrays, recording.attention) for arrays in (rounded, block.arrays))
        size = theirs.flatten(1).norm(dim=1)
        worst = max(worst, ((ours - theirs).flatten(1).norm(dim=1) / size.clamp(min=1e-30)).max().item())
    return 0.0 if worst == 0 else round(worst, 1 - math.floor(math.log10(worst)))


def reads(arrays: Mapping[str, Tensor], attention: bool) -> Tensor:
    """Return what a layer reads from its memories, (H, T, M), in float64, given the arrays of a recorded block."""
    wide: dict[str, Any] = {name: x.double().transpose(0, 1)[None] for name, x in arrays.items()}
    q, k, v = (wide.pop(name) for name in "qkv")
    y, _ = fast_weight_memory(
        q, k, v, rule=replay_rule(arrays), normalization="attention" if attention else None, backend="reference", **wide
    )
    return y[0].transpose(0, 1)
