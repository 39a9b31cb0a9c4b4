"""Tables 1 and 6: cells with the paper's sizes, claims on made-up results, and a smoke run from pairs to BLEU."""

import html
from dataclasses import replace
from pathlib import Path

import pytest

from fastweights.commands.progress import _outcome
from fastweights.data.manifest import DataError
from fastweights.data.pairs.corpus import ParallelCorpus
from fastweights.data.prepare import prepare
from fastweights.experiments import EXPERIMENTS
from fastweights.experiments.engine import translation_tables
from fastweights.experiments.engine.experiment import BadInput, CellRecord, Results, Selection, UserInput
from fastweights.experiments.engine.store import Store
from fastweights.experiments.engine.sweep import sweep
from fastweights.experiments.paper.table1 import PAPER
from fastweights.experiments.paper.table6 import measure
from fastweights.report.build import build
from fastweights.report.rows import result_rows
from tests.data.corpora import write_wikitext
from tests.data.pair_files import sentences, write_parallel, write_set

TABLE1, TABLE6 = EXPERIMENTS["table1"], EXPERIMENTS["table6"]
CORPUS = {"name": "WMT14 en-de", "pieces": 32_000, "fingerprint": "f"}
GIVEN = {"corpus": CORPUS, "set": {}}


def cells(scale, corpus=CORPUS, **settings):
    return {cell.config["model"]: cell for cell in TABLE1.cells(scale, given={"corpus": corpus, "set": settings})}


def test_the_paper_scale_is_the_papers():
    found = cells("paper")
    sizes = [found[model].config["d_dot"] for model in PAPER]
    assert sizes == [64, 64, 64, 256, 512, 256, 512]
    for model, cell in found.items():
        network, batches, training = (cell.config[part] for part in ("network", "batches", "training"))
        assert (network["d_model"], network["n_heads"], network["d_ff"]) == (1024, 16, 4096)
        assert (network["encoder_layers"], network["decoder_layers"], network["vocab_size"]) == (6, 6, 32_000)
        assert network["encoder"] == network["decoder"] == network["cross"] == model.split("-")[0]
        assert cell.config["rule"] == ("none" if model == "softmax" else "sum")
        assert batches["max_tokens"] == 3 * 3584 and training["accumulate"] == 16
        assert batches["label_smoothing"] == 0.1 and training["betas"] == [0.9, 0.98]
        assert training["schedule"] == "inverse_sqrt"
        assert cell.paper == dict(zip(("valid", "test"), PAPER[model], strict=True))
    features = [found[f"performer-{multiple}"].config["network"]["features"] for multiple in (1, 4, 8)]
    assert features == [32, 128, 256]
    assert [found[f"dpfp-{nu}"].config["network"]["nu"] for nu in (2, 4)] == [2, 4]


def test_other_sizes_keep_the_proportions():
    config = TABLE1.cell("paper", "performer-8", 512, 1, GIVEN).config
    assert config["network"]["d_model"] == 512 and config["d_dot"] == 512
    small = cells("small")
    d_key = small["linear"].config["d_dot"]
    assert [small[model].config["d_dot"] // d_key for model in PAPER] == [1, 1, 1, 4, 8, 4, 8]
    with pytest.raises(ValueError, match=r"d_model is one of 1024 \(big\), 512 \(base\), got 300"):
        TABLE1.cells("paper", Selection(sizes=(300,)), GIVEN)


def test_settings_and_pairs_are_part_of_a_cell():
    usual, longer = cells("paper"), cells("paper", steps=123)
    other = cells("paper", {**CORPUS, "name": "europarl"})
    assert longer["linear"].config["training"]["steps"] == 123
    assert len({found["linear"].slug for found in (usual, longer, other)}) == 3
    for name, message in (
        ("seed", "--seeds"),
        ("devices", "--device"),
        ("vocab_size", "follows from the corpus"),
        ("stepz", "steps"),
    ):
        with pytest.raises(ValueError, match=message):
            cells("paper", **{name: 1})


@pytest.mark.parametrize(
    ("settings", "able"),
    [
        ({"rule": "delta"}, [model for model in PAPER if model != "softmax"]),
        ({"features": 8}, ["performer-1", "performer-4", "performer-8"]),
        ({"redraw": True}, ["performer-1", "performer-4", "performer-8"]),
        ({"nu": 3}, ["dpfp-2", "dpfp-4"]),
        ({"attention_dropout": 0.2}, ["softmax"]),
        ({"decoder": "softmax", "attention_dropout": 0.2}, list(PAPER)),
    ],
)
def test_settings_that_some_models_have(settings, able):
    given = {"corpus": CORPUS, "set": settings}
    for model in PAPER:
        if model in able:
            network = TABLE1.cell("small", model, 64, 1, given).config["network"]
            assert settings.items() <= network.items()
        else:
            with pytest.raises(ValueError, match=f"which {model} has not: --models {','.join(able)}$"):
                TABLE1.cell("small", model, 64, 1, given)


def test_what_follows_from_other_steps():
    training = {model: cell.config["training"] for model, cell in cells("small", steps=50).items()}
    assert all((found["steps"], found["warmup"]) == (50, 5) for found in training.values())
    same = cells("small", steps=500)["linear"].config["training"]
    assert same == cells("small")["linear"].config["training"] and same["warmup"] == 50
    assert same["schedule"] == "cosine" and same["lr"] == 4e-3


def test_nothing_of_the_validation_is_left_to_a_default():
    for scale in ("smoke", "small", "paper"):
        assert {"bleu_sentences", "bleu_beam"} <= cells(scale)["linear"].config["batches"].keys()


def test_pairs_that_only_have_the_name(tmp_path):
    write_parallel(tmp_path / "wmt14")
    prepare("parallel", tmp_path / "wmt14", tmp_path / "pairs", vocab=280)
    assert translation_tables.identify(tmp_path / "pairs")["name"] == "wmt14, en-de (not the official corpus)"


def record(model, valid, test, *, size=1024, seed=1, name="WMT14 en-de"):
    config = TABLE1.cell("paper", model, size, seed, {"corpus": {**CORPUS, "name": name}, "set": {}}).config
    scores = {"valid": {"bleu": valid}, "test": {"bleu": test}}
    metrics = {
        "parameters": 2_000_000,
        "curve": [[10, 1.0], [20, valid]],
        "steps": 20,
        "best_bleu": valid,
        "last_bleu": valid,
    }
    rest = {"paper": None, "commit": "c", "hardware": "h", "versions": {}}
    return CellRecord(
        {**metrics, **{k: v for k, v in scores.items() if v["bleu"] is not None}}, 1.0, config=config, **rest
    )


def judged(scores):
    found = Results([record(model, *pair) for model, pair in scores.items()])
    return [claim.holds for claim in TABLE1.claims(found)]


def test_the_papers_numbers_fulfil_its_claims():
    assert judged(PAPER) == [True] * 5


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        ({"dpfp-2": (26.2, 26.8)}, [0]),
        ({"dpfp-4": (25.5, 27.1)}, [0]),
        ({"performer-4": (24.9, 26.9)}, [1]),
        ({"performer-1": (24.2, 25.4)}, [2]),
        ({"performer-8": (26.7, 27.1)}, [3]),
        ({"linear": (25.5, 27.8)}, [0, 4]),
    ],
)
def test_claims_that_fail(change, fails):
    assert [number for number, holds in enumerate(judged({**PAPER, **change})) if holds is False] == fails


def test_claims_on_part_of_the_models():
    assert judged({}) == judged({"softmax": (1, 1)}) == [None] * 5
    assert judged({"softmax": (26.6, 27.7), "linear": (25.5, 26.8)}) == [None] * 5
    assert judged({"linear": (25.5, 26.8), "dpfp-2": (26.2, 26.9)})[0] is None, "ν = 4 is missing"
    assert judged({"linear": (25.5, 26.8), "dpfp-2": (25.2, 26.9)})[0] is False
    assert judged({"softmax": (26.6, 27.7), "linear": (25.5, 28.0)})[4] is False


def test_only_long_trainings_decide():
    def verdicts(scale, size, corpus=CORPUS, **settings):
        made = [TABLE1.cell(scale, model, size, 1, {"corpus": corpus, "set": settings}) for model in PAPER]
        runs = [
            replace(record(cell.config["model"], *PAPER[cell.config["model"]]), config=cell.config) for cell in made
        ]
        return TABLE1.label(runs), {claim.verdict for claim in TABLE1.judge(scale, Results(runs))}

    beyond, europarl = {"not decided at this scale"}, {**CORPUS, "name": "europarl-de-en, en-de"}
    assert verdicts("paper", 1024) == ("paper", {"holds"})
    assert verdicts("paper", 1024, clip=1.0) == ("paper", {"holds"}), "as much training on the same pairs"
    assert verdicts("paper", 1024, steps=2000) == ("WMT14 en-de, 2,000 updates", beyond)
    enough = {"steps": 20_000, "max_tokens": 8_000}
    assert verdicts("paper", 512, **{**enough, "steps": 19_999}) == ("WMT14 en-de, 19,999 updates", beyond)
    assert verdicts("paper", 512, europarl, **enough) == ("Europarl, 20,000 updates", {"holds"}), "long enough"
    assert verdicts("paper", 1024, europarl, steps=2000) == ("Europarl, 2,000 updates", beyond)
    assert verdicts("small", 64) == ("small", beyond)


def test_seeds_are_averaged_and_a_diverged_run_counts_nothing():
    runs = [record("dpfp-2", 20, 20, seed=1), record("dpfp-2", 30, 30, seed=2), record("performer-4", 24, 24)]
    claim = TABLE1.claims(Results(runs))[1]
    assert claim.holds and claim.ours == "25.0 / 25.0 against 24.0 / 24.0"
    runs[1] = replace(runs[1], metrics={**runs[1].metrics, "diverged_at": 5})
    assert TABLE1.claims(Results(runs))[1].holds is False


def test_sizes_are_not_mixed():
    """Of several sizes the largest that every model has is judged."""
    runs = [record("dpfp-2", 20, 20, size=512), record("performer-4", 19, 19, size=512), record("dpfp-2", 9, 9)]
    assert TABLE1.claims(Results(runs))[1].ours == "20.0 / 20.0 against 19.0 / 19.0"


def test_the_table_names_the_pairs():
    made = TABLE1.table(Results([record("softmax", 20.04, 21, size=512, name="europarl-de-en, en-de")]))
    row = dict(zip(made.header, made.rows[0], strict=True))
    assert row["pairs"] == "europarl-de-en, en-de" and row["d_dot"] == "64" and row["D"] == "512"
    assert [row[name] for name in ("validation", "test", "paper, validation", "paper, test")] == [
        "20.0",
        "21.0",
        "26.6 (D = 1024)",
        "27.7 (D = 1024)",
    ]
    made = TABLE1.table(Results([record("softmax", 20.04, 21)]))
    assert made.rows[0][6:8] == ("26.6", "27.7")
    numbers = [record("softmax", 99, 97, name="number words, en-de"), record("linear", 99, 94, name="number words")]
    made = TABLE1.table(Results(numbers))
    assert made.header[-1] == "learned (BLEU of at least 95)" and [row[-1] for row in made.rows] == ["yes", "no"]


def test_which_pairs_are_taken(tmp_path):
    write_wikitext(tmp_path / "text")
    prepare("wikitext2", tmp_path / "text", tmp_path / "stream", allow_other=True)
    write_parallel(tmp_path / "europarl")
    prepare("parallel", tmp_path / "europarl", tmp_path / "pairs", vocab=280)
    given = TABLE1.inputs_for("paper", UserInput((tmp_path / "stream", tmp_path / "pairs"), {"steps": 9}))
    assert given.data == tmp_path / "pairs" and given.config["set"] == {"steps": 9}
    corpus = ParallelCorpus.load(tmp_path / "pairs")
    assert given.config["corpus"] == {"name": "europarl, en-de", "pieces": 280, "fingerprint": corpus.fingerprint}
    for folders, message in (((), "needs sentence pairs"), ((tmp_path / "stream",), "stream holds none.*data wmt14")):
        with pytest.raises(BadInput, match=message):
            TABLE1.inputs_for("paper", UserInput(folders))
    with pytest.raises(BadInput, match="learns to translate number words"):
        TABLE1.inputs_for("small", UserInput((tmp_path / "pairs",)))


class Watcher:
    def __init__(self):
        self.steps = []

    def begin(self, experiment, known, missing):
        pass

    def step(self, cell, step, loss):
        self.steps.append((cell.config["model"], step))

    def done(self, record):
        pass


def test_smoke(tmp_path, monkeypatch):
    """From number words to BLEU of two models, kept; then the page."""

    def numbers():
        prepare("numbers", None, tmp_path / "numbers", pairs=60, held_out=8)
        return tmp_path / "numbers"

    monkeypatch.setattr(translation_tables, "_numbers", numbers)
    given = TABLE1.inputs_for("smoke", UserInput())
    chosen = TABLE1.cells("smoke", Selection(models=("softmax", "dpfp-2")), given.config)
    store, watcher = Store(tmp_path / "results"), Watcher()
    sweep(TABLE1, chosen, store, watcher, data=given.data, jobs=1)
    assert {model for model, _ in watcher.steps} == {"softmax", "dpfp-2"}
    found = store.known("table1")
    assert found.keys() == {cell.slug for cell in chosen}
    for record in found.values():
        assert record.metrics["steps"] == 4 and record.metrics["best_step"] in (2, 4)
        assert record.metrics["best_bleu"] >= record.metrics["last_bleu"] and "best_loss" not in record.metrics
        for split in ("valid", "test"):
            assert 0 <= record.metrics[split]["bleu"] <= 100 and record.metrics[split]["sentences"] == 4
            assert "tok:13a" in record.metrics[split]["signature"] and "samples" not in record.metrics[split]
        references = ParallelCorpus.load(given.data).split("test").targets
        assert [sample[1] for sample in record.metrics["samples"]] == references[:3]
    page, _ = build(store)
    text = page.read_text()
    scored = "BLEU of models trained on number words, en-de, scored on its validation and test sets."
    assert f"{scored} The paper's models are trained and scored on WMT14 en-de." in html.unescape(text)
    assert references[0] in text and "A check that everything runs." in text
    again = Watcher()
    sweep(TABLE1, chosen, store, again, data=given.data, jobs=1)
    assert not again.steps, "what is known is not trained again"


def test_what_the_terminal_says_of_a_cell():
    assert _outcome(record("linear", 20, 21.04).metrics) == "test BLEU 21.0 after 20 steps, "
    assert _outcome(record("linear", 20, None).metrics) == "validation BLEU 20.0 after 20 steps, "


def test_the_page_says_what_is_scored_and_what_is_not_the_papers(tmp_path):
    """By the cells themselves, or for older cells by the corpus that has their fingerprint."""
    write_parallel(tmp_path / "europarl")
    write_set(tmp_path, "newstest2013", sentences(7, 5))
    write_set(tmp_path, "newstest2014", sentences(8, 5))
    held_out = {"valid": tmp_path / "newstest2013", "test": tmp_path / "newstest2014"}
    prepare("parallel", tmp_path / "europarl", tmp_path / "pairs", vocab=280, **held_out)
    corpus = translation_tables.identify(tmp_path / "pairs")
    cell = TABLE1.cell("paper", "linear", 512, 1, {"corpus": corpus, "set": {"norm": "pre", "steps": 2000}})
    told = {"valid": "newstest2013", "test": "newstest2014"}

    def page(name, **more):
        store = Store(tmp_path / name)
        found = CellRecord(
            metrics={"valid": {"bleu": 6.0}, "test": {"bleu": 5.0}, "curve": [[1000, 4.0], [2000, 6.0]], **more},
            wall_s=2.0, config=cell.config, paper=None, commit="abc", hardware="a GPU", versions={},
        )  # fmt: skip
        store.save("table1", found)
        return store, lambda: html.unescape(build(store)[0].read_text())

    store, old = page("old")
    begin = "BLEU of models trained on europarl, en-de"
    end = " The paper's models are trained and scored on WMT14 en-de."
    known = f"{begin}; validation set newstest2013, test set newstest2014.{end}"
    assert f"{begin}, scored on its validation and test sets.{end}" in old()
    before = [path.read_bytes() for path in sorted(store.out.glob("*/cells/*"))]
    write_set(tmp_path, "another", sentences(9, 5))
    prepare("parallel", tmp_path / "europarl", tmp_path / "other", vocab=280, valid=tmp_path / "another")
    with pytest.raises(BadInput, match=r"no result in .*old was made with the corpus in .*other \(europarl, "):
        store.keep_corpus(tmp_path / "other")
    store.keep_corpus(tmp_path / "pairs")
    assert known in old()
    assert [path.read_bytes() for path in sorted(store.out.glob("*/cells/*"))] == before
    assert store.current(TABLE1)[1][0].metrics["sets"] == told
    store, prepared_before = page("before", sets={})
    store.keep_corpus(tmp_path / "pairs")
    assert known in prepared_before()
    text = page("new", sets=told)[1]()
    assert known in text
    departures = {"text": ("europarl, en-de", "WMT14 en-de"), "steps": ("2000", "35,000"), "d_model": ("512", "1024")}
    for name, (ours, paper) in {**departures, "norm": ("pre", "post")}.items():
        assert f"<tr><td>{name}</td><td>{ours}</td><td>{paper}</td></tr>" in text


def test_corpora_that_do_not_say_what_is_scored_are_refused(tmp_path):
    store = Store(tmp_path / "results")
    with pytest.raises(DataError, match=r"no corpus in .*nothing"):
        store.keep_corpus(tmp_path / "nothing")
    prepare("numbers", None, tmp_path / "numbers", pairs=60, held_out=8)
    with pytest.raises(DataError, match=r"numbers does not name its validation and test set"):
        store.keep_corpus(tmp_path / "numbers")
    store.out.mkdir()
    (store.out / "corpora.json").write_text("[1]")
    with pytest.raises(BadInput, match=r"corpora\.json is not a list of corpora"):
        store.corpora()


def test_the_papers_own_cells_depart_in_nothing():
    for name, cell in cells("paper").items():
        assert TABLE1.departures([replace(record(name, 20, 21), config=cell.config)]) == {}


def test_the_data_are_of_bleu():
    runs = [record("linear", 20, 21), record("linear", 18, 19, size=512), record("dpfp-2", 20, 21)]
    runs[2] = replace(runs[2], metrics={**runs[2].metrics, "diverged_at": 7})
    header, *rows = result_rows(TABLE1, Results(runs))
    assert header == [
        "model", "D", "seed", "parameters", "steps", "best BLEU", "last BLEU", "diverged at", "seconds"
    ]  # fmt: skip
    assert [row[1] for row in rows] == ["1024", "512", "1024"] and [row[-2] for row in rows] == ["", "", "7"]


def test_another_corpus_in_the_same_folder_is_refused(tmp_path):
    prepare("numbers", None, tmp_path, pairs=60, held_out=8)
    config = dict(TABLE1.cell("smoke", "linear", 16, 1, GIVEN).config)
    with pytest.raises(BadInput, match="was changed"):
        translation_tables.build(config, Path(tmp_path))


def test_d_dot_of_table_6():
    found = {(c.config["model"], c.config["size"]): measure(c.config)["d_dot"] for c in TABLE6.cells("paper")}
    assert len(found) == 6 and all(size == d_dot for (_, size), d_dot in found.items())


def test_claims_of_table_6():
    def records(wrong=0):
        rest = {"paper": None, "commit": "c", "hardware": "h", "versions": {}}
        return [
            CellRecord({**measure(cell.config), "d_dot": cell.config["size"] + wrong}, 0.1, config=cell.config, **rest)
            for cell in TABLE6.cells("small")
        ]

    right = records()
    assert [claim.holds for claim in TABLE6.claims(Results(right))] == [True, True]
    assert [claim.holds for claim in TABLE6.claims(Results(right[:2]))] == [None, None]
    assert [claim.holds for claim in TABLE6.claims(Results(records(1)))] == [False, False]
    assert TABLE6.table(Results(right)).rows == (("Performer, m", "128", "192", "256"), ("DPFP, ν", "2", "3", "4"))
    assert TABLE6.table(Results(records(1)[:1])).rows[0][1] == "128 (gives 257)"
