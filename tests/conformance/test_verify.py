"""`fastweights verify`: what is right passes everything, and each planted fault is caught by the case meant for it."""

import json
from functools import partial

import pytest
import torch
import triton.testing
from triton.runtime.autotuner import Autotuner
from typer.testing import CliRunner

import fastweights as fw
from fastweights.cli import app
from fastweights.compat.fla import chunk_gated_delta_rule
from fastweights.conformance.adapters import adapt, convention_of
from fastweights.conformance.cases import CASES, Case
from fastweights.conformance.judge import Bench, passed
from fastweights.conformance.problem import RECURRENCES, Setting
from fastweights.conformance.processes import _spread, judge_in_processes, tune_over
from fastweights.conformance.ways import as_first_and_last_of
from fastweights.ops.backends import BACKENDS

GATED = RECURRENCES["gated_delta"]
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def bench():
    return Bench(GATED)


def verdicts(bench, function, *names):
    cases = [BY_NAME[name] for name in names] if names else CASES
    adapted = adapt(function, convention_of(function, None), bench.recurrence, {})
    return {row.case: row for row in bench.judge(adapted, cases)}


@pytest.mark.parametrize("backend", ["chunked", "cpu"])
def test_ours_passes_everything(bench, backend):
    if reason := BACKENDS[backend].unavailable():
        pytest.skip(reason)
    ours = adapt(fw.fast_weight_memory, "fastweights", GATED, {"backend": backend})
    rows = list(bench.judge(ours))
    assert passed(rows)
    assert [row.case for row in rows if row.verdict != "right"] == ["more than 2^31 elements"]
    assert {row.note for row in rows if row.case == "each row of it alone"} == {"bit for bit"}


@pytest.mark.parametrize("name", [name for name in RECURRENCES if name != "gated_delta"])
def test_ours_passes_as_every_recurrence(name):
    ours = adapt(fw.fast_weight_memory, "fastweights", RECURRENCES[name], {})
    cases = [BY_NAME[case] for case in ("plain", "packed, with states", "log decay -100", "beta = 2")]
    rows = list(Bench(RECURRENCES[name], torch.float64).judge(ours, cases))
    assert passed(rows)
    assert rows[2].verdict == ("not supported" if name in ("delta", "linear") else "right")
    assert rows[3].verdict == ("right" if name in ("delta", "kda") else "not supported")


def test_sixteen_bits():
    cases = [BY_NAME[name] for name in ("plain", "final state", "log decays -0.001 and -100")]
    assert passed(list(Bench(GATED, torch.bfloat16).judge(adapt(chunk_gated_delta_rule, "fla", GATED, {}), cases)))


FAULTS = {}


def fault(*cases):
    """Enter a function that is wrong in these cases."""

    def enter(function):
        FAULTS[function.__name__] = function, cases
        return function

    return enter


@fault("initial state")
def ignores_the_initial_state(q, k, v, g, beta, initial_state=None, output_final_state=False, cu_seqlens=None):
    return chunk_gated_delta_rule(q, k, v, g, beta, None, None, output_final_state, cu_seqlens=cu_seqlens)


@fault("packed, some sequences empty", "packed behind a sequence of NaN")
def leaks_over_packed_sequences(q, k, v, g, beta, **more):
    return chunk_gated_delta_rule(q, k, v, g, beta)


@fault("gradient of the initial state")
def is_wrong_in_the_gradient_of_h0(q, k, v, g, beta, initial_state=None):
    state = None if initial_state is None else initial_state.detach()
    return chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state)


@fault("gradient through the final state")
def halves_what_comes_through_the_final_state(q, k, v, g, beta, initial_state=None, output_final_state=False):
    o, state = chunk_gated_delta_rule(q, k, v, g, beta, None, initial_state, True)
    return o, 0.5 * state + 0.5 * state.detach()


@fault("batch of 5")
def is_not_batch_invariant(q, k, v, g, beta):
    return chunk_gated_delta_rule(q if q.shape[0] < 5 else q.bfloat16().float(), k, v, g, beta)


@fault("final state")
def returns_the_state_transposed(q, k, v, g, beta, initial_state=None, output_final_state=False):
    return chunk_gated_delta_rule(q, k, v, g, beta, None, initial_state, True, state_v_first=True)


@fault("T = 65")
def forgets_the_last_chunk(q, k, v, g, beta):
    o, _ = chunk_gated_delta_rule(q, k, v, g, beta)
    return torch.cat([o[:, :64], 0 * o[:, 64:]], 1) if o.shape[1] == 65 else o


@fault("log decay -5", "log decay -100")
def divides_by_products_of_decays(q, k, v, g, beta):
    products = g.cumsum(1).exp().unsqueeze(-1)
    return chunk_gated_delta_rule(q, k, v * (products / products), g, beta)


@fault("log decays -0.001 and -100")
def subtracts_sums_of_logarithms(q, k, v, g, beta):
    sums = g.cumsum(1)
    return chunk_gated_delta_rule(q, k, v, torch.cat([sums[:, :1], sums[:, 1:] - sums[:, :-1]], 1), beta)


@fault("beta = 2")
def takes_no_beta_above_1(q, k, v, g, beta):
    return chunk_gated_delta_rule(q, k, v, g, beta.clamp(max=1))


@fault("zero keys")
def divides_by_the_length_of_keys(q, k, v, g, beta):
    return chunk_gated_delta_rule(q, k / k.detach().norm(dim=-1, keepdim=True), v, g, beta)


@fault("equal keys")
def erases_only_once_under_a_key(q, k, v, g, beta):
    again = (k[:, :1] == k[:, 1:2]).all()
    return chunk_gated_delta_rule(q, k, v, g, torch.cat([beta[:, :1], beta[:, 1:] * (0 if again else 1)], 1))


@fault("K = V = 60", "K = V = 100")
def scales_by_the_padded_size(q, k, v, g, beta):
    K = q.shape[-1]
    return chunk_gated_delta_rule(q, k, v, g, beta, scale=(1 << (K - 1).bit_length()) ** -0.5)


@fault("K = 24, V = 40")
def expects_values_no_longer_than_keys(q, k, v, g, beta):
    K = q.shape[-1]
    o, _ = chunk_gated_delta_rule(q, k, v[..., :K], g, beta)
    return torch.nn.functional.pad(o, (0, v.shape[-1] - o.shape[-1]))


@fault("2 value heads a key head")
def puts_value_heads_in_the_wrong_order(q, k, v, g, beta):
    n = v.shape[2] // q.shape[2]
    return chunk_gated_delta_rule(q.repeat(1, 1, n, 1), k.repeat(1, 1, n, 1), v, g, beta)


@fault("not contiguous")
def takes_every_tensor_for_contiguous(q, k, v, g, beta, initial_state=None, output_final_state=False):
    flat = torch.empty(q.shape, device="meta").stride()
    return chunk_gated_delta_rule(q.as_strided(q.shape, flat), k, v, g, beta, None, initial_state, output_final_state)


@fault("new memory full of NaN")
def reads_memory_that_nobody_wrote(q, k, v, g, beta, initial_state=None, output_final_state=False):
    o, state = chunk_gated_delta_rule(q, k, v, g, beta, None, initial_state, output_final_state)
    return o + torch.empty(1).isnan(), state


@fault("beside a row of NaN")
def lets_a_row_see_the_others(q, k, v, g, beta):
    o, _ = chunk_gated_delta_rule(q, k, v, g, beta)
    return o + 0 * o.sum(0, keepdim=True)


@fault("in parts, cut at 63, 64, 65, 129", "token by token")
def starts_anew_in_short_parts(q, k, v, g, beta, initial_state=None, output_final_state=False):
    state = initial_state if q.shape[1] > 1 else None
    return chunk_gated_delta_rule(q, k, v, g, beta, None, state, output_final_state)


@fault("mask")
def ignores_the_mask(q, k, v, rule, mask=None, **more):
    return fw.fast_weight_memory(q, k, v, rule=rule, **more)


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_caught_by_the_case_meant_for_them(bench, name):
    function, cases = FAULTS[name]
    # In this mode new memory is full of NaN in every case.
    torch.use_deterministic_algorithms(False)
    found = verdicts(bench, function, "plain", *cases)
    assert found["plain"].verdict == "right"
    wrong = "inexact" if name == "subtracts_sums_of_logarithms" else "wrong"
    assert [found[case].verdict for case in cases] == [wrong] * len(cases)


def test_an_overwritten_input_is_wrong(bench):
    def overwrites(q, k, v, g, beta):
        o, _ = chunk_gated_delta_rule(q, k, v, g, beta)
        # As a kernel does, behind the back of autograd.
        k.data.zero_()
        return o

    row = verdicts(bench, overwrites, "plain")["plain"]
    assert (row.verdict, row.note) == ("wrong", "it overwrites its input k")


def test_rows_far_from_the_start():
    case = Case("many rows", Setting(T=3), partial(as_first_and_last_of, B=7), gradients=())
    right = adapt(chunk_gated_delta_rule, "fla", GATED, {})

    def wraps(problem, wants_state):
        o, state = right(problem, wants_state)
        return torch.cat([o[:4], o[: o.shape[0] - 4]]), state

    assert [row.verdict for f in (right, wraps) for row in Bench(GATED).judge(f, [case])] == ["right", "wrong"]


def test_what_a_function_does_not_do_is_apart_from_what_it_does_wrong(bench):
    def forward_only(q, k, v, g, beta):
        if q.shape[1] == 1:
            raise NotImplementedError("no single tokens")
        if q.shape[-1] == 60:
            raise IndexError("out of range")
        return chunk_gated_delta_rule(q, k, v, g, beta)[0].detach()

    names = ["plain", "T = 1", "initial state", "gradient of the initial state", "mask", "K = V = 60"]
    found = verdicts(bench, forward_only, *names)
    assert [row.verdict for row in found.values()] == ["right", *["not supported"] * 4, "error"]
    assert [row.note for row in found.values()] == [
        "no gradients: o has none",
        "no single tokens",
        "there is no argument initial_state",
        "there is no argument initial_state",
        "there is no argument mask",
        "IndexError: out of range",
    ]
    assert not passed([found["initial state"]]) and not passed(list(found.values()))


MODULE = """
from fastweights.compat.fla import chunk_gated_delta_rule

def forgetful_gated_delta(query, key, value, g, beta, initial_state=None, output_final_state=False, **kwargs):
    return chunk_gated_delta_rule(query, key, value, g, beta, None, None, output_final_state)

def mystery(q, k, v, half=False):
    return q / 2 if half else q
"""


def test_the_command(tmp_path, monkeypatch):
    (tmp_path / "kernels_of_mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")

    def run(*arguments):
        return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["verify", *arguments])

    done = run(
        "kernels_of_mine:forgetful_gated_delta", "--case", "initial", "--case", "beta = 1", "--json", "--out", "x.json"
    )
    record = json.loads(done.stdout)
    assert done.exit_code == 1 and record == json.loads((tmp_path / "x.json").read_text())
    assert (record["convention"], record["rule"], record["dtype"]) == ("transformers", "gated_delta", "float32")
    found = {row["case"]: row for row in record["rows"]}
    assert found["beta = 1"]["verdict"] == "right" and found["initial state"]["verdict"] == "wrong"
    assert found["initial state"]["errors"]["o"] > 0.1 > 1e-5 > found["initial state"]["tolerances"]["o"] > 0

    done = run("fastweights:fast_weight_memory", "--rule", "delta", "--with", "backend=chunked", "--case", "plain")
    assert done.exit_code == 0 and "1 right" in done.output, done.output
    for arguments, message in (
        (["kernels_of_mine:mystery"], "say it with --rule: kda, gated_delta"),
        (["kernels_of_mine:mistery"], "it has chunk_gated_delta_rule, forgetful_gated_delta, mystery"),
        (["no_such_module:f"], "No module named"),
        (["kernels_of_mine"], "as MODULE:FUNCTION"),
        (["kernels_of_mine:mystery", "--rule", "delta", "--case", "plainn"], "no case has plainn in its name"),
        (["kernels_of_mine:mystery", "--rule", "delta", "--with", "half"], "NAME=VALUE"),
        (["kernels_of_mine:mystery", "--rule", "delta", "--case", "T", "--without", "T"], "no case has T but not T"),
        (["kernels_of_mine:mystery", "--rule", "delta", "--tune-over", "2"], "add --processes 1"),
    ):
        done = run(*arguments)
        assert done.exit_code == 2 and message in done.output, done.output
    assert run("kernels_of_mine:mystery", "--rule", "linear", "--with", "half=true", "--case", "plain").exit_code == 1


MODULE_THAT_ENDS = """
import os, time
from fastweights.compat.fla import chunk_gated_delta_rule

def gated_delta(q, k, v, g, beta):
    if q.shape[-1] == 60:
        os._exit(3)
    if q.shape[-1] == 100:
        time.sleep(600)
    return chunk_gated_delta_rule(q, k, v, g, beta)
"""


def test_what_crashes_or_hangs_in_another_process_ends_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "kernels_that_end.py").write_text(MODULE_THAT_ENDS)
    monkeypatch.chdir(tmp_path)
    cases = [BY_NAME[name] for name in ("K = V = 60", "K = V = 100", "T = 1", "mask")]
    bench = Bench(GATED, head_size=8)
    judged = judge_in_processes(bench, "kernels_that_end:gated_delta", "fla", {}, cases, 1, 3.0)
    rows = {row.case: row for row in judged}
    assert {name: row.verdict for name, row in rows.items()} == {
        "K = V = 60": "error",
        "K = V = 100": "error",
        "T = 1": "right",
        "mask": "not supported",
    }
    assert rows["K = V = 60"].note == "the process ended with exit status 3"
    assert rows["K = V = 100"].note == "no answer in 3 s"


def test_a_process_that_cannot_start_is_no_verdict():
    rows = judge_in_processes(Bench(GATED), "no_such_module:f", "fla", {}, [BY_NAME["plain"]], 1, 60.0)
    with pytest.raises(RuntimeError, match="could not start: ModuleNotFoundError: No module named 'no_such_module'"):
        list(rows)


def test_cases_that_need_other_kernels_come_first():
    spread = [case.name for case in _spread([BY_NAME[name] for name in ("plain", "T = 1", "K = V = 60", "mask")])]
    assert spread == ["plain", "K = V = 60", "mask", "T = 1"]
    assert sorted(case.name for case in _spread(CASES)) == sorted(BY_NAME)


def test_tuning_over_some_configurations(monkeypatch):
    monkeypatch.setattr(Autotuner, "prune_configs", lambda self, given: list(range(7)))
    monkeypatch.setattr(triton.testing, "do_bench", triton.testing.do_bench)
    tune_over(3)
    assert Autotuner.prune_configs(None, {}) == [0, 3, 6]


def test_head_size(bench):
    problem = BY_NAME["plain"].setting.draw(GATED, torch.float32, "cpu", 0, 24)
    assert problem.q.shape[-1] == problem.v.shape[-1] == 24
    assert BY_NAME["K = V = 60"].setting.draw(GATED, torch.float32, "cpu", 0, 24).q.shape[-1] == 60
