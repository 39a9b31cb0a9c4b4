"""The language-model tables: their cells at the paper's scale, and their claims on made-up results."""

import json

import pytest

from fastweights.experiments import EXPERIMENTS
from fastweights.experiments.engine import language_tables
from fastweights.experiments.engine.experiment import BEYOND_SCALE, Results, Selection
from fastweights.experiments.engine.perplexity import best_of, is_lower
from fastweights.experiments.engine.runner import training_of
from fastweights.experiments.engine.store import Store
from fastweights.experiments.paper import speed, table2, table3, table4, table5
from fastweights.report.build import build
from fastweights.report.drawing import draw_files
from fastweights.report.style import STYLES
from fastweights.training.tasks.language import plan
from tests.experiments.language_fakes import cells, given, metrics, record, results, verdicts

TABLES = ("table2", "table3", "table4", "table5", "speed")


def by_model(name, scale="paper"):
    return {(cell.config["model"], cell.config["size"]): cell for cell in cells(name, scale)}


def test_equal_cells_of_several_tables_are_one():
    two, three, four, five = (by_model(name) for name in ("table2", "table3", "table4", "table5"))
    assert three["delta", 256].slug == two["delta", 256].slug
    assert four["linear", 256].slug == two["linear", 256].slug
    assert four["delta-nopos", 256].slug == three["delta-nopos", 256].slug
    assert five["transformer", 128].slug == two["transformer", 128].slug
    slugs = {cell.slug for name in TABLES[:4] for cell in cells(name)}
    assert len(slugs) == 10 + 3 + 4 + 4
    for scale in ("small", *language_tables.STAND_INS):
        assert len({cell.slug for name in TABLES[:4] for cell in cells(name, scale)}) == 16, scale


def test_the_paper_scale_is_the_papers():
    for cell in (cell for name in TABLES[:4] for cell in cells(name)):
        config = cell.config
        size, model = config["size"], config["model"]
        assert config["network"]["n_layers"] == 16 and config["network"]["vocab_size"] == 267_735
        assert (config["segment"], config["batch_size"]) == {128: (256, 96), 256: (384, 56)}[size]
        assert config["steps"] == (200_000 if model == "xl" else {128: 500_000, 256: 400_000}[size])
        assert config["training"]["first_step_full"] is False and config["training"]["precision"] == "32-true"
        assert config["seed"] == config["training"]["seed"] == 1111
        carried = model == "xl" or "carried" in model
        expected = [{"name": "carried", "batch": 1}] if carried else [{"name": "sliding", "stride": 1}]
        if model == "xl":
            expected = [
                {**expected[0], "mem_len": memory, "segment": segment}
                for memory, segment in ((15, 1), (64, 64), (128, 128), (384, 384))
            ]
        assert config["evaluations"] == expected
    assert all(cell.config["training"]["first_step_full"] for cell in cells("table2", "code"))


def test_the_models_are_the_papers():
    networks = {place: cell.config["network"] for name in TABLES[:4] for place, cell in by_model(name).items()}
    assert networks["performer", 128]["feature_map_options"]["m"] == 8
    assert networks["performer", 256]["feature_map_options"]["m"] == 16
    assert networks["performer-wide", 128]["feature_map_options"]["m"] == 16
    assert networks["dpfp-1-delta", 128]["feature_map_options"]["nu"] == 1
    rules = {model: network["rule"] for (model, _), network in networks.items() if network["mixer"] == "fast_weight"}
    assert all((rule == "delta") == ("delta" in model) for model, rule in rules.items())
    positions = {model: network["positions"] for (model, _), network in networks.items()}
    assert {model for model, kind in positions.items() if kind == "none"} == {
        "delta-nopos", "delta-nopos-norm", "delta-carried", "linear-carried", "linear-carried-nonorm", "xl"
    }  # fmt: skip
    norms = {model: networks[model, 256]["normalization"] for model in ("delta", "delta-norm", "delta-nopos-norm")}
    assert norms == {"delta": "sum", "delta-norm": "both", "delta-nopos-norm": "both"}
    assert networks["linear-carried-nonorm", 256]["normalization"] == "none"


def test_settings_are_part_of_a_cell():
    plain, changed = cells("table3"), cells("table3", precision="bf16-mixed")
    assert all(cell.config["training"]["precision"] == "bf16-mixed" for cell in changed)
    assert not {cell.slug for cell in plain} & {cell.slug for cell in changed}
    table = EXPERIMENTS["table3"]
    assert all(table.cell_of(record(cell, metrics(1.0, 1.0))).slug == cell.slug for cell in changed)
    refused = (({"seed": 3}, "--seeds"), ({"stepps": 3}, "did you mean 'steps'"), ({"mixer": "xl"}, "its own option"))
    for settings, message in refused:
        with pytest.raises(ValueError, match=message):
            cells("table3", **settings)


def test_the_order_is_part_of_a_cell(monkeypatch):
    assert all("order" not in cell.config for cell in cells("table4", "wikipedia-fast"))
    context = given("table4", "wikipedia-fast", order="shuffled")
    table = EXPERIMENTS["table4"]
    config = table.cell("wikipedia-fast", "delta-nopos", 128, 1111, context).config
    seen = {}
    monkeypatch.setattr(language_tables, "LanguageTask", lambda *texts, **batching: seen.update(batching))
    monkeypatch.setattr(language_tables, "corpus_of", lambda config, data: None)
    language_tables.build(config, None)
    assert config["order"] == seen["order"] == "shuffled" and seen["seed"] == 1111
    with pytest.raises(ValueError, match="order 'shuffled' leaves none"):
        table.cell("wikipedia-fast", "delta-carried", 128, 1111, context)


def test_documents_are_part_of_a_cell():
    assert all("documents" not in cell.config for cell in cells("table4", "smoke"))
    context = given("table4", "smoke", documents="paragraphs")
    cell = EXPERIMENTS["table4"].cell("smoke", "delta-carried", 16, 1111, context)
    assert cell.config["documents"] == "paragraphs"
    with pytest.raises(ValueError, match="does not forget where a document begins"):
        EXPERIMENTS["table4"].cell("smoke", "xl", 16, 1111, context)


def test_the_presets_own_steps_change_nothing():
    for scale, steps in (("paper", 500_000), ("wikitext2", 3600)):
        usual, named = (cells("table2", scale, **settings)[0].config for settings in ({}, {"steps": steps}))
        assert usual["training"] == named["training"]
    for model, steps, warmup in (("delta", 400_000, 2000), ("delta", 8000, 800), ("xl", 200_000, 1000)):
        assert plan(30, preset="medium", mixer=model, steps=steps).training.warmup == warmup


def test_speed_is_judged_at_full_size_only():
    decides = {name: scale.decides for name, scale in EXPERIMENTS["speed"].scales.items()}
    assert decides == {"smoke": False, "small": False, "code": True, "paper": True}


def test_a_record_of_another_kind_is_not_owned():
    cell = cells("table2")[0]
    without = {name: value for name, value in cell.config.items() if name != "corpus"}
    assert EXPERIMENTS["table2"].cell_of(record(type(cell)(without), {})) is None
    unknown = {**cell.config, "set": {"no_such_field": 1}}
    assert EXPERIMENTS["table2"].cell_of(record(type(cell)(unknown), {})) is None


def test_results_of_two_corpora_stay_apart(tmp_path):
    table, store = EXPERIMENTS["table2"], Store(tmp_path)
    ours = given("table2", "smoke")
    other = {**ours, "corpus": {**ours["corpus"], "name": "another", "fingerprint": "z"}}
    for number, context in enumerate((ours, other)):
        for cell in table.cells("smoke", None, context)[number:]:
            store.save("table2", record(cell, metrics(10.0 + number, 11.0)))
    for context, count in ((other, 4), (ours, 5)):
        store.assemble(table, "smoke", context)
        content = json.loads((tmp_path / "table2" / "results.json").read_text())
        assert content["given"] == context and len(content["cells"]) == count
        # Drawing what there is, as `report` does, keeps to the corpus that was run last.
        store.assemble(table, "smoke")
        assert json.loads((tmp_path / "table2" / "results.json").read_text()) == content
        assert store.current(table)[1] == store.of(table, "smoke", context)
    (tmp_path / "table2" / "results.json").unlink()
    assert len(store.of(table, "smoke")) == 5, "the corpus of most cells"


def test_other_budgets_are_shown_below(tmp_path):
    """Other steps at the same scale, then other scales; each is named by what it is."""
    table, store, scale = EXPERIMENTS["table2"], Store(tmp_path), "wikipedia-fast"
    short, long = (given("table2", scale, steps=steps, clip=1.0) for steps in (4224, 8448))
    for context, models, level in ((short, list(table.models), 70.0), (long, ["delta", "linear"], 50.0)):
        for cell in table.cells(scale, Selection(models=tuple(models)), context):
            more = 1 + (cell.config["model"] == "linear")
            store.save("table2", record(cell, metrics(level + more, level + more)))
    store.assemble(table, scale, short)
    for cell in cells("table2", "wikitext2")[:2]:
        store.save("table2", record(cell, metrics(160.0, 150.0)))
    path, chapters = build(store)
    (chapter,) = (chapter for chapter in chapters if chapter.experiment.name == "table2")
    assert len(chapter.results.records) == 5 and chapter.label == "one pass of Wikipedia, a faster recipe"
    assert [other.label for other in chapter.others] == [
        "two passes of Wikipedia, a faster recipe", "WikiText-2, 3,600 steps, a tiny model"
    ]  # fmt: skip
    other = chapter.others[0]
    assert {r.config["steps"] for r in other.results.records} == {8448}
    assert [claim.verdict for claim in other.claims] == [BEYOND_SCALE], (
        "delta below sum; nothing else was run for so long"
    )
    section = path.read_text().split("Also run: ")[1]
    assert section.startswith("two passes") and ">51.0<" in section and ">71.0<" not in section.split("</section>")[0]
    assert "--set steps=8448" in section and "--scale wikipedia-fast" in section
    assert not any(c.others for c in chapters if c is not chapter)


def test_passes_are_counted_where_the_text_is_known():
    def label(scale, **settings):
        return EXPERIMENTS["table2"].label([record(cells("table2", scale, **settings)[0], {})])

    assert label("wikipedia-fast") == "five passes of Wikipedia, a faster recipe"
    assert label("wikipedia", steps=4224) == "one pass of Wikipedia, the paper's recipe"
    assert label("wikipedia", steps=6336) == "1.5 passes of Wikipedia, the paper's recipe"
    assert label("paper") == "paper" and label("code", precision="bf16-mixed") == "code"
    assert label("paper", steps=9000) == "WikiText-103, 9,000 steps", "not with the paper's budget"
    assert label("small", steps=3) == "small"


def test_results_of_experiments_that_have_become_stand_ins_still_load(tmp_path):
    """A folder of `wikipedia` with cells of its own scale `paper`, as it was written before."""
    store, old = Store(tmp_path), cells("table2", "wikipedia", steps=4224) + cells("table5", "wikipedia", steps=4224)
    for cell in old:
        config = {**cell.config, "scale": "paper"}
        store.save("wikipedia", record(type(cell)(config), metrics(80.0, 81.0)))
    store.save("wikipedia", record(cells("table2", "small")[0], metrics(9.0, 9.0)))
    found = {name: store.current(EXPERIMENTS[name]) for name in ("table2", "table5")}
    assert {name: (scale, len(records)) for name, (scale, records) in found.items()} == {
        "table2": ("wikipedia", 5), "table5": ("wikipedia", 5)
    }  # fmt: skip
    assert {record.slug for _, records in found.values() for record in records} == {cell.slug for cell in old}


def test_what_others_were_given_is_their_heading(tmp_path):
    """Another text, another device: whatever an experiment takes."""
    table, speeds, store = EXPERIMENTS["table2"], EXPERIMENTS["speed"], Store(tmp_path)
    ours = given("table2", "smoke")
    other = {**ours, "corpus": {**ours["corpus"], "name": "another", "fingerprint": "z"}}
    for context, count in ((ours, 5), (other, 1)):
        for cell in table.cells("smoke", None, context)[:count]:
            store.save("table2", record(cell, metrics(10.0, 11.0)))
    for device, count in (("cuda", 2), ("cpu", 1)):
        for cell in speeds.cells("smoke", None, {"set": {}, "device": device})[:count]:
            store.save("speed", record(cell, dict.fromkeys(("words_per_s", "slowest", "fastest", "memory_bytes"), 1.0)))
    headings = build(store)[0].read_text().split("<summary>Also run: ")[1:]
    assert [heading.split("</summary>")[0] for heading in headings] == ["text = another (z)", "device = cpu"]


def test_speed_reads_the_text_as_its_cells_say(monkeypatch):
    seen = {}
    monkeypatch.setattr(speed, "LanguageTask", lambda *texts, **cut: seen.update(cut) or 1 / 0)
    context = {"set": {"order": "shuffled"}, "device": "cpu"}
    config = EXPERIMENTS["speed"].cells("smoke", Selection(models=("delta",)), context)[0].config
    with pytest.raises(ZeroDivisionError):
        speed.measure(config, "cpu")
    assert seen["order"] == "shuffled" and seen["seed"] == config["seed"]


def test_claims_of_table_2():
    for size, row in table2.PAPER.items():
        assert all(row[f"{name}delta"] < row[other] for name, other in (("", "linear"), ("performer-", "performer")))
        assert row["transformer"] == min(row.values()), size
    paper = {(model, size): pair for size, row in table2.PAPER.items() for model, pair in row.items()}
    assert verdicts("table2", results("table2", paper)) == [True, True, True]
    worse = {**paper, ("delta", 256): (29.7, 33.1), ("performer-delta", 128): (None, None)}
    assert verdicts("table2", results("table2", worse)) == [False, False, True], "worse on one text, diverged"
    assert verdicts("table2", results("table2", {**paper, ("performer", 128): (33.0, 30.0)}))[2] is False
    part = {place: pair for place, pair in paper.items() if place != ("linear", 256)}
    assert verdicts("table2", results("table2", part)) == [None, True, None]


def test_claims_of_table_3():
    assert verdicts("table3", results("table3", table3.PAPER)) == [True, True, True]
    assert verdicts("table3", results("table3", {**table3.PAPER, "delta": (28.0, 30.0)})) == [False, True, False]
    assert verdicts("table3", results("table3", {**table3.PAPER, "delta-norm": (28.2, 31.2)})) == [True, False, False]
    only = {"delta": (2.0, 2.0), "delta-norm": (3.0, 3.0)}
    assert verdicts("table3", results("table3", only)) == [None, None, None]


XL = [
    {"mem_len": memory, "state_size": 8192 * (memory + segment), "valid": {"ppl": pair[0]}, "test": {"ppl": pair[1]}}
    for (memory, pair), segment in zip(table4.PAPER_XL.items(), (1, 64, 128, 384), strict=True)
]
TABLE4 = {**table4.PAPER, **table4.LIMITED, "linear-carried": (261.0, 270.0), "linear-carried-nonorm": (1601.0, 1700.0)}


def test_claims_of_table_4():
    more = {"xl": {"evaluations": XL}}
    found = results("table4", TABLE4, more=more)
    assert verdicts("table4", found) == [True] * 5
    assert "16 times" in EXPERIMENTS["table4"].claims(found)[4].ours
    bad = {"linear-carried": (40.0, 41.0), "linear-carried-nonorm": (30.0, 30.0), "delta-carried": (90.0, 91.0)}
    assert verdicts("table4", results("table4", {**TABLE4, **bad}, more=more)) == [False] * 5
    diverged = {"linear-carried": (None, None), "linear-carried-nonorm": (None, None)}
    assert verdicts("table4", results("table4", {**TABLE4, **diverged}, more=more))[:2] == [True, False]
    best = results("table4", {**TABLE4, "delta-carried": (20.0, 20.0)}, more=more)
    assert EXPERIMENTS["table4"].claims(best)[4].ours == "more than 48 times, the most that was tried"
    assert (
        verdicts("table4", results("table4", {"delta-carried": (None, None), "xl": (2.0, 2.0)}, more=more))
        == [None] * 5
    )


def test_table_4_shows_every_memory():
    found = results("table4", {**TABLE4, "linear-carried-nonorm": (None, None)}, more={"xl": {"evaluations": XL}})
    rows = {row[0]: row for row in table4.table(found).rows}
    assert rows["Transformer-XL, memory 15"][1:6] == ("65.7", "65.5", "65.7", "65.5", "0.131 M")
    assert rows["Transformer-XL, memory 384"][1:6] == ("24.6", "25.5", "24.6", "25.5", "6.29 M")
    assert rows["Linear Transformer, no attention norm."][1:5] == ("diverged", "diverged", "> 1600", "> 1600")
    small = {row[0]: row for row in table4.table(results("table4", TABLE4, "small", {"xl": {"evaluations": XL}})).rows}
    assert small["Delta Network"][3:5] == ("27.8 (D = 256)", "29.4 (D = 256)"), "the paper has no such small model"
    assert small["Transformer-XL, memory 15"][4] == "65.5 (memory 15)"


def test_table_2_shows_the_papers_numbers_of_the_same_size():
    paper = {(model, size): pair for size, row in table2.PAPER.items() for model, pair in row.items()}
    rows = {row[:2]: row for row in EXPERIMENTS["table2"].table(results("table2", paper)).rows}
    assert rows["Delta Network", "128"][2:4] == rows["Delta Network", "128"][4:6] == ("34.1", "35.5")
    assert rows["Delta Network", "256"][2:4] == rows["Delta Network", "256"][4:6] == ("29.7", "31.5")
    (row,) = EXPERIMENTS["table2"].table(results("table2", {"delta": (9.0, 9.0)}, "small")).rows
    assert row[4:6] == ("34.1 (D = 128)", "35.5 (D = 128)")


def test_claims_of_table_5():
    assert verdicts("table5", results("table5", table5.PAPER)) == [True, True, True]
    less = {**table5.PAPER, "dpfp-1": (34.0, 35.1)}
    assert verdicts("table5", results("table5", less)) == [True, True, False]
    worse = {**table5.PAPER, "dpfp-1-delta": (40.0, 41.0)}
    assert verdicts("table5", results("table5", worse)) == [True, False, False]
    part = {name: table5.PAPER[name] for name in ("performer-wide", "performer-wide-delta")}
    assert verdicts("table5", results("table5", part)) == [True, None, None]


def test_stand_ins_are_one_size_beside_the_papers_own():
    for name, models in (("table3", "delta-nopos"), ("table4", "delta-carried")):
        made = EXPERIMENTS[name].table(results(name, {models: (60.0, 61.0)}, "wikipedia"))
        (row,) = made.rows
        assert row[made.header.index("paper, validation")].endswith("(D = 256)")
        assert cells(name, "wikipedia")[0].config["size"] == 128
    found = {cell.config["model"]: cell.paper for cell in cells("table2", "wikipedia")}
    assert found["delta"] == {"valid": 34.1, "test": 35.5}
    assert all(cell.paper is None for cell in cells("table3", "wikipedia")), "the paper has none of that size"
    assert EXPERIMENTS["table4"].paper({"size": 256, "model": "linear-carried"}) == {"valid": "> 260", "test": "> 260"}


@pytest.mark.parametrize("scale", ["paper", "code"])
def test_what_departs_from_the_papers_protocol(scale):
    def found(name, corpus=None, at=None, **settings):
        told = given(name, at or scale, **settings)
        told["corpus"] = {**told["corpus"], **(corpus or {})}
        made = EXPERIMENTS[name].cells(at or scale, None, told)
        return EXPERIMENTS[name].departures([record(cell, {}) for cell in made])

    for name in ("table2", "table3", "table4", "table5"):
        assert found(name) == {} == found(name, compile="default"), "what does not change the numbers"
    assert found("table3", lr=0.5, clip=1.0) == {"lr": ([0.5], [2.5e-4]), "clip": ([1.0], [0.25])}
    slow = {"steps": ([21_000], [500_000]), "precision": (["bf16-mixed"], ["32-true"]), "stride": ([8], [1])}
    slow["eval_every"] = ([2100], [4000])
    assert found("table2", {"name": "other"}, "wikipedia") == {"text": (["other"], ["WikiText-103"]), **slow}
    fast = found("table2", at="wikipedia-fast")
    assert slow.items() <= fast.items() and fast["optimizer"] == (["muon"], ["default"])
    assert fast["dropout"] == ([0.0], [0.1]) and fast["schedule"] == (["linear"], ["cosine"])
    assert found("table2", at="wikitext2")["n_layers"] == ([4], [16])


def test_carried_rows_of_wikipedia_are_read_in_one_go():
    how = {cell.config["model"]: cell.config["evaluations"] for cell in cells("table4", "wikipedia")}
    assert how["delta-carried"] == how["linear-carried"] == [{"name": "carried", "batch": 1}]
    assert how["delta-nopos"] == how["linear"] == [{"name": "sliding", "stride": 8}]


def test_the_fast_recipe_is_one_for_all_and_no_cell_is_the_papers():
    fast = cells("table2", "wikipedia-fast") + cells("table3", "wikipedia-fast")
    usual = {cell.config["model"]: cell.config for name in ("table2", "table3") for cell in cells(name, "wikipedia")}
    assert len({json.dumps(cell.config["training"]) for cell in fast}) == 1
    for cell in fast:
        network = cell.config["network"]
        assert network | {"dropout": 0.1} == usual[cell.config["model"]]["network"]
        assert cell.config["steps"] == usual[cell.config["model"]]["steps"]
    assert all("optimizer" not in config["training"] for config in usual.values()), "cells of before keep their names"
    recipe = training_of(fast[0].config)
    assert (recipe.optimizer, recipe.muon_lr, recipe.lr, recipe.schedule) == ("muon", 0.01, 2e-3, "linear")


def test_claims_of_speed():
    def found(**speeds):
        values = {"transformer": 33, "linear": 66, "delta": 63} | speeds
        memory = {"transformer": 17, "linear": 13, "delta": 14}
        taken = {cell.config["model"]: cell for cell in cells("speed")}
        return Results(
            [
                record(taken[model], {"words_per_s": 1e3 * value, "memory_bytes": memory[model] * 2**30})
                for model, value in values.items()
            ]
        )

    assert verdicts("speed", found()) == [True, True]
    assert verdicts("speed", found(delta=50)) == [False, True]
    assert verdicts("speed", found(transformer=64)) == [True, False]
    assert {claim.holds for claim in EXPERIMENTS["speed"].judge("small", found())} == {None}, (
        "this machine is not theirs"
    )
    assert speed.SCALES["paper"].decides
    taken = EXPERIMENTS["speed"].cells("paper", None, {"set": {}, "device": "cuda"})
    on_gpu = [record(cell, {"words_per_s": 1.0, "memory_bytes": 1.0}) for cell in taken]
    table = EXPERIMENTS["speed"]
    assert table.label(on_gpu) == "paper" and table.label(found().records) == "the paper's sizes on cpu"
    assert {claim.holds for claim in table.judge("paper", Results(on_gpu))} == {True, False}
    assert {claim.holds for claim in table.judge("paper", found())} == {None}


def test_a_gain_over_a_training_that_diverged_is_none():
    gains = {"dpfp-1": (90.0, 90.0), "dpfp-1-delta": (88.0, 88.0), "performer-wide": (92.0, 92.0)}
    assert verdicts("table5", results("table5", {**gains, "performer-wide-delta": (None, None)})) == [False, True, None]


def test_a_tie_is_not_a_win():
    tied = results("table3", {"delta": (2.0, 2.0), "delta-nopos": (2.0, 1.0)})
    assert best_of(tied, "delta-nopos", {"delta": "Delta Network"}, "", "").holds is False


@pytest.mark.parametrize("name", TABLES[:4])
def test_plots_and_tables(name):
    experiment = EXPERIMENTS[name]
    found = results(name, dict.fromkeys(experiment.models, (10.0, 1234.5)), more={"xl": {"evaluations": XL}})
    svg = draw_files(experiment, found)["svg"]
    assert svg == draw_files(experiment, found)["svg"] and b"</svg>" in svg
    table = experiment.table(found)
    assert all(len(row) == len(table.header) for row in table.rows) and "1,234" in table.rows[0]
    styles = [STYLES[model] for model in experiment.models]
    assert len({(style.colour, style.marker) for style in styles}) == len(styles)
    assert draw_files(experiment, results(name, dict.fromkeys(experiment.models, (None, None))))["png"]


def test_full_trainings_are_compared_number_by_number():
    assert is_lower((98.0, 98.0), (100.0, 100.0)) and not is_lower((100.0, 98.0), (100.0, 100.0))
    assert True in verdicts("table2", results("table2", {"delta": (99.9, 99.9), "linear": (100, 100)}))
