"""One page with every figure, what it shows and how it was made; a single file that needs no network."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fastweights.experiments.engine.experiment import BEYOND_SCALE, SCALES, Claim, Table, inputs_of
from fastweights.report.chapter import Chapter
from fastweights.report.rows import format_seconds, losses, tally

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --line: #d9dee4; --paper: #ffffff; --card: #f6f8fa;
  --good: #116329; --good-bg: #dafbe1; --bad: #a40e26; --bad-bg: #ffebe9; --open: #57606a; --open-bg: #eaeef2;
  --link: #0757ae; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9aa5b1; --line: #30363d; --paper: #0f1317; --card: #171c22;
    --good: #7ee2a0; --good-bg: #12321d; --bad: #ffa198; --bad-bg: #3d1418; --open: #9aa5b1; --open-bg: #262c34;
    --link: #79b8ff; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 54rem; padding: 2rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.35rem; line-height: 1.3; margin: 0 0 .15rem; }
h3 { font-size: 1.1rem; line-height: 1.3; margin: 2rem 0 .15rem; }
a { color: var(--link); }
p { margin: .6rem 0; max-width: 44rem; }
sub { font-size: .75em; line-height: 0; }
code { font: .9em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
section { margin-top: 2.5rem; padding-top: 2rem; border-top: 1px solid var(--line); }
.where { color: var(--soft); margin: 0 0 .75rem; }
blockquote { margin: 1rem 0; padding: .1rem 0 .1rem 1rem; border-left: 3px solid var(--line); color: var(--soft); }
figure { margin: 1.25rem 0; }
figure img { display: block; width: 100%; height: auto; background: #ffffff; border: 1px solid var(--line);
  border-radius: 8px; padding: .5rem; }
figcaption { color: var(--soft); font-size: .9rem; margin-top: .4rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; vertical-align: top; padding: .45rem .75rem .45rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--soft); }
.numbers th, .numbers td { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.numbers th { white-space: normal; vertical-align: bottom; }
.numbers th:first-child, .numbers td:first-child { text-align: left; }
.verdict { display: inline-block; padding: .05rem .55rem; border-radius: 1rem; font-weight: 600; font-size: .85rem;
  white-space: nowrap; }
.holds { color: var(--good); background: var(--good-bg); }
.fails { color: var(--bad); background: var(--bad-bg); }
.open { color: var(--open); background: var(--open-bg); }
details { margin: .9rem 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .55rem .9rem; }
summary { cursor: pointer; font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.2rem; margin: .8rem 0 .3rem;
  font-size: .92rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
.note { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .55rem .9rem; }
@media (max-width: 40rem) {
  body { padding: 1.25rem .9rem 3rem; }
  figure img { padding: .2rem; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .5rem; }
  .claims thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  .claims tr { display: block; padding: .7rem 0; border-bottom: 1px solid var(--line); }
  .claims td { display: block; border: 0; padding: .1rem 0; }
  .claims td:first-child { font-weight: 600; }
  .claims td[data-label]::before { content: attr(data-label) ": "; color: var(--soft); }
}
"""


# What a plot of that kind shows, where the numbers of the table are others.
_DRAWN = {
    "scatter": "{loss} evaluation loss",
    "perplexity": "validations during training, segment by segment, not as the table is scored",
    "learning": "validations during training, not as the table is scored",
}


def page(chapters: Sequence[Chapter]) -> str:
    claims = [claim for chapter in chapters for claim in chapter.claims]
    contents = "".join(_contents_row(chapter) for chapter in chapters)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>fastweights results</title>
<link rel="icon" href="data:,">
<style>{_STYLE}</style>
</head>
<body>
<header>
<h1>fastweights results</h1>
<p>The figures and tables of <cite>Linear Transformers Are Secretly Fast Weight Programmers</cite> (Schlag, Irie and
Schmidhuber, ICML 2021), trained again, and what the paper says of each, judged by these results: of {len(claims)}
statements, {escape(tally(claims))}.</p>
<div class="scroll"><table>
<thead><tr><th scope="col">what</th><th scope="col">data and training</th><th scope="col">statements</th></tr></thead>
<tbody>{contents}</tbody>
</table></div>
</header>
<main>
{"".join(_chapter(chapter) for chapter in chapters)}
</main>
</body>
</html>
"""


def _text(text: str) -> str:
    return escape(text).replace("d_dot", "d<sub>dot</sub>").replace("d_key", "d<sub>key</sub>")


def _contents_row(chapter: Chapter) -> str:
    name, title = chapter.experiment.name, escape(chapter.experiment.title)
    label, verdicts = escape(chapter.label), escape(tally(chapter.claims))
    return f'<tr><td><a href="#{name}">{title}</a></td><td>{label}</td><td>{verdicts}</td></tr>\n'


def _chapter(chapter: Chapter) -> str:
    experiment = chapter.experiment
    parts = [
        f'<section id="{experiment.name}">',
        f"<h2>{escape(experiment.title)}</h2>",
        f'<p class="where">{escape(experiment.where)} · <code>{experiment.name}</code></p>',
        f"<blockquote><p>{_text(experiment.statement)}</p></blockquote>",
    ]
    if chapter.scale is None:
        parts.append(f'<p class="note">Not run yet: <code>fastweights reproduce {experiment.name}</code></p>')
    else:
        parts += [_note(chapter, chapter.scale), _table(chapter), _figure(chapter)]
    parts.append(_claims(chapter.claims))
    if chapter.scale is not None:
        parts += [_samples(chapter), _how(chapter, chapter.scale), _data(chapter)]
        parts += [_other(other, chapter, other.scale) for other in chapter.others if other.scale]
    return "\n".join([*parts, "</section>\n"])


def _other(chapter: Chapter, shown: Chapter, scale: str) -> str:
    """Show the same experiment with another training or other data, below those that are shown in full."""
    heading = chapter.label if chapter.label != shown.label else _difference(chapter, shown)
    parts = [f"<h3>Also run: {escape(heading)}</h3>", _table(chapter), _figure(chapter)]
    parts += [_claims(chapter.claims)] if chapter.claims else []
    return "\n".join([*parts, _samples(chapter), _how(chapter, scale), _data(chapter)])


def _difference(chapter: Chapter, shown: Chapter) -> str:
    """Name the inputs of these cells that differ from those of the others."""
    given, before = map(_given, (chapter, shown))
    names = [*given, *(name for name in before if name not in given)]
    return ", ".join(f"{n} = {given.get(n, 'as usual')}" for n in names if given.get(n) != before.get(n))


def _given(chapter: Chapter) -> dict[str, str]:
    """Return the inputs that all cells of a chapter have, by name."""
    given = inputs_of(chapter.results.records[0].config, chapter.experiment.inputs)
    settings = {name: json.dumps(value) for name, value in given.pop("set", {}).items()}
    corpus = given.pop("corpus", None)
    text = {"text": f"{corpus['name']} ({corpus['fingerprint']})"} if corpus else {}
    return {**text, **{name: str(value) for name, value in given.items()}, **settings}


def _note(chapter: Chapter, scale: str) -> str:
    note = chapter.experiment.scales[scale].note
    settings = chapter.results.records[0].config.get("set", {})
    if settings:
        changed = ", ".join(f"{name} = {json.dumps(value)}" for name, value in settings.items())
        note = f"{note} Changed in every cell: {changed}.".strip()
    name = f"Scale {chapter.label}" if chapter.label in SCALES else chapter.label[0].upper() + chapter.label[1:]
    return f'<p class="note"><strong>{escape(name)}.</strong> {_text(note)}</p>' if note else ""


def _table(chapter: Chapter) -> str:
    """Show the paper's table with our numbers."""
    make = chapter.experiment.table
    if make is None:
        return ""
    caption = _trained_on(chapter)
    caption = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure><div class="scroll">{_numbers(make(chapter.results))}</div>{caption}</figure>'


def _trained_on(chapter: Chapter) -> str:
    """Say which text the numbers are of; the paper's are never compared with ours without it."""
    records, theirs = chapter.results.records, chapter.experiment.paper_corpus
    corpora = [record.config["corpus"]["name"] for record in records if "corpus" in record.config]
    if not corpora:
        return ""
    ours = ", ".join(dict.fromkeys(corpora))
    # A training that diverged was not scored.
    sets: Mapping[str, str] = next((record.metrics["sets"] for record in records if record.metrics.get("sets")), {})
    names = {"valid": "validation set", "test": "test set"}
    scored = [f"{what} {sets[split]}" for split, what in names.items() if split in sets]
    text = f"{chapter.experiment.measure} of models trained on {ours}"
    text += f"; {', '.join(scored)}." if scored else ", scored on the validation and test set it was prepared with."
    return text + (f" The paper's are trained and scored on {theirs}." if ours != theirs else "")


def _numbers(table: Table) -> str:
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in table.header)
    body = "".join("<tr>" + "".join(f"<td>{_text(entry)}</td>" for entry in row) + "</tr>\n" for row in table.rows)
    return f'<table class="numbers"><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>'


def _figure(chapter: Chapter) -> str:
    experiment, results, plot = chapter.experiment, chapter.results, chapter.experiment.plot
    if plot is None or chapter.svg is None:
        return ""
    source = base64.b64encode(chapter.svg).decode()
    form = plot.kind if isinstance(plot.kind, str) else ""
    models = ", ".join(label for model, label in experiment.models.items() if results.of(model))
    verdicts = "; ".join(f"{claim.text}: {claim.ours}" for claim in chapter.claims)
    drawn = {"surfaces": "Surface plot", "scatter": "Scatter plot", "bars": "Bar chart"}.get(form, "Line plot")
    axes = f" of {plot.y_label} over {plot.x_label}" if plot.y_label else f" of {plot.x_label}"
    axes = "" if form == "surfaces" else axes
    alt = f"{drawn}{axes} for {models}." + (f" {verdicts}." if verdicts else "")
    kind = _DRAWN.get(form, "").format(loss=results.loss.split("_")[0])
    seeds = len({record.config["seed"] for record in results.records})
    spread = f"mean and range over {seeds} seeds" if seeds > 1 else ""
    caption = "; ".join(
        part
        for part in (
            experiment.title,
            f"scale {chapter.label}" if chapter.label in SCALES else chapter.label,
            kind,
            spread,
        )
        if part
    )
    image = f'<img src="data:image/svg+xml;base64,{source}" width="660" height="450" alt="{escape(alt)}">'
    return f"<figure>{image}<figcaption>{escape(caption)}.</figcaption></figure>"


def _claims(claims: Sequence[Claim]) -> str:
    rows = []
    for claim in claims:
        style, sign = {True: ("holds", "✓"), False: ("fails", "✗"), None: ("open", "–")}[claim.holds]
        verdict = f'<span class="verdict {style}"><span aria-hidden="true">{sign}</span> {claim.verdict}</span>'
        verdict += f"<br><small>needs {_text(claim.needs)}</small>" if claim.verdict == BEYOND_SCALE else ""
        ours, paper = _text(claim.ours), _text(claim.paper)
        rows.append(
            f'<tr><td>{_text(claim.text)}</td><td data-label="ours">{ours}</td>'
            f'<td data-label="paper">{paper}</td><td>{verdict}</td></tr>\n'
        )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("statement", "ours", "paper", "holds?"))
    return f'<table class="claims"><thead><tr>{head}</tr></thead>\n<tbody>{"".join(rows)}</tbody></table>'


def _how(chapter: Chapter, scale: str) -> str:
    """Show command, commit, machine and time of all the runs that the cells come from."""
    experiment, records = chapter.experiment, chapter.results.records
    seeds = sorted({record.config["seed"] for record in records})
    planned = len(experiment.grid(scale))
    command = f"fastweights reproduce {experiment.name} --scale {scale}"
    if tuple(seeds) != experiment.scales[scale].seeds:
        command += f" --seeds {','.join(map(str, seeds))}"
    if experiment.selectable:
        models = [model for model in experiment.models if chapter.results.of(model)]
        command += f" --models {','.join(models)}" if len(models) < len(experiment.models) else ""
        sizes = chapter.results.sizes()
        command += f" --sizes {','.join(map(str, sizes))}" if sizes != sorted(experiment.scales[scale].sizes) else ""
    corpora = {
        record.config["corpus"]["name"]: record.config["corpus"] for record in records if "corpus" in record.config
    }
    if corpora and scale not in ("smoke", "small"):
        command += " --data DIR"
    settings = records[0].config.get("set", {})
    command += "".join(f" --set {name}={json.dumps(value)}" for name, value in settings.items())
    versions = [", ".join(f"{name} {number}" for name, number in record.versions.items()) for record in records]
    entries = {
        "command": f"<code>{escape(command)}</code>",
        "protocol": escape(_protocol(chapter, scale)),
        "cells": f"{len(records)} ({planned} planned at this scale)",
        "seeds": ", ".join(map(str, seeds)),
        "text": _distinct([f"{name} ({_words(c)}, {c['fingerprint']})" for name, c in corpora.items()]),
        "time": f"{format_seconds(sum(record.wall_s for record in records))}, summed over cells",
        "commit": _distinct([record.commit for record in records]),
        "hardware": _distinct([record.hardware for record in records]),
        "versions": _distinct(versions),
    }
    items = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in entries.items() if value)
    return f"<details><summary>How it was run</summary><dl>{items}</dl></details>"


def _protocol(chapter: Chapter, scale: str) -> str:
    """Say what the scale stands for, and beyond scale small how these cells depart from the paper's protocol."""
    if scale in ("smoke", "small"):
        return f"{scale}: {SCALES[scale]}"
    protocol = SCALES["code" if scale == "code" else "paper"]
    try:
        found = chapter.experiment.departures(chapter.results.records)
    except (ValueError, KeyError):
        return f"{protocol}, in an older configuration that cannot be compared with it"
    shown = [f"{name} {_values(ours)} ({_values(theirs)})" for name, (ours, theirs) in found.items()]
    return protocol + (f", except (its own in brackets): {', '.join(shown)}" if shown else "")


def _values(values: Sequence[Any]) -> str:
    return " or ".join(
        value if isinstance(value, str) else "none" if value is None else json.dumps(value) for value in values
    )


def _words(corpus: Mapping[str, Any]) -> str:
    """Return the size of a corpus' vocabulary."""
    return f"{corpus['words']:,} words" if "words" in corpus else f"{corpus['pieces']:,} pieces"


def _samples(chapter: Chapter) -> str:
    """Show translations of the same sentences by every model that was run."""
    found = {r.config["model"]: r.metrics["samples"] for r in chapter.results.records if r.metrics.get("samples")}
    if not found:
        return ""
    rows = []
    for number, (source, reference, _) in enumerate(next(iter(found.values()))):
        rows += [("source", source), ("reference", reference)]
        rows += [(chapter.experiment.models[model], samples[number][2]) for model, samples in found.items()]
    body = "".join(f'<tr><th scope="row">{_text(who)}</th><td>{escape(text)}</td></tr>\n' for who, text in rows)
    return f"<details><summary>Translations</summary><table><tbody>{body}</tbody></table></details>"


def _distinct(values: Sequence[str]) -> str:
    return "<br>".join(escape(value) for value in dict.fromkeys(values))


def _data(chapter: Chapter) -> str:
    header, *rows = losses(chapter.experiment, chapter.results)
    table = _numbers(Table(tuple(header), tuple(map(tuple, rows))))
    return f'<details><summary>Data</summary><div class="scroll">{table}</div></details>'
