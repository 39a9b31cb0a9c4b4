"""Numbers in README and docs equal those in the files they are taken from."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LANGUAGE = ["table2", "table3", "table4", "table5"]
BENCHMARKS = {"memory", "retrieval", "kernels", "lm", "lm-agreement", "stream", "mt", "transformers"}


def rows(name):
    """Return the measurements of `results/bench/NAME.json`."""
    return json.loads((ROOT / "results" / "bench" / f"{name}.json").read_text())["rows"]


def row(name, /, **fields):
    """Return the only row of `results/bench/NAME.json` that has these fields."""
    (found,) = [row for row in rows(name) if fields.items() <= row.items()]
    return found


def tables(document):
    """Return every table of a document as a list of rows, each a list of cells, the header first."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", (ROOT / document).read_text(), re.MULTILINE)
    cells = [[[cell.strip() for cell in line.strip("|").split("|")] for line in b.splitlines()] for b in blocks]
    return [[table[0], *table[2:]] for table in cells]


def table(document, header):
    """Return the rows below the header of the only table whose header begins with these cells."""
    (found,) = [table[1:] for table in tables(document) if table[0][: len(header)] == header]
    assert found
    return found


def agrees(text, value):
    """Say whether `text` is `value`, rounded to the digits that `text` has."""
    return round(value, len(text.partition(".")[2])) == float(text.replace(",", ""))


def measured_kernel(shape, dtype, way, key):
    """Return milliseconds for a shape as tables write it: "96 x 256, 8 of 16"."""
    batch, length, heads, size = map(int, re.findall(r"\d+", shape)[:4])
    found = row("kernels-h200", part="shape", shape=[batch, length, heads, size, size], dtype=dtype)
    return found["measured"][way][key]


def test_speed_of_the_delta_rule():
    names = {"fastweights": 1, "fla chunk": 2, "sdpa": 3}
    header = ["batch x length, heads", "fastweights", "flash-linear-attention 0.6.0", "softmax attention (PyTorch)"]
    assert rows("kernels-h200")[0]["fla-core"] == "0.6.0"
    for line in table("README.md", header):
        for name, column in names.items():
            assert agrees(line[column], measured_kernel(line[0], "bfloat16", name, "both_graph_ms")), (line[0], name)


def test_speed_of_the_delta_rule_eager_and_in_float32():
    for shape, dtype, how, ours, fla, softmax in table("docs/kernels.md", ["batch x length, heads", "dtype"]):
        key = {"CUDA graph": "both_graph_ms", "eager": "both_eager_ms"}[how]
        rival = "fla recurrent" if fla.endswith("(recurrent)") else "fla chunk"
        assert agrees(ours, measured_kernel(shape, dtype, "fastweights", key)), (shape, dtype, how)
        assert agrees(fla.split()[0], measured_kernel(shape, dtype, rival, key)), (shape, dtype, how)
        # The faster of flash-linear-attention's kernels is shown.
        other = {"fla recurrent": "fla chunk", "fla chunk": "fla recurrent"}[rival]
        if dtype == "bfloat16":
            assert measured_kernel(shape, dtype, other, key) > measured_kernel(shape, dtype, rival, key)
        assert softmax == "-" or agrees(softmax, measured_kernel(shape, dtype, "sdpa", key)), (shape, dtype, how)


def test_time_of_first_calls():
    first = [row("kernels-h200", part="first call", name=name) for name in ("paper small", "paper medium")]
    for document in ("README.md", "docs/kernels.md"):
        assert all(f"{call['checked']['first_s']:.1f} s" in (ROOT / document).read_text() for call in first)
    assert all(f"{call['from disk']['first_s']:.1f} s once" in (ROOT / "docs/kernels.md").read_text() for call in first)


def test_speed_of_a_stream():
    kinds = {
        "Delta Network, CUDA graph": {"model": "delta", "graph": True},
        "Delta Network, eager": {"model": "delta", "graph": False},
        "Transformer with its cache, eager": {"model": "transformer", "graph": False},
    }
    lines = table("docs/streams.md", ["", "after 256 tokens"])
    assert [line[0] for line in lines] == list(kinds)
    for kind, *times, state in lines:
        for past, ms in zip((256, 4096, 65536), times, strict=True):
            measured = row("stream-h200", past=past, **kinds[kind])
            assert agrees(ms, measured["ms"]), (kind, past)
        number, unit = state.split()
        assert agrees(number, measured["state_bytes"] / {"KB": 1e3, "GB": 1e9}[unit]), kind


def test_speed_of_training():
    stock = {name: row("lm-stock-h200", model=name) for name in ("delta", "transformer")}
    expected = {
        "Delta Network, small": stock["delta"]["fast"],
        "Transformer, small": stock["transformer"]["fast"],
        "Transformer, small, of PyTorch's own parts, compiled": stock["transformer"]["stock"],
        "Delta Network, medium": row("lm-medium-h200", model="delta", size="medium")["fast"],
    }
    lines = table("docs/training-speed.md", ["model", "words/s"])
    ours = {model: speed for model, speed, file in lines if file != "Sec. 6.3"}
    assert ours.keys() == expected.keys()
    for model, speed in ours.items():
        assert agrees(speed.removesuffix(" M"), expected[model]["words_per_s"] / 1e6), model
    assert f"({ours['Delta Network, small']} words/s for the" in (ROOT / "README.md").read_text()


def test_speed_of_translation():
    lines = table("docs/translation.md", ["source tokens", "decoding, ms a token: linear"])
    assert [line[0] for line in lines] == ["32", "512", "4,096"]
    for length, *cells in lines:
        for i, attention in enumerate(("linear", "softmax")):
            measured = row("mt-h200", attention=attention, source_length=int(length.replace(",", "")))
            assert agrees(cells[i], measured["step_ms"]), (length, attention)
            assert agrees(cells[2 + i], measured["train_tokens_per_s"] / 1e3), (length, attention)


def agreement(model):
    """Return by how many per cent 200 losses and the perplexity of the fast way differ at most from the plain way."""
    (measured,) = rows(f"lm-agreement-{model}-h200")
    losses = measured["losses"]["losses"]
    worst = max(abs(a / b - 1) for a, b in zip(losses["fast"], losses["plain"], strict=True))
    ways = measured["perplexity"]["ways"]
    return 100 * worst, 100 * abs(ways["fast"]["valid"]["ppl"] / ways["plain"]["valid"]["ppl"] - 1)


def test_agreement_of_the_fast_way():
    for (*_, delta, linear), i in zip(table("docs/training-speed.md", ["", "allowed"]), (0, 1), strict=True):
        for text, model in ((delta, "delta"), (linear, "linear")):
            assert agrees(text.removesuffix(" %"), agreement(model)[i]), (i, model)


def cells(experiment):
    """Return every trained model of an experiment, configuration and metrics."""
    return [json.loads(path.read_text()) for path in sorted((ROOT / "results" / experiment / "cells").glob("*.json"))]


def five_passes(model):
    """Return the metrics of a model after five passes over Wikipedia."""
    found = [cell for cell in cells("table2") if cell["config"]["steps"] == 21_000]
    (cell,) = [cell for cell in found if cell["config"]["model"] == model]
    return cell["metrics"]


def first_failure(model, limit):
    """Return the smallest number of keys at which the best loss of a model of Figure 2 is above `limit`."""
    runs = [cell for cell in cells("fig2") if cell["config"]["model"] == model]
    return min(cell["config"]["size"] for cell in runs if cell["metrics"]["best_loss"] > limit)


def columns(document, header):
    """Return the columns of a table by their names, each the list of its cells."""
    (found,) = [table for table in tables(document) if table[0][0] == header]
    return {name: cells for name, *cells in list(zip(*found, strict=True))[1:]}


def test_capacity_of_the_memories():
    names = {"linear attention": "linear", "DPFP-1": "dpfp-1", "DPFP-2": "dpfp-2", "DPFP-3": "dpfp-3"}
    found = {names[name]: int(first) for name, (first, _) in columns("README.md", "Figure 2").items()}
    assert found == {model: first_failure(model, 0.01) for model in names.values()}


def test_perplexities_after_five_passes():
    names = {"Transformer": "transformer", "Delta Network": "delta", "linear attention": "linear"}
    found = columns("README.md", "Wikipedia, five passes")
    assert found.keys() == names.keys()
    for name, (scores,) in found.items():
        metrics = five_passes(names[name])
        assert all(map(agrees, scores.split(" / "), (metrics["valid"]["ppl"], metrics["test"]["ppl"]))), name


def test_number_of_trained_models():
    figures = [cell["config"] for name in ("fig2", "fig3", "fig4", "fig5") for cell in cells(name)]
    trained = len({json.dumps(config, sort_keys=True) for config in figures})
    assert f"all {trained} models" in (ROOT / "README.md").read_text()


def test_float32_kernels_are_as_exact_as_the_documentation_says():
    checks = [r for r in rows("kernels-h200") if r["part"] == "check" and r["name"].startswith("float32")]
    assert max(error for check in checks for error in check["errors"].values()) < 2e-6


@pytest.mark.parametrize(
    ("entry", "experiments"),
    [
        ("2026-11-15-wikitext2", LANGUAGE),
        ("2026-11-15-translation-table1", ["table1"]),
        ("2026-11-15-wikipedia-first-seven", LANGUAGE),
        ("2026-11-15-wikipedia-all-models", LANGUAGE),
        ("2026-11-16-five-passes", LANGUAGE),
    ],
)
def test_scores_in_the_log(entry, experiments):
    written = re.findall(
        r"(\d[\d,]*(?:\.\d)?) / (\d[\d,]*(?:\.\d)?)", (ROOT / "docs" / "log" / f"{entry}.md").read_text()
    )
    metrics = [cell["metrics"] for experiment in experiments for cell in cells(experiment)]
    scores = [[m[split].get("ppl", m[split].get("bleu")) for split in ("valid", "test")] for m in metrics]
    assert written
    for pair in written:
        assert any(all(map(agrees, pair, score)) for score in scores), pair


JUDGED = {
    "cpu": "fastweights-cpu",
    "chunked": "fastweights-chunked",
    "T 5.23.0 chunk": "transformers-chunk",
    "T 5.23.0 recurrent": "transformers-recurrent",
    "T 5.16.0 chunk": "transformers-5.16-chunk",
    "fla chunk": "fla-naive-chunk",
    "fla recurrent": "fla-naive-recurrent",
}


def judged(name):
    """Return the verdicts of `results/verify/NAME.json` as the table of docs/verify.md writes them."""
    cells = {}
    for found in json.loads((ROOT / "results" / "verify" / f"{name}.json").read_text())["rows"]:
        errors, limits = {key: float(x) for key, x in found["errors"].items()}, found["tolerances"]
        verdict = "" if found["verdict"] == "right" else f"**{found['verdict']}** "
        if not errors:
            cells[found["case"]] = "-" if found["verdict"] == "not supported" else found["verdict"]
            continue
        worst = errors[max(errors, key=lambda key: errors[key] / limits[key])]
        cells[found["case"]] = verdict + ("∞" if worst == float("inf") else f"{worst:.0e}".replace("e-0", "e-"))
    return cells


def test_verdicts_on_kernels():
    (found,) = [table for table in tables("docs/verify.md") if table[0][0] == "case"]
    assert found[0] == ["case", *JUDGED]
    verdicts = [judged(f"gated_delta-{name}") for name in JUDGED.values()]
    assert found[1:] == [[case, *(cells[case] for cells in verdicts)] for case in verdicts[0]]
    for name in ("gated_delta-fastweights-reference", "kda-fastweights-cpu"):
        assert not any("*" in cell or cell in ("-", "error") for cell in judged(name).values())


def test_speed_of_models_of_transformers():
    for model, what, *numbers in table("docs/transformers.md", ["model", "what"]):
        measured = row("transformers-cpu", model=model, what=what)
        keys = ("fallback_ms", "fastweights_ms", "speedup", "most")
        assert all(map(agrees, numbers, [measured[key] for key in keys]))


@pytest.mark.parametrize("path", sorted((ROOT / "results" / "bench").iterdir()), ids=lambda path: path.name)
def test_benchmarks_come_from_a_command(path):
    assert json.loads(path.read_text())["benchmark"] in BENCHMARKS
