"""`bench kernels` and `info --check` as far as a machine without a GPU can follow them."""

import io
import json
import math
import os
import time
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import triton
import typer
from rich.console import Console
from triton.runtime.autotuner import Autotuner

from fastweights.benchmarks.kernels import checks, command, first_call, rivals, tuning
from fastweights.benchmarks.kernels.rivals import RIVALS, rivals_of
from fastweights.benchmarks.kernels.rows import ROWS, Row, _sample, floor_ms
from fastweights.benchmarks.kernels.tuning import Job, TuningProcess
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
    monkeypatch.setattr(command, "first_calls", lambda names, dtype: iter([first]))
    out = tmp_path / "kernels.json"
    with pytest.raises(typer.Exit) as failed:
        command.run(out, rivals="sdpa")
    assert failed.value.exit_code == 1
    rows = json.loads(out.read_text())["rows"]
    parts = Counter(row["part"] for row in rows)
    shapes = sum(len(row.dtypes) for row in ROWS.values())
    expected = {"machine": 1, "graph": 2, "first call": 1, "shape": shapes, "features": 12, "layer": 4, "decode": 2}
    assert parts == expected
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
    shape, beta = (96, 256, 8, 16, 16), 12
    floor = floor_ms(Row(shape), torch.bfloat16, 1e12)
    assert math.isclose(floor, 1e3 * tokens * (2 * (4 * 16 + 4 * 16 + 3 * 16) + beta) / 1e12)
    fading = Row(shape, rule="gated_delta", per_key=True)
    assert math.isclose(floor_ms(fading, torch.bfloat16, 1e12) - floor, 1e3 * tokens * 12 * 16 / 1e12)


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


def names(row, dtype="bfloat16"):
    return [rival.name for rival in rivals_of(row, dtype, RIVALS)]


def test_rivals_are_those_that_can_take_the_row():
    assert names(Row((1, 4, 1, 8, 4)), "float32") == ["chunked", "chunked, compiled"]
    assert names(Row((1, 4, 1, 8, 4))) == ["chunked", "chunked, compiled", "sdpa"]
    assert "chunked, compiled" not in names(Row((1, 4096, 1, 8, 4)))


def test_rivals_that_are_installed_take_the_rows_that_they_have_functions_for(monkeypatch):
    monkeypatch.setattr(rivals, "has", lambda package: True)
    found = {name: set(names(row)) - {"chunked", "chunked, compiled", "sdpa"} for name, row in ROWS.items()}
    assert found["paper small"] == {"fla chunk", "fla recurrent"}
    assert found["small, DPFP-1"] == set()
    assert found["gated delta, 4k, 32 heads of 128"] == {"fla chunk", "flashqla"}
    assert found["gated delta, 1k, heads of 64"] == {"fla chunk"}
    assert found["gated delta per key, 4k, 32 heads of 128"] == {"fla chunk", "fla chunk, only Triton"}
    assert found["decay per key, 2k, heads of 64"] == {"fla chunk"}
    assert found["decay, 2k, heads of 128 and 256"] == {"fla chunk", "fla fused chunk"}


def test_what_is_compared_has_both_ends_of_heads_and_sequences():
    x = torch.arange(7 * 3 * 9).view(7, 3, 9)
    assert torch.equal(_sample(x)[::3, :, ::3], x[::6, :, ::8])
    assert _sample(x).shape == (4, 3, 4)
    assert torch.equal(_sample(x[:1, :, :2]), x[:1, :, :2])


def test_a_row_that_ours_refuse_is_not_wrong():
    refused = command._verdict({"failure": "ValueError: backend 'triton' cannot run this call: why"}, "bfloat16")
    assert refused == {"refused": "ValueError: backend 'triton' cannot run this call: why"}
    assert command._verdict({"errors": {"y": 2e-3, "dq": 3e-3}}, "bfloat16")["right"]
    assert not command._verdict({"errors": {"y": 2e-3, "dq": 3e-2}}, "bfloat16")["right"]
    assert not command._verdict({"errors": {"y": 2e-3}, "backward_failure": "RuntimeError"}, "bfloat16")["right"]
    assert not command._verdict({"failure": "AcceleratorError: illegal memory access"}, "bfloat16")["right"]


def test_a_line_says_errors_before_times_and_what_has_no_backward():
    line = command._summary_line({"forward_graph_ms": 0.25, "both_failure": "RuntimeError: why", "errors": {"y": 2e-3}})
    assert line == "off by y 2e-03; forward 0.250 ms graph; both_failure: RuntimeError: why"


def test_rows_are_chosen_by_parts_of_their_names(capsys):
    assert command._chosen(["2k, heads of 64", "images"], False) == ["2k, heads of 64", "delta, images, heads of 64"]
    assert command._chosen([], True) == list(command.QUICK)
    with pytest.raises(typer.Exit):
        command.run(rows=["no such row"])
    assert "no row has no such row in its name" in capsys.readouterr().err
    with pytest.raises(typer.Exit):
        command.run(parts=["check"])
    assert "did you mean 'checks'" in capsys.readouterr().err


def test_processes_that_compile_ahead_share_the_configurations(monkeypatch):
    ran = []
    monkeypatch.setattr(Autotuner, "_bench", lambda self, config: ran.append(config))
    judge = Autotuner._bench
    configs = [triton.Config({}, num_warps=2**i) for i in range(5)]
    tuned = triton.autotune(configs, key=[])(_kernel)
    for part in range(3):
        monkeypatch.setattr(Autotuner, "_bench", judge)
        tuning.compile_share(part, 3)
        passed = [config for config in configs if tuned._bench(config=config) == [float("inf")] * 3]
        assert len(passed) == len(configs) - len(configs[part::3])
    assert sorted(config.num_warps for config in ran) == [config.num_warps for config in configs]
    assert tuned.do_bench(lambda: None, quantiles=()) == [0.0] * 3


@without_gpu
def test_what_fails_or_takes_too_long_ahead_is_reported():
    jobs = [Job("paper small", "bfloat16", "fastweights", part, 2) for part in range(2)]
    results = dict(tuning.compile_ahead(jobs[:1], 1))
    assert results[jobs[0]]["failure"]
    late = dict(tuning.compile_ahead(jobs, 2, limit_s=0))
    assert late == {job: {"failure": "StartFailed: a process could not start: no answer in 0 s"} for job in jobs}
    found = tuning.summary([{"seconds": 2.0}, {"seconds": 3.0, "failure": "Error"}, *late.values()])
    assert (found["processes"], found["together_s"], found["longest_s"]) == (4, 5.0, 3.0)
    assert found["failure"] == "Error; StartFailed: a process could not start: no answer in 0 s"


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
    separate = TuningProcess()
    try:
        first, again = separate.measure(_tune), separate.measure(_tune)
        assert first["process"] == again["process"] != os.getpid()
        # Tuned for one size, it is tuned anew for the next, and nothing stays on disk.
        assert first["kept"] == again["kept"] == 0
        assert first["results"] == "0"
        assert separate.measure(_fail) == {"failure": "RuntimeError: an illegal memory access was encountered"}
        assert separate.measure(_end) == {"failure": "ProcessFailed: the process ended with exit status 3"}
        separate.limit_s = 0.1
        assert separate.measure(time.sleep, 60) == {"failure": "ProcessFailed: no answer in 0.1 s"}
        separate.limit_s = 60
        assert separate.measure(_tune)["process"] != first["process"]
    finally:
        separate.end()


@without_gpu
def test_first_calls_that_fail_say_why(monkeypatch):
    variables = []

    @contextmanager
    def noted(given):
        """Use the caches that there are: to fill empty ones takes seconds."""
        variables.append(given)
        yield

    monkeypatch.setattr(first_call, "environment", noted)
    (row,) = first_call.first_calls(["paper small"], "bfloat16")
    assert row["name"] == "paper small"
    assert all(row[way]["failure"] for way in ("checked", "from disk", "unchecked"))
    assert "checked failed: " in command._seconds(row)
    assert command._seconds({"name": "x", "checked": {"first_s": 1.234}}) == "checked 1.23 s"
    before, checked, from_disk, unchecked = (given["TRITON_CACHE_DIR"] for given in variables)
    assert len({before, checked, unchecked}) == 3 and from_disk == checked
    assert len({given["PYTHONPYCACHEPREFIX"] for given in variables}) == 1
