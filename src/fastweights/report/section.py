"""One figure or table on the page: what the paper says, our numbers beside its own, and how they were made."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from fastweights.common.formatting import format_number, format_seconds
from fastweights.experiments.engine.experiment import FULL, SCALES, Table, inputs_of
from fastweights.report.chapter import Chapter
from fastweights.report.markup import details, fold, numbers, pills, scrolled, sentence, statements, text, words
from fastweights.report.rows import result_rows

# What a plot of that kind shows, where the numbers of the table are others.
_DRAWN = {
    "scatter": "{loss} evaluation loss",
    "perplexity": "validation during training, in separate segments; the table is scored differently",
    "learning": "validation during training; the table is scored differently",
}
_FORMS = {"surfaces": "Surface plot", "scatter": "Scatter plot", "bars": "Bar chart"}

Seen = dict[str, Chapter]
"""Sentences of notes that the page has said already, with the chapter that said them."""


def section(chapter: Chapter, seen: Seen) -> str:
    """Return the section of a chapter; `seen` is added to."""
    experiment = chapter.experiment
    number = f'<span class="number">{escape(chapter.number)}</span> ' if chapter.number else ""
    where = escape(experiment.where.removeprefix(chapter.number).lstrip(", "))
    parts = [
        f'<section id="{experiment.name}">',
        f"<h2>{number}{escape(experiment.title)}</h2>",
        f'<p class="where">{where}{" · " if where else ""}<a href="#contents">all figures and tables</a></p>',
        f"<blockquote><p>{text(experiment.statement)}</p></blockquote>",
    ]
    if chapter.scale is None:
        parts += [f'<p class="run">Not run yet: <code>fastweights reproduce {experiment.name}</code></p>']
        parts += [statements(chapter.claims)]
    else:
        parts += _results(chapter, chapter.scale, seen)
    for other in chapter.others:
        parts += _other(other, chapter, seen)
    return "\n".join([*filter(None, parts), "</section>\n"])


def _other(chapter: Chapter, shown: Chapter, seen: Seen) -> Iterator[str]:
    """Yield the parts of the same experiment with another training or other data, folded below the first."""
    assert chapter.scale is not None
    heading = chapter.label if chapter.label != shown.label else _difference(chapter, shown)
    yield details(f"Also run: {text(heading)}", "\n".join(_results(chapter, chapter.scale, seen)))


def _results(chapter: Chapter, scale: str, seen: Seen) -> Iterator[str]:
    yield _run_line(chapter)
    yield _table(chapter)
    yield _figure(chapter)
    yield statements(chapter.claims) if chapter.claims else ""
    yield _samples(chapter)
    yield _how(chapter, scale, seen)
    yield _data(chapter)


def _run_line(chapter: Chapter) -> str:
    """Say in a line what the numbers are and what they show."""
    compared = chapter.experiment.table is not None and not chapter.is_full
    about = " The paper's numbers come from its own data and training." if compared else ""
    return f'<p class="run"><strong>{text(sentence(chapter.label))}.</strong>{about} {pills(chapter.claims)}</p>'


def _difference(chapter: Chapter, shown: Chapter) -> str:
    """Name the inputs of these cells that differ from those of the others."""
    given, before = map(_given, (chapter, shown))
    names = [*given, *(name for name in before if name not in given)]
    return ", ".join(f"{n} = {given.get(n, 'the default')}" for n in names if given.get(n) != before.get(n))


def _given(chapter: Chapter) -> dict[str, str]:
    """Return the inputs that all cells of a chapter have, by name."""
    given = inputs_of(chapter.results.records[0].config, chapter.experiment.inputs)
    settings = {name: json.dumps(value) for name, value in given.pop("set", {}).items()}
    corpus = given.pop("corpus", None)
    source = {"text": f"{corpus['name']} ({corpus['fingerprint']})"} if corpus else {}
    return {**source, **{name: str(value) for name, value in given.items()}, **settings}


def _table(chapter: Chapter) -> str:
    """Return the paper's table with our numbers."""
    make = chapter.experiment.table
    if make is None:
        return ""
    table, said = fold(make(chapter.results))
    caption = " ".join(filter(None, (_trained_on(chapter), said)))
    caption = f"<figcaption>{text(caption)}</figcaption>" if caption else ""
    return f"<figure>{scrolled(numbers(table), f'{chapter.name}: numbers')}{caption}</figure>"


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
    said = f"{chapter.experiment.measure} of models trained on {ours}"
    said += f"; {', '.join(scored)}." if scored else ", scored on its validation and test sets."
    return said + (f" The paper's models are trained and scored on {theirs}." if ours != theirs else "")


def _figure(chapter: Chapter) -> str:
    experiment, results, plot, drawing = chapter.experiment, chapter.results, chapter.experiment.plot, chapter.drawing
    if plot is None or drawing is None:
        return ""
    form = plot.kind if isinstance(plot.kind, str) else ""
    models = ", ".join(label for model, label in experiment.models.items() if results.of(model))
    verdicts = "; ".join(f"{claim.text}: {claim.ours}" for claim in chapter.claims)
    axes = f" of {plot.y_label} over {plot.x_label}" if plot.y_label else f" of {plot.x_label}"
    axes = "" if form == "surfaces" else axes
    alt = f"{_FORMS.get(form, 'Line plot')}{axes} for {models}." + (f" {verdicts}." if verdicts else "")
    kind = _DRAWN.get(form, "").format(loss=results.loss.split("_")[0])
    marked = form == "scatter" and not plot.log_y
    limits = "dotted lines mark d_dot, the largest number of keys that a memory can keep apart" if marked else ""
    seeds = len({record.config["seed"] for record in results.records})
    spread = f"mean and range over {seeds} seeds" if seeds > 1 else ""
    caption = text(sentence("; ".join(filter(None, (kind, spread, limits)))))
    caption = f"<figcaption>{caption}.</figcaption>" if caption else ""
    legend = "".join(f"<li>{swatch}<span>{text(label)}</span></li>" for swatch, label in drawing.legend)
    legend = f'<ul class="legend">{legend}</ul>' if legend else ""
    image = f'<div class="plot" role="img" aria-label="{escape(alt)}">{drawing.wide}{drawing.narrow}</div>'
    return f"<figure>{image}{legend}{caption}</figure>"


def _how(chapter: Chapter, scale: str, seen: Seen) -> str:
    """Say with which command and for how long the cells were run, and in what they depart from the paper."""
    experiment, records = chapter.experiment, chapter.results.records
    seeds = sorted({record.config["seed"] for record in records})
    planned = len(experiment.grid(scale))
    corpora = {r.config["corpus"]["name"]: r.config["corpus"] for r in records if "corpus" in r.config}
    differences = _departures(chapter, scale)
    protocol = SCALES.get(scale, SCALES["paper"]) + (", except for what is listed below" if differences else "")
    entries = {
        "command": f"<code>{escape(_command(chapter, scale))}</code>",
        "protocol": escape(protocol),
        "models": f"{len(records)} ({planned} planned at this scale)",
        "seeds": ", ".join(map(str, seeds)),
        "text": "<br>".join(escape(f"{name} ({_words(c)}, {c['fingerprint']})") for name, c in corpora.items()),
        "time": f"{format_seconds(sum(record.wall_s for record in records))}, summed over models",
        "machine": '<a href="#machines">machines and versions</a>',
    }
    items = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in entries.items() if value)
    return details("How it was run", f"{_note(chapter, scale, seen)}<dl>{items}</dl>{differences}")


def _command(chapter: Chapter, scale: str) -> str:
    experiment, records = chapter.experiment, chapter.results.records
    seeds = sorted({record.config["seed"] for record in records})
    command = f"fastweights reproduce {experiment.name} --scale {scale}"
    if tuple(seeds) != experiment.scales[scale].seeds:
        command += f" --seeds {','.join(map(str, seeds))}"
    if experiment.selectable:
        models = [model for model in experiment.models if chapter.results.of(model)]
        command += f" --models {','.join(models)}" if len(models) < len(experiment.models) else ""
        sizes = chapter.results.sizes()
        command += f" --sizes {','.join(map(str, sizes))}" if sizes != sorted(experiment.scales[scale].sizes) else ""
    if scale not in ("smoke", "small") and any("corpus" in record.config for record in records):
        command += " --data DIR"
    settings = records[0].config.get("set", {})
    return command + "".join(f" --set {name}={json.dumps(value)}" for name, value in settings.items())


def _note(chapter: Chapter, scale: str, seen: Seen) -> str:
    """Return what the scale says of itself, without what another chapter has said already."""
    sentences = list(filter(None, re.split(r"(?<=[.!?]) (?=[^a-z])", chapter.experiment.scales[scale].note)))
    new = [said for said in sentences if said not in seen]
    before = {seen[said].name: seen[said] for said in sentences if said in seen}
    seen.update(dict.fromkeys(new, chapter))
    links = ", ".join(f'<a href="#{c.experiment.name}">{escape(name)}</a>' for name, c in before.items())
    more = f" {'Otherwise as' if new else 'As'} in {links}." if before else ""
    return f"<p>{text(' '.join(new))}{more}</p>" if sentences else ""


def _departures(chapter: Chapter, scale: str) -> str:
    """Return a table of what differs from the paper's protocol, for scales that are meant to follow it."""
    if scale in SCALES and scale not in FULL:
        return ""
    try:
        found = chapter.experiment.departures(chapter.results.records)
    except (ValueError, KeyError):
        return "<p>These results come from an older configuration, which cannot be compared with the paper's.</p>"
    if not found:
        return ""
    rows = ((name, _values(ours), _values(theirs)) for name, (ours, theirs) in found.items())
    return words(("what differs from the paper", "here", "paper"), rows)


def _values(values: Sequence[Any]) -> str:
    return " or ".join("none" if value is None else _value(value) for value in values)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_number(value) if isinstance(value, int | str) else json.dumps(value)


def _words(corpus: Mapping[str, Any]) -> str:
    """Return the size of a corpus' vocabulary."""
    return f"{corpus['words']:,} words" if "words" in corpus else f"{corpus['pieces']:,} pieces"


def _samples(chapter: Chapter) -> str:
    """Show translations of the same sentences by every model that was run."""
    found = {r.config["model"]: r.metrics["samples"] for r in chapter.results.records if r.metrics.get("samples")}
    if not found:
        return ""
    rows: list[tuple[str, str]] = []
    for number, (source, reference, _) in enumerate(next(iter(found.values()))):
        rows += [("source", source), ("reference", reference)]
        rows += [(chapter.experiment.models[model], samples[number][2]) for model, samples in found.items()]
    return details("Translations", words(("", "the first sentences that were scored"), rows))


def _data(chapter: Chapter) -> str:
    header, *rows = result_rows(chapter.experiment, chapter.results)
    table, said = fold(Table(tuple(header), tuple(map(tuple, rows))))
    source = f"Rounded. <code>{chapter.experiment.name}/results.json</code> and the files beside it have every digit."
    label = f"{chapter.name}: every result"
    return details("All results", f'{scrolled(numbers(table), label)}<p class="small">{text(said)} {source}</p>')
