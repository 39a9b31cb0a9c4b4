"""`bench kernels` and `info --check` as far as a machine without a GPU can follow them."""

import io
import json
import math
import os
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import triton
import typer
from rich.console import Console

from fastweights.benchmarks.kernels import checks, command
from fastweights.benchmarks.kernels.first_call import first_calls
from fastweights.benchmarks.kernels.rivals import RIVALS, SeparateProcess, make_rivals
from fastweights.commands import info
from fastweights.common import provenance
from fastweights.ops.backends import BACKENDS
from fastweights.ops.gpu.memory.signatures import WalkSignature
from fastweights.ops.gpu.memory.variants import RecurrentWalk, plain_rows

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")


@without_gpu
def test_it_says_why_there_is_nothing_to_measure(tmp_path, capsys):
    out = tmp_path / "kernels.json"
    with pytest.raises(typer.Exit):
        command.run(out, quick=True)
    assert f"nothing to measure: {BACKENDS['triton'].unavailable()}" in capsys.readouterr().out
    assert not out.exists()


@without_gpu
def test_no_kernels_to_check_is_no_failure(capsys):
    assert info.check()
    assert "no kernels to check" in capsys.readouterr().out


@without_gpu
def test_what_fails_is_recorded_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    """Without a GPU every measurement fails, each for itself."""
    monkeypatch.setattr(command, "BACKENDS", {"triton": SimpleNamespace(unavailable=lambda: None)})
    monkeypatch.setattr(provenance, "hardware", lambda device: "a GPU")
    monkeypatch.setattr(command, "bandwidth", lambda: 4e12)
    monkeypatch.setattr(checks, "check_kinds", lambda kinds, workers: {})
    first = {"part": "first call", "name": "paper small", "checked": {"first_s": 1.5}}
    monkeypatch.setattr(command, "first_calls", lambda shapes, dtype: iter([first]))
    out = tmp_path / "kernels.json"
    with pytest.raises(typer.Exit) as failed:
        command.run(out, rivals="sdpa")
    assert failed.value.exit_code == 1
    rows = json.loads(out.read_text())["rows"]
    parts = Counter(row["part"] for row in rows)
    assert parts == {"machine": 1, "graph": 2, "first call": 1, "shape": 10, "features": 12, "layer": 4, "decode": 2}
    for row in rows:
        if row["part"] == "shape":
            assert set(row["measured"]) == {"fastweights"} | ({"sdpa"} if row["dtype"] == "bfloat16" else set())
            assert all(measured["failure"] for measured in row["measured"].values())
        elif row["part"] not in ("machine", "first call"):
            assert row["failure"]
    assert "first call of paper small: checked 1.50 s" in (text := capsys.readouterr().out)
    assert "WRONG: paper small" in text


def test_floor_counts_every_byte_once():
    tokens = 96 * 256 * 8
    floor = command.floor_ms((96, 256, 8, 16, 16), torch.bfloat16, 1e12)
    assert math.isclose(floor, 1e3 * tokens * (2 * (4 * 16 + 4 * 16 + 3 * 16) + 12) / 1e12)


def test_the_table_shows_what_failed_and_what_did_not():
    times = {f"{name}_{mode}_ms": 0.5 for name in ("forward", "both") for mode in ("eager", "graph")}
    case = {"name": "paper small", "dtype": "bfloat16", "floor_ms": 0.1, "errors": {"y": 2e-3}}
    measured = {"fastweights": times, "sdpa": times | {"both_graph_ms": 1.5}, "fla chunk": {"failure": "Error"}}
    page = io.StringIO()
    table = command._table([case | {"measured": measured}, case | {"measured": {"fastweights": {}}}])
    Console(width=300, file=page).print(table)
    assert "1.500 sdpa" in (text := page.getvalue())
    assert "3.0 x" in text
    assert "5.0" in text


def test_rivals_are_those_that_can_take_the_shape():
    def names(shape, dtype):
        return [name for name, _ in make_rivals(shape, dtype, RIVALS)]

    assert names((1, 4, 1, 8, 4), "float32") == ["fastweights", "chunked", "chunked, compiled"]
    assert names((1, 4, 1, 8, 4), "bfloat16") == ["fastweights", "chunked", "chunked, compiled", "sdpa"]
    assert "chunked, compiled" not in names((1, 4096, 1, 8, 4), "bfloat16")


def test_every_row_is_checked_with_every_rule():
    kinds = list(checks.every_kind())
    assert len(set(kinds)) == len(kinds)
    rules = {(False,) * 4, (False, True, False, True), (True, False, True, False), (True, True, False, True)}
    for dtype, D, M, config in plain_rows():
        if dtype.itemsize < 8:
            found = {
                kind[3:7]
                for kind in kinds
                if isinstance(kind, WalkSignature)
                and kind[:3] == (dtype, D, M)
                and kind.variant == config
                and not kind.packed
            }
            assert {rule for rule in rules if not (rule[0] and isinstance(config, RecurrentWalk))} <= found


_tuned = []


@triton.jit
def _kernel(x):
    pass


def _tune():
    """As a library that tunes itself and keeps what it found; in a separate process."""
    if not _tuned:
        _tuned.append(triton.autotune([triton.Config({}), triton.Config({}, num_warps=2)], key=[])(_kernel))
    kept, _tuned[0].cache[()] = len(_tuned[0].cache), _tuned[0].configs[0]
    return {"kept": kept, "process": os.getpid(), "results": os.environ["FLA_CACHE_RESULTS"]}


def _end():
    os._exit(3)


def _fail():
    raise RuntimeError("an illegal memory access was encountered")


def test_what_crashes_or_hangs_in_a_separate_process_is_recorded_and_the_next_runs():
    separate = SeparateProcess()
    try:
        first, again = separate(_tune), separate(_tune)
        assert first["process"] == again["process"] != os.getpid()
        # Tuned for one size, it is tuned anew for the next, and nothing stays on disk.
        assert first["kept"] == again["kept"] == 0
        assert first["results"] == "0"
        assert separate(_fail) == {"failure": "RuntimeError: an illegal memory access was encountered"}
        assert "terminated abruptly" in separate(_end)["failure"]
        separate.limit_s = 0.1
        assert separate(time.sleep, 60) == {"failure": "TimeoutError"}
        separate.limit_s = 60
        assert separate(_tune)["process"] != first["process"]
    finally:
        separate.close()


@without_gpu
def test_first_calls_that_fail_say_why():
    (row,) = first_calls({"tiny": (1, 4, 1, 8, 8)}, "bfloat16")
    assert row["name"] == "tiny"
    assert all(row[way]["failure"] for way in ("checked", "from disk", "unchecked"))
    assert "checked failed: " in command._seconds(row)
    assert command._seconds({"name": "x", "checked": {"first_s": 1.234}}) == "checked 1.23 s"
