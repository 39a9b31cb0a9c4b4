"""Numbers that were measured: kernels, streams, training and translation."""

import json
from itertools import chain

import torch

from fastweights.benchmarks import lm, lm_agreement
from fastweights.conformance.oracle import SAFETY
from fastweights.data.registry import CORPORA
from fastweights.experiments.paper import speed
from fastweights.inference.translate import AT_ONCE
from fastweights.models import presets, translation_presets
from tests.numbers.declared import ROOT, parameters, row, rows, source

BANDWIDTH, OPERATIONS = 4.8e12, 989e12  # of an H200 in its data sheet: bytes and bfloat16 operations a second


# README and kernels: the delta rule beside its rivals.

SHAPES = {"small": (96, 256, 8, 16), "medium": (56, 384, 8, 32), "2k": (8, 2048, 16, 64), "32k": (1, 32768, 16, 64)}
WIDE = {"2k, wide": (8, 2048, 16, 128), "32k, wide": (1, 32768, 16, 128)}


def shape(batch, length, heads, size):
    """Return the numbers by which tables name a shape; those below 10 are not among the numbers of a text."""
    return [number for number in (batch, length, heads, size) if number > 9]


def milliseconds(where, dtype, way, key):
    found = row("kernels-h200", part="shape", shape=[*where, where[-1]], dtype=dtype)
    return found["measured"][way][key]


def of_family(name, dtype="bfloat16"):
    """Return what was measured of a row of today's rules, by the way it was computed."""
    return row("kernels-family-h200", part="shape", name=name, dtype=dtype)["measured"]


def first_calls(kind):
    return {
        row("kernels-h200", part="first call", name=f"paper {size}")[kind]["first_s"] for size in ("small", "medium")
    }


@source("README.md", "| | fastweights |")
def _():
    (ours,) = {round(seconds, 1) for seconds in first_calls("checked")}
    assert rows("kernels-h200")[0]["fla-core"] == "0.6.0"
    return [ours, milliseconds(SHAPES["small"], "bfloat16", "fla chunk", "first_call_s")]


@source("README.md", "| batch x length, heads |")
def _():
    for where in (SHAPES["small"], SHAPES["2k"], SHAPES["32k"]):
        yield from shape(*where)
        for way in ("fastweights", "fla chunk", "sdpa"):
            yield milliseconds(where, "bfloat16", way, "both_graph_ms")
    versions = rows("kernels-family-h200")[0]
    assert (versions["fla-core"], versions["flash-qla"]) == ("0.6.0", "0.1.3")
    gated, per_key = of_family("gated delta, 2k, heads of 128"), of_family("gated delta per key, 4k, 32 heads of 128")
    yield from shape(8, 2048, 16, 128)
    yield from (gated[way]["both_graph_ms"] for way in ("fastweights", "fla chunk", "flashqla", "sdpa"))
    yield from shape(2, 4096, 32, 128)
    yield from (per_key[way]["both_graph_ms"] for way in ("fastweights", "fla chunk", "sdpa"))


source("README.md", "Rows that name no rule")(lambda: [row("lm-stock-h200", model="delta")["fast"]["words_per_s"]])


@source("docs/speed.md", "| batch x length, heads |")
def _():
    small, medium = SHAPES["small"], SHAPES["medium"]
    long = [SHAPES["2k"], WIDE["2k, wide"], SHAPES["32k"], WIDE["32k, wide"]]
    table = [(where, "bfloat16", "graph", "fla chunk") for where in (small, medium, *long)]
    table += [(where, "bfloat16", "eager", "fla recurrent") for where in (small, medium)]
    table += [(where, "float32", "graph", "fla recurrent") for where in (small, medium)]
    for where, dtype, how, rival in table:
        times = [milliseconds(where, dtype, way, f"both_{how}_ms") for way in ("fastweights", rival)]
        # Of flash-linear-attention's two kernels the faster is shown.
        other = {"fla chunk": "fla recurrent", "fla recurrent": "fla chunk"}[rival]
        measured = row("kernels-h200", part="shape", shape=[*where, where[-1]], dtype=dtype)["measured"]
        assert other not in measured or measured[other][f"both_{how}_ms"] > times[1]
        yield from times
        if dtype == "bfloat16":
            yield milliseconds(where, dtype, "sdpa", f"both_{how}_ms")


@source("docs/speed.md", "In float32 the error is below")
def _():
    checks = [r for r in rows("kernels-h200") if r["part"] == "check" and r["name"].startswith("float32")]
    assert max(error for check in checks for error in check["errors"].values()) < 2e-6
    (checked,), (stored,) = ({round(s, 1) for s in first_calls(kind)} for kind in ("checked", "from disk"))
    return [2e-6, checked, stored]


# Kernels: the rules of today's models.

RULES = {
    ("gated_delta", False): "gated delta (Gated DeltaNet)",
    ("gated_delta", True): "gated delta per key (KDA)",
    ("decay", True): "decay per key (GLA)",
    ("decay", False): "decay",
    ("delta", False): "delta",
}


def family():
    """Yield each row, our numbers, those of others with the same rule by name, and those of softmax attention."""
    for entry in (entry for entry in rows("kernels-family-h200") if entry["part"] == "shape"):
        others = dict(entry["measured"])
        yield entry, others.pop("fastweights"), others, others.pop("sdpa", None)


def both_ms(found):
    """Return the time with gradients; without limit where they cannot be had."""
    return found.get("both_graph_ms", float("inf"))


def times(found):
    return f"{found['forward_graph_ms']:.3f} / {found['both_graph_ms']:.3f}"


def size_and_error(found):
    return [f"{found['peak_bytes'] / 2**20:,.0f}", f"{max(found['errors'].values()):.1e}".replace("e-0", "e-")]


@source("docs/speed.md", "| rule | batch x length, heads |")
def _():
    lines = [["rule", "batch x length, heads", "fastweights", "MiB", "error"]]
    lines[0] += ["fastest other kernel of the rule", "MiB", "error", "softmax attention (PyTorch)"]
    for entry, ours, others, softmax in family():
        B, T, H, D, M = entry["shape"]
        rule = RULES[entry["rule"], entry["per_key"]] + ("" if entry["dtype"] == "bfloat16" else ", float32")
        where = f"{B} x {T}, {H} of {D}" + ("" if M == D else f" and {M}")
        name = min(others, key=lambda name: both_ms(others[name]))
        shown = {"flashqla": "FlashQLA"}.get(name, name)
        lines.append([rule, where, times(ours), *size_and_error(ours)])
        lines[-1] += [f"{shown}: {times(others[name])}", *size_and_error(others[name])]
        lines[-1].append(times(softmax) if softmax else "-")
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    return "\n".join([head, "|---" * len(lines[0]) + "|", *body])


@source("docs/speed.md", "- FlashQLA computes")
def _():
    pairs = {entry["name"]: (others["flashqla"], ours) for entry, ours, others, _ in family() if "flashqla" in others}
    for theirs, ours in pairs.values():
        assert theirs["forward_graph_ms"] < ours["forward_graph_ms"]
        assert round(theirs["peak_bytes"] / ours["peak_bytes"], 1) == 0.7
    ahead = [name for name, (theirs, ours) in pairs.items() if both_ms(ours) < both_ms(theirs)]
    assert ahead == ["gated delta, 4k, 32 heads of 128"]
    yield from (both_ms(found) for name, pair in pairs.items() if name not in ahead for found in pair)


@source("docs/speed.md", "In all other rows our")
def _():
    ratios, ahead = [], {"fla, forward": [], "fla, error": [], "fla, memory": [], "softmax": []}
    for entry, ours, others, softmax in family():
        fla = min((others[name] for name in others if name.startswith("fla ")), key=both_ms)
        ratios.append(both_ms(fla) / both_ms(ours))
        found = {
            "fla, forward": fla["forward_graph_ms"] < ours["forward_graph_ms"],
            "fla, error": max(fla["errors"].values()) < max(ours["errors"].values()),
            "fla, memory": fla["peak_bytes"] < ours["peak_bytes"],
            "softmax": softmax and both_ms(softmax) < both_ms(ours),
        }
        for what in (what for what in found if found[what]):
            ahead[what].append((entry["name"], entry["dtype"]))
        assert not softmax or softmax["peak_bytes"] < ours["peak_bytes"]
    assert ahead["fla, forward"] == [("delta, 2k, heads of 256", "bfloat16")]
    assert all("per key" in name for name, _ in ahead["fla, error"]) and len(ahead["fla, error"]) == 3
    assert ahead["fla, memory"] == [("gated delta, 1k, heads of 64", "float32")]
    assert [name for name, _ in ahead["softmax"]] == [
        "gated delta per key, 2k, heads of 64",
        "decay, 2k, heads of 128 and 256",
        "delta, 2k, heads of 256",
        "delta, images, heads of 64",
    ]
    yield from (min(ratios), max(ratios))
    refused = of_family("decay, 2k, heads of 128 and 256")["fla chunk"]
    assert "Hopper" in refused["both_failure"]
    yield refused["forward_graph_ms"]


source("docs/maths.md", "Where the divisor is below")(lambda: [float(f"{torch.finfo(torch.float32).tiny ** 0.5:.0e}")])


@source("docs/streams.md", "| | after 256 tokens | after 4,096")
def _():
    pasts = (256, 4096, 65536)
    yield from pasts
    for kind in ({"model": "delta", "graph": True}, {"model": "delta", "graph": False}, {"model": "transformer"}):
        measured = [row("stream-h200", past=past, **{"graph": False, **kind}) for past in pasts]
        yield from (entry["ms"] for entry in measured)
        yield measured[-1]["state_bytes"]


@source("docs/streams.md", "| | after 256 tokens | after 1,024")
def _():
    pasts = (256, 1024, 4096, 16384, 65536)
    yield from pasts
    for model in ("delta", "transformer"):
        measured = [row("stream-cpu", past=past, model=model) for past in pasts]
        yield from (found["tokens_per_s"] for found in measured)
        yield measured[-1]["state_bytes"]


@source("docs/training-speed.md", "| | allowed |")
def _():
    measured = [rows(f"lm-agreement-{model}-h200")[0] for model in ("delta", "linear")]
    losses = [entry["losses"]["losses"] for entry in measured]
    (count,) = {len(entry["fast"]) for entry in losses}
    yield from (count, 100 * lm.AGREEMENT)
    for entry in losses:
        yield 100 * max(abs(a / b - 1) for a, b in zip(entry["fast"], entry["plain"], strict=True))
    (steps,) = {entry["perplexity"]["steps"] for entry in measured}
    yield from (steps, 100 * lm_agreement.ENDING)
    for entry in measured:
        ways = entry["perplexity"]["ways"]
        yield 100 * abs(ways["fast"]["valid"]["ppl"] / ways["plain"]["valid"]["ppl"] - 1)


@source("docs/training-speed.md", "| model | words/s |")
def _():
    stock = {name: row("lm-stock-h200", model=name) for name in ("delta", "transformer")}
    ways = [stock["delta"]["fast"], stock["transformer"]["fast"], stock["transformer"]["stock"]]
    ways += [row("lm-medium-h200", model="delta", size="medium")["fast"]]
    yield from (way["words_per_s"] for way in ways)
    yield from (1e3 * speed.PAPER[model][0] for model in ("delta", "transformer"))


@source("docs/training-speed.md", "| | ms, segments of 64 |")
def _():
    yield from (64, 256)
    for model in ("delta", "transformer"):
        for segment in (64, 256):
            found = row("lm-cpu", model=model, segment=segment)["default"]
            yield from (found["step_ms"], found["words_per_s"])


def small_step():
    """Return the small model, its words in one update, and the bytes of one wide layer of a block."""
    recipe, model = presets.RECIPES["small"], presets.PRESETS["small"]()
    words = recipe["segment"] * recipe["batch_size"]
    return model, words, words * model.d_ff * 2


@source("docs/training-speed.md", "| what | where | why |")
def _():
    model, words, wide = small_step()
    kernels = row("lm-stock-h200", model="delta")["fast"]["kernels"]
    calls, head = sum(kernel["calls"] for kernel in kernels), model.cutoffs[0] + len(model.cutoffs)
    yield from (model.n_layers, round(calls, -2), 1e3 * sum(kernel["ms"] for kernel in kernels) / calls)
    yield from (
        words,
        head,
        words * head * 4,
        wide,
        1e6 * wide / row("kernels-h200", part="machine")["bandwidth_bytes_per_s"],
    )


@source("docs/training-speed.md", "How fast could")
def _():
    model, words, _ = small_step()
    return [words, model.n_layers, model.d_model, model.d_ff, BANDWIDTH, OPERATIONS]


@source("docs/training-speed.md", "| part | work | least time |")
def _():
    model, words, wide = small_step()
    passes, logits = 7 * wide * model.n_layers, 639e6
    stream, memory, adam, products = 7e9, 1.1e9, 1.7e9, 4 * 2 * logits * model.d_model
    floors = [1e3 * work / BANDWIDTH for work in (passes, stream, memory, adam)]
    floors.insert(3, 1e3 * products / OPERATIONS)
    work = [[words, model.d_ff, passes], [stream], [memory], [logits, products], [parameters("small"), adam]]
    yield from chain.from_iterable([*entry, floor] for entry, floor in zip(work, floors, strict=True))
    yield from (sum(floors), 1e3 * words / sum(floors))


@source("docs/translation.md", "**Linear attention was slower")
def _():
    (sentences,) = {entry["sentences"] for entry in rows("mt-h200")}
    return [sentences]


@source("docs/translation.md", "`fastweights bench mt")
def _():
    return [translation_presets.SUBWORDS, CORPORA["numbers"].options["vocabulary_size"]]


@source("docs/translation.md", "| source tokens |")
def _():
    for length in (32, 512, 4096):
        measured = [row("mt-h200", attention=attention, source_length=length) for attention in ("linear", "softmax")]
        yield length
        yield from (entry["step_ms"] for entry in measured)
        yield from (entry["train_tokens_per_s"] / 1e3 for entry in measured)


@source("docs/translation.md", "| what | where | why |")
def _():
    words, tokens = translation_presets.SUBWORDS, 12_000
    yield from (tokens, words, tokens * words * 4, AT_ONCE["cuda"][0])


# Verdicts on kernels.

JUDGED = {
    "cpu": "fastweights-cpu",
    "chunked": "fastweights-chunked",
    "T 5.23.0 chunk": "transformers-chunk",
    "T 5.23.0 recurrent": "transformers-recurrent",
    "T 5.16.0 chunk": "transformers-5.16-chunk",
    "fla chunk": "fla-naive-chunk",
    "fla recurrent": "fla-naive-recurrent",
}


# On an H200, where the case of most elements, which needs the memory for itself, is in a file of its own.
JUDGED_ON_GPU = {
    "ours": ("gated_delta-fastweights-triton", "gated_delta-fastweights-triton-large"),
    "ours, float32": ("gated_delta-fastweights-triton-float32",),
    "ours, KDA": ("kda-fastweights-triton", "kda-fastweights-triton-large"),
    "FlashQLA": ("gated_delta-flash-qla",),
    "T chunk": ("gated_delta-transformers-chunk-gpu",),
    "fla": ("gated_delta-fla-chunk", "gated_delta-fla-chunk-large"),
    "fla, KDA": ("kda-fla-chunk",),
}


def judged(name):
    """Return the verdicts of `results/verify/NAME.json` as the tables of docs/verify.md write them."""
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


def verdict_table(first, columns):
    """Return a table of cases, from the verdicts by the head of their column; what was not run is empty."""
    cases = dict.fromkeys(case for cells in columns.values() for case in cells)
    lines = [[case, *(cells.get(case, "") for cells in columns.values())] for case in cases]
    head, *body = (f"| {' | '.join(line)} |".replace("|  |", "| |") for line in [[first, *columns], *lines])
    return "\n".join([head, "|---" * (len(columns) + 1) + "|", *body]).replace("|  |", "| |")


@source("docs/verify.md", "| case |")
def _():
    for name in ("gated_delta-fastweights-reference", "kda-fastweights-cpu"):
        assert not any("*" in cell or cell in ("-", "error") for cell in judged(name).values())
    return verdict_table("case", {head: judged(f"gated_delta-{name}") for head, name in JUDGED.items()})


@source("docs/verify.md", "| case on a GPU |")
def _():
    columns = {
        head: {case: cell for name in names for case, cell in judged(name).items()}
        for head, names in JUDGED_ON_GPU.items()
    }
    return verdict_table("case on a GPU", columns)


source("docs/verify.md", "An error is the largest distance")(lambda: [SAFETY])


# Models of transformers.


@source("docs/transformers.md", "| model | what | plain transformers |")
def _():
    for entry in rows("transformers-cpu"):
        yield from (entry[key] for key in ("fallback_ms", "fastweights_ms", "speedup", "most"))


@source("docs/transformers.md", "| on an H200 | what |")
def _():
    for entry in (*rows("transformers-h200"), *rows("transformers-fla-h200")):
        yield from (entry[key] for key in ("fallback_ms", "fastweights_ms", "speedup", "most"))


@source("docs/transformers.md", "Two cores of an AMD EPYC")
def _():
    entry = row("transformers-cpu", model="qwen3.5-1024", what="prefill")
    return [entry["length"], int(entry["model"].rpartition("-")[2])]


# States of streams in fewer bits.

STATE_FORMATS = [
    ("float32", False),
    ("bf16", False),
    *((name, kept) for name in ("int8", "fp8") for kept in (True, False)),
]


@source("docs/states.md", "| rule | state | bytes |")
def _():
    yield from (words for words in (256, 4_096, 16_384, 65_536))
    for rule in ("sum", "delta", "gated_delta"):
        for name, kept in STATE_FORMATS:
            fields = {"format": name, "error_feedback": kept}
            yield row(f"states-{rule}", words=256, **fields)["state_bytes"]
            yield row("states-time", rule=rule, words=256, **fields)["ms"]
            for words in (256, 4_096, 16_384, 65_536):
                yield row(f"states-{rule}", words=words, **fields)["perplexity"]


@source("docs/states.md", "Three small models")
def _():
    (step,) = {found["step"] for rule in ("sum", "delta", "gated_delta") for found in rows(f"states-{rule}")}
    return [step, presets.PRESETS["quick"]().vocab_size]
