"""Every number in README and docs has a source and agrees with it.

A block of a document is a paragraph, a list or a table. The source of its numbers is a function in `tests/numbers` that
returns them in the order of the text, from a file under `results/` or from the code:

    @source("docs/streams.md", "| | after 256 tokens")
    def _(): ...

or the whole block as text. Kinds of numbers that need no source, such as those inside code, are listed in
`tests/numbers/text.py`.
"""

import json
import re

import pytest

import tests.numbers.facts
import tests.numbers.speed  # noqa: F401, both declare sources
from tests.numbers.declared import SOURCES, cells, row
from tests.numbers.text import PAGES, ROOT, agrees, blocks, numbers

LANGUAGE = ["table2", "table3", "table4", "table5"]
BENCHMARKS = {"memory", "retrieval", "kernels", "lm", "lm-agreement", "stream", "states", "mt", "transformers"}
# They derive what they say: of their numbers, those that were measured need a source.
DERIVATIONS = ("docs/kernels.md", "docs/speed.md", "docs/maths.md", "docs/probes.md", "docs/verify.md")


@pytest.mark.parametrize("document", PAGES)
def test_every_number_has_a_source_and_agrees_with_it(document):
    declared = {beginning: values for (name, beginning), values in SOURCES.items() if name == document}
    for block in blocks(document):
        found = numbers(block, measured_only=document in DERIVATIONS)
        known = [declared.pop(beginning) for beginning in list(declared) if block.startswith(beginning)]
        assert known or not found, f"{document}: {found} in {block[:60]!r} have no source; declare one in tests/numbers"
        for values in known:
            expected = values()
            if isinstance(expected, str):
                assert block == expected
                continue
            expected = list(expected)
            assert len(found) == len(expected), (block, found, expected)
            wrong = [pair for pair in zip(found, expected, strict=True) if not agrees(*pair)]
            assert not wrong, f"{document}: {wrong} in {block[:60]!r}"
    assert not declared, f"{document} has no block that begins with {list(declared)}"


def test_numbers_without_a_source_and_wrong_ones_are_seen():
    text = "Table 2 of DPFP-1 in `--set steps=5`, Triton 3.6, 16 bits: 2,000 updates, 1.94 M words/s, 0.8 % of 7 heads"
    assert numbers(text) == ["2,000", "1.94 M", "0.8 %"] and numbers(text, measured_only=True) == ["1.94 M", "0.8 %"]
    assert agrees("1.94 M", 1_938_000) and not agrees("1.94 M", 1_934_000)
    assert agrees("0.8 %", 0.84) and not agrees("2,000", 2_001)


def test_times_on_a_cpu_in_the_log():
    text = (ROOT / "docs" / "log" / "2026-11-19-four-tokens-on-cpu.md").read_text()
    lines = re.findall(r"^\| (\d+), (\d+), (\d+), (\d+) \| (.+) \| (.+) \| (.+) \| (.+) \|.*\|$", text, re.MULTILINE)
    assert len(lines) == 5
    for *sizes, forward, onnx, both, share in lines:
        shape = [int(size) for size in sizes]
        ours, rival = (row("memory-cpu", shape=shape, rival=name) for name in ("cpu", "onnxruntime"))
        assert agrees(forward, 1e3 * ours["forward"]) and agrees(both, 1e3 * ours["forward_backward"])
        assert agrees(onnx, 1e3 * rival["forward"])
        assert agrees(share, 100 * ours["forward_backward_share_of_gemm"])


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
    text = (ROOT / "docs" / "log" / f"{entry}.md").read_text()
    written = re.findall(r"(\d[\d,]*(?:\.\d)?) / (\d[\d,]*(?:\.\d)?)", text)
    metrics = [cell["metrics"] for experiment in experiments for cell in cells(experiment)]
    scores = [[m[split].get("ppl", m[split].get("bleu")) for split in ("valid", "test")] for m in metrics]
    assert written
    for pair in written:
        assert any(all(map(agrees, pair, score)) for score in scores), pair


@pytest.mark.parametrize("path", sorted((ROOT / "results" / "bench").glob("*.json")), ids=lambda path: path.name)
def test_benchmarks_come_from_a_command(path):
    assert json.loads(path.read_text())["benchmark"] in BENCHMARKS
