"""Numbers of what was trained, and those that the code decides: sizes of models, scales, corpora."""

import json
from inspect import signature
from itertools import chain

import fastweights as fw
from fastweights.commands.export import LIMIT
from fastweights.commands.translate import WINDOW
from fastweights.data.registry import CORPORA
from fastweights.data.text.build import _ends
from fastweights.data.tokenizer import BYTES, PIECES
from fastweights.experiments import EXPERIMENTS
from fastweights.experiments.engine.corpora import WIKITEXT103
from fastweights.experiments.engine.language_tables import SMALL, SMOKE, STAND_INS
from fastweights.experiments.engine.perplexity import CLOSE
from fastweights.experiments.paper import table3
from fastweights.experiments.paper.table1 import LONG
from fastweights.look.command import ROOM, look
from fastweights.models import presets, translation_presets
from fastweights.onnx.export import STANDARD_OPSET
from fastweights.training.tasks.translation import BLEU_SENTENCES
from tests.numbers.declared import ROOT, cells, count_code, parameters, source
from tests.numbers.text import DEMO, agrees

SMALL_PARAMETERS, MEDIUM_PARAMETERS = 40e6, 90e6  # as the paper prints them, Sec. 6.3


# What has been trained.


@source("README.md", "| what | data | training | where |")
def _():
    figures = [cell["config"] for name in ("fig2", "fig3", "fig4", "fig5") for cell in cells(name)]
    paper = presets.RECIPES["small"]["steps"]
    (steps,) = {cell["config"]["steps"] for cell in cells("table5") if cell["config"]["scale"] == "wikipedia"}
    return [len({json.dumps(config, sort_keys=True) for config in figures}), updates_of_table1(), 100 * steps / paper]


def updates_of_table1():
    (steps,) = {cell["config"]["steps"] for cell in cells("table1")}
    return steps


source("docs/experiments.md", "Results carry the name of a scale")(lambda: [updates_of_table1()])


@source("README.md", "| trained for five passes")
def _():
    for model in ("transformer", "delta", "linear"):
        found = [cell for cell in cells("table2") if cell["config"]["steps"] == 21_000]
        (cell,) = [cell for cell in found if cell["config"]["model"] == model]
        yield from (cell["metrics"][split]["ppl"] for split in ("valid", "test"))


@source("docs/experiments.md", "| Figure 2 |")
def _():
    for model in ("linear", "dpfp-1", "dpfp-2", "dpfp-3"):
        runs = [cell for cell in cells("fig2") if cell["config"]["model"] == model]
        yield min(cell["config"]["size"] for cell in runs if cell["metrics"]["best_loss"] > 0.01)
    yield fw.feature_map("elu", d_key=64).dim
    yield from (fw.feature_map("dpfp", d_key=64, nu=nu).dim for nu in (1, 2, 3))


@source("docs/experiments.md", "Results are written to the folder")
def _():
    given = {"corpus": {"name": "", "fingerprint": "", "words": 5_000}, "set": {}}
    shared = {
        cell.slug
        for name in ("table2", "table3", "table4", "table5")
        for cell in EXPERIMENTS[name].cells("small", given=given)
    }
    yield len(shared)


@source("docs/experiments.md", "| scale | models | text | evaluation |")
def _():
    settings = SMALL.settings
    yield SMOKE.excerpt
    yield from (settings["d_model"], settings["segment"], settings["steps"], SMALL.stride, SMALL.rows)
    yield WIKITEXT103.words


@source("docs/experiments.md", "These tables also have stand-ins")
def _():
    (size,) = {size for scale in STAND_INS.values() for size in scale.sizes}
    yield size


@source("docs/experiments.md", "| stand-in | models and training |")
def _():
    wikipedia, wikitext2 = (STAND_INS[name] for name in ("wikipedia", "wikitext2"))
    yield wikipedia.settings["steps"]
    yield 100 * wikipedia.settings["steps"] / presets.RECIPES["small"]["steps"]
    yield from (WIKITEXT103.words, wikipedia.stride, wikitext2.settings["steps"], wikitext2.stride)


@source("docs/experiments.md", "- Scales `paper` and `code` decide everything")
def _():
    yield from LONG.values()
    yield 100 * CLOSE


@source("docs/experiments.md", "| where | difference |")
def _():
    best, *others = (table3.PAPER[name] for name in ("delta-nopos", "delta", "delta-norm", "delta-nopos-norm"))
    gaps = sorted(test - valid for valid, test in others)
    yield from (*best, best[1] - best[0], gaps[0], gaps[-1], best[0], best[1] - gaps[-1])
    yield from (SMALL_PARAMETERS, parameters("small"))
    size = presets.PRESETS["small"]()
    feature = fw.feature_map("dpfp", d_key=size.d_model // size.n_heads, nu=1).dim
    yield from (size.n_heads * feature, feature, presets.RECIPES["small"]["segment"])
    yield from (presets.training_recipe("medium", "xl")[name] for name in ("steps", "warmup"))


# Language models.


@source("docs/training.md", "| preset | what it is |")
def _():
    small, medium = (presets.PRESETS[name]() for name in ("small", "medium"))
    yield from (small.n_layers, small.d_model, presets.RECIPES["small"]["segment"])
    yield from (medium.d_model, presets.RECIPES["medium"]["segment"])


@source("docs/training.md", "`small` has ")
def _():
    assert agrees(f"{MEDIUM_PARAMETERS / 1e6:.0f} M", parameters("medium"))
    return [parameters("small"), SMALL_PARAMETERS, MEDIUM_PARAMETERS]


def of_demo():
    """Return the step and scores of the weights, the steps that were planned, and the result on the test set."""
    folder = (ROOT / DEMO).parent
    (manifest,), (result,) = folder.glob("checkpoints/best-*/manifest.json"), folder.glob("eval/*.json")
    planned = json.loads((folder / "config.json").read_text())["training"]["steps"]
    return json.loads(manifest.read_text()), planned, json.loads(result.read_text())


source(DEMO, "**How it was made.**")(lambda: [of_demo()[0]["step"]])


@source(DEMO, "| | |")
def _():
    weights, planned, result = of_demo()
    scores = [*weights["scores"].values(), result["ppl"], result["bits_per_byte"]]
    return [fw.load("demo").model.n_parameters, weights["step"], planned, *scores]


# Translation.


def translation(name):
    model = translation_presets.PRESETS[name]()
    return [number for number in (model.d_model, model.n_heads, model.d_ff) if number > 9]


@source("docs/translation.md", "| preset | layers |")
def _():
    return chain.from_iterable(map(translation, ("quick", "big", "base", "tiny")))


@source("docs/translation.md", "| attention | φ |")
def _():
    size = 64
    features, nus = (32, 128, 256), (2, 3, 4)
    yield from (size, size, fw.feature_map("elu", d_key=size).dim)
    yield from (fw.feature_map("favor", d_key=size, m=m).dim for m in features)
    yield from features
    yield fw.feature_map("dpfp", d_key=size, nu=1).dim
    yield from (fw.feature_map("dpfp", d_key=size, nu=nu).dim for nu in nus)


@source("docs/translation.md", "| choice | here | why |")
def _():
    big = translation_presets.RECIPES["big"]
    yield from (big["lr"], big["warmup"], big["accumulate"])
    yield from CORPORA["wmt14"].official.valid[:1]


@source("docs/translation.md", "Label smoothing is")
def _():
    big = translation_presets.RECIPES["big"]
    return [big["label_smoothing"], *big["betas"], big["max_tokens"] // 3, big["accumulate"]]


source("docs/translation.md", "The same command resumes")(lambda: [BLEU_SENTENCES])
source("docs/translation.md", "Lines are UTF-8.")(lambda: [WINDOW])


@source("docs/translation.md", "A folder holds aligned files")
@source("docs/data.md", "Both languages share one byte pair encoding")
def _():
    (size,) = {CORPORA[name].options["vocabulary_size"] for name in ("wmt14", "parallel")}
    yield size


# Data and examples.

source("docs/quick-start.md", "| file | shows |")(lambda: [count_code("examples/character_model.py")])


@source("docs/data.md", "| kind | what to give")
def _():
    _, valid, test, end = _ends(100)
    return [valid, test - valid, end - test]


@source("docs/data.md", "| `--tokens` |")
def _():
    return [len(BYTES), PIECES, len(BYTES), len(BYTES)]


source("docs/data.md", "Tables that need WikiText-103")(lambda: [WIKITEXT103.words])


@source("docs/data.md", "| problem | what happens |")
def _():
    official = CORPORA["wmt14"].official
    return [*official.train, official.valid[0], *official.test]


@source("docs/data.md", '"one hundred twenty-three, seven"')
def _():
    yield CORPORA["numbers"].options["vocabulary_size"]


@source("docs/look.md", "| option | meaning |")
def _():
    # The limit counts what is stored; the page's own code is the rest.
    assert 0.5e6 < ROOM < 2e6
    return [signature(look).parameters["tokens"].default, 2e6]


source("docs/onnx.md", "After writing, the command runs")(lambda: [LIMIT])
source("docs/onnx.md", "| `--operators` |")(lambda: [STANDARD_OPSET])
