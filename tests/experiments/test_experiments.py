"""The figures: their cells, and their claims on made-up results that fulfil and that violate them."""

import math
from pathlib import Path

import pytest

from fastweights.experiments import EXPERIMENTS
from fastweights.experiments.engine.experiment import SCALES, Results, Selection
from fastweights.experiments.engine.retrieval import beats, d_dot
from fastweights.experiments.engine.store import Store
from fastweights.experiments.paper.fig1_dpfp import measure
from tests.experiments.fakes import record, results

RETRIEVAL = ["fig2", "fig3", "fig4", "fig5"]
FIGURES = ["fig1", *RETRIEVAL]


def verdicts(name, found):
    return {claim.text: claim.holds for claim in EXPERIMENTS[name].claims(found)}


def verdict(name, found, start):
    (match,) = (holds for text, holds in verdicts(name, found).items() if text.startswith(start))
    return match


def test_the_paper_scale_is_the_papers():
    cells = {name: len(EXPERIMENTS[name].grid("paper")) for name in FIGURES}
    assert cells == {"fig1": 1, "fig2": 8 * 30, "fig3": 4, "fig4": 8, "fig5": 8 * 10}
    assert all(EXPERIMENTS[name].scales["paper"].options == {} for name in FIGURES)
    assert EXPERIMENTS["fig2"].scales["paper"].sizes[::29] == (20, 600)
    assert EXPERIMENTS["fig5"].scales["paper"].sizes[::9] == (20, 200)
    assert (EXPERIMENTS["fig3"].scales["paper"].sizes, EXPERIMENTS["fig4"].scales["paper"].sizes) == ((20,), (600,))


@pytest.mark.parametrize("name", RETRIEVAL)
def test_stored_cells_are_still_known(name):
    records = Store(Path(__file__).parents[2] / "results").known(name).values()
    assert records and all(EXPERIMENTS[name].cell_of(record) for record in records)


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=list(EXPERIMENTS))
def test_every_experiment_is_complete(experiment):
    assert set(SCALES) <= set(experiment.scales)
    assert all(experiment.scales[name].label for name in experiment.scales if name not in SCALES)
    assert experiment.statement and experiment.title and experiment.where
    assert all(claim.holds is None and claim.ours == "not run" for claim in experiment.claims(Results([])))


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=list(EXPERIMENTS))
def test_what_scales_decide_are_statements_of_the_experiment(experiment):
    texts = {claim.text for claim in experiment.claims(Results([]))}
    for scale in experiment.scales.values():
        assert isinstance(scale.decides, bool) or set(scale.decides) < texts


def test_a_scale_decides_what_it_declares_whatever_the_numbers_say():
    fig2, losses = EXPERIMENTS["fig2"], {"softmax": {12: 0.9, 24: 0.9}, "linear": {12: 0.0005, 24: 0.2}}
    for found in (losses, {**losses, "linear": {12: 0.2, 24: 0.2}}, {**losses, "softmax": {12: 0.0, 24: 0.0}}):
        judged = {c.text: c.verdict for c in fig2.judge("small", results(found, d_key=16, scale="small"))}
        assert judged["Softmax has the lowest loss at every S"] == "not decided at this scale"
        at_limit = judged["Linear (ELU + 1) starts to fail where S passes its d_dot"]
        assert at_limit == ("undecided" if found["linear"][12] > 0.01 else "holds")


def test_too_short_a_training_decides_nothing():
    good = {"dpfp-1-delta": {4: 0.0008}, "dpfp-1-sum": {4: 0.1}}
    fig3 = EXPERIMENTS["fig3"]
    assert {claim.verdict for claim in fig3.judge("paper", results(good))} == {"holds", "not run"}
    assert {claim.verdict for claim in fig3.judge("smoke", results(good))} == {"not decided at this scale", "not run"}


@pytest.mark.parametrize("name", RETRIEVAL)
def test_models_are_those_of_the_training(name):
    experiment = EXPERIMENTS[name]
    for cell in experiment.cells("paper", Selection(sizes=experiment.scales["paper"].sizes[:1])):
        assert (cell.config["d_key"], cell.config["max_steps"], cell.config["patience"]) == (64, 100_000, 1000)
        assert cell.config["rule"]


def test_selections():
    fig2, fig4, fig1 = (EXPERIMENTS[name] for name in ("fig2", "fig4", "fig1"))
    assert fig2.grid("paper", Selection(("linear",), (7, 9), (1, 2))) == [
        ("linear", 7, 1),
        ("linear", 9, 1),
        ("linear", 7, 2),
        ("linear", 9, 2),
    ]
    assert fig4.grid("paper", Selection(None, (20, 600))) == fig4.grid("paper")
    assert fig4.grid("paper", Selection(None, (20,))) == []
    assert fig1.grid("paper", Selection(("linear",), (20,), (3,))) == fig1.grid("paper")


def test_dpfp_in_the_plane():
    metrics = measure({"size": 12, "d_key": 2, "nu": 1})
    assert (metrics["least_nonzero"], metrics["most_nonzero"], metrics["points"]) == (1, 1, 144)
    assert metrics["shares"] == [0.25] * 4
    assert metrics["largest_overlap"] == metrics["distance_to_equations"] == 0
    found = results({"dpfp-1": {12: 0.0}})
    found.records[0].metrics.update(metrics)
    assert set(verdicts("fig1", found).values()) == {True}
    found.records[0].metrics.update(measure({"size": 12, "d_key": 2, "nu": 3}))
    assert set(verdicts("fig1", found).values()) == {True, False}, "with nu = 3 components repeat"


def test_capacities():
    sizes = {model: d_dot({"model": model, "d_key": 64}) for model in EXPERIMENTS["fig2"].models}
    assert list(sizes.values()) == [None, 64, 128, 256, 1024, 128, 256, 384]
    assert d_dot({"model": "dpfp-1-delta", "d_key": 16}) == 32


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({40: 0.001, 60: 0.02, 80: 0.1}, True),
        ({40: 0.001, 60: 0.001, 80: 0.1}, True),
        ({20: 0.001, 40: 0.02, 60: 0.1}, False),
        ({40: 0.001, 80: 0.001, 100: 0.002}, False),
        ({40: 0.001, 100: 0.001, 120: 0.1}, False),
        ({20: 0.001, 40: 0.001}, None),
        ({60: 0.1, 80: 0.1}, None),
        ({40: 0.001, 60: math.nan}, True),
        ({20: math.nan, 40: 0.001}, False),
        ({}, None),
    ],
)
def test_failing_at_the_limit(losses, expected):
    assert verdict("fig2", results({"linear": losses}), "Linear") is expected
    stretched = results({"dpfp-1": {2 * size: loss for size, loss in losses.items()}})
    assert verdict("fig2", stretched, "DPFP-1") is expected
    # The limit follows d_key, as at scale small.
    shrunk = results({"linear": {size // 4: loss for size, loss in losses.items()}}, d_key=16)
    assert verdict("fig2", shrunk, "Linear") is expected


def test_favor_never_solves():
    assert verdict("fig2", results({"favor-64": {20: 0.5}, "favor-512": {20: math.nan}}), "FAVOR+") is True
    assert verdict("fig2", results({"favor-64": {20: 0.5}, "favor-512": {20: 0.0009}}), "FAVOR+") is False


def test_softmax_is_best():
    good = {"softmax": {20: 0.0009, 40: 0.002}, "linear": {20: 0.0005, 40: 0.2}, "favor-64": {40: math.nan}}
    assert verdict("fig2", results(good), "Softmax has") is True, "below the target all are equal"
    claim = EXPERIMENTS["fig2"].claims(results({**good, "dpfp-1": {40: 0.0015}}))[5]
    assert claim.holds is False and "S = 40 (0.002 against 0.0015 of DPFP-1)" in claim.ours
    assert verdict("fig2", results({"softmax": {20: 0.1}}), "Softmax has") is None
    assert verdict("fig2", results({"softmax": {20: math.nan}, "linear": {20: 0.1}}), "Softmax has") is False


def test_softmax_struggles_beyond_500():
    for losses, expected in [
        ({500: 0.001, 520: 0.02}, True),
        ({500: 0.02, 520: 0.02}, False),
        ({500: 0.001, 520: 0.001}, False),
        ({500: 0.001}, None),
    ]:
        assert verdict("fig2", results({"softmax": losses}), "Softmax solves") is expected


def test_update_rules():
    good = {"dpfp-1-sum": 0.12, "dpfp-1-delta": 0.0008, "schlag2021": 5.0, "schlag2021-dpfp": 0.3}
    found = results({model: {20: loss} for model, loss in good.items()})
    assert list(verdicts("fig3", found).values()) == [True] * 5
    bad = {"dpfp-1-sum": 0.5, "dpfp-1-delta": 0.002, "schlag2021": 0.001, "schlag2021-dpfp": math.nan}
    found = results({model: {20: loss} for model, loss in bad.items()})
    assert list(verdicts("fig3", found).values()) == [False, False, True, False, True]


def test_order_beyond_capacity():
    good = {"linear": 0.47, "dpfp-1": 0.4, "dpfp-2": 0.3, "dpfp-3": 0.2, "softmax": 0.01}
    found = {model: {600: loss} for model, loss in good.items()}
    assert list(verdicts("fig4", results(found)).values()) == [True] * 3
    found["dpfp-2"] = {600: 0.001}
    assert list(verdicts("fig4", results(found)).values()) == [False] * 3
    part = {model: found[model] for model in ("linear", "dpfp-1")}
    assert verdict("fig4", results(part), "The final") is None
    assert verdict("fig4", results({"favor-512": {600: 0.001}}), "Every") is None, "its d_dot is beyond 600"


def test_delta_beats_every_rule():
    good = {
        "dpfp-1-delta": {20: 0.001, 40: 0.01},
        "dpfp-1-sum": {20: 0.1, 40: 0.2},
        "schlag2021": {20: 1.0, 40: 2.0},
        "schlag2021-dpfp": {20: 0.1, 40: 0.2},
        "favor-64-delta": {20: math.nan},
    }
    assert list(verdicts("fig5", results(good)).values()) == [True] * 3
    partial = {**good, "schlag2021": {20: 1.0}, "dpfp-1-sum": {20: 0.1, 40: 0.2, 60: 0.3}}
    assert list(verdicts("fig5", results(partial)).values())[:2] == [None, None], "a size is missing"
    bad = {**good, "dpfp-1-sum": {20: 0.1, 40: 0.005}}
    assert list(verdicts("fig5", results(bad)).values()) == [False, True, True]


def test_claims_follow_the_chosen_loss():
    records = [record("softmax", 20, 0.3, best=0.001), record("linear", 20, 0.1)]
    for loss, expected in (("last_loss", False), ("best_loss", True)):
        assert beats(Results(records, loss), "softmax", ["linear"], "", "").holds is expected


def test_several_seeds_count_by_their_mean():
    records = [record("linear", 20, loss, seed=seed) for seed, loss in enumerate((0.1, 0.3))]
    assert Results(records).mean("linear", 20) == pytest.approx(0.2)
    assert math.isnan(Results([*records, record("linear", 20, math.nan, seed=3)]).mean("linear", 20))
