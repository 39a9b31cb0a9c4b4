"""One page with every figure, what it shows and how it was made; a single file that needs no network."""

from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from fastweights.report.chapter import Chapter
from fastweights.report.markup import details, document, pills, sentence, text, words
from fastweights.report.rows import tally
from fastweights.report.section import Seen, section
from fastweights.report.style import stylesheet

# A table without numbers, for what has no plot.
_TABLE = """<svg class="thumb" viewBox="0 0 60 40" aria-hidden="true">
<path d="M6 8H54M6 16H54M6 24H54M6 32H54M22 8V32"/></svg>"""


def page(chapters: Sequence[Chapter]) -> str:
    """Return the page."""
    seen: Seen = {}
    claims = [claim for chapter in chapters for claim in chapter.claims]
    sections = "".join(section(chapter, seen) for chapter in chapters)
    style = stylesheet(Path(__file__).parent / "page.css")
    body = f"""<header>
<p class="kicker">fastweights results</p>
<h1>Linear Transformers Are Secretly Fast Weight Programmers, reproduced</h1>
<p>Every figure and table of the paper by Schlag, Irie and Schmidhuber (ICML 2021), trained again with this library and
compared with what the paper says. Of {len(claims)} statements, {escape(tally(claims))}.</p>
{_headline(chapters)}
</header>
<main>
<h2 id="contents">Figures and tables</h2>
<ol class="index">
{"".join(_entry(chapter) for chapter in chapters)}</ol>
{sections}</main>
{_machines(chapters)}
"""
    return document("fastweights results", style, body)


def _headline(chapters: Sequence[Chapter]) -> str:
    """Say what was reproduced at full scale, what on other data or with less training, and what was not."""
    full = [chapter for chapter in chapters if chapter.is_full]
    part = [chapter for chapter in chapters if chapter.scale is not None and not chapter.is_full]
    rest = [chapter for chapter in chapters if chapter.scale is None]
    cards = (
        ("full", "At full scale", "the paper's data and training", full),
        ("part", "On other data or with less training", "not comparable with the paper's numbers", part),
        ("rest", "Not run", "", rest),
    )
    shown = "".join(_card(*card) for card in cards if card[-1] or card[0] == "full")
    return f'<div class="cards">{shown}</div>'


def _card(style: str, title: str, about: str, chapters: Sequence[Chapter]) -> str:
    claims = [claim for chapter in chapters for claim in chapter.claims]
    groups: dict[str, list[Chapter]] = {}
    for chapter in chapters:
        groups.setdefault(chapter.label, []).append(chapter)
    lines = [
        escape(names(group)) + (f": {text(label)}" if style == "part" else "") for label, group in groups.items()
    ] or ["nothing yet"]
    fails = [chapter for chapter in chapters if any(claim.holds is False for claim in chapter.claims)]
    links = ", ".join(f'<a href="#{chapter.experiment.name}">{escape(chapter.name)}</a>' for chapter in fails)
    return (
        f'<div class="card {style}"><h2>{title}</h2>'
        + (f'<p class="small">{about}</p>' if about else "")
        + "".join(f"<p>{line}</p>" for line in lines)
        + f"<p>{pills(claims)}{f' <small>(in {links})</small>' if links else ''}</p></div>"
    )


def names(chapters: Sequence[Chapter]) -> str:
    """Return the names of chapters in words, as in "Figures 1 to 5 and Table 6"."""
    words: list[str] = []
    for kind, group in groupby(chapters, lambda chapter: chapter.number.partition(" ")[0]):
        found = list(group)
        if kind not in ("Figure", "Table"):
            words += [_within(chapter.experiment.title) if words else chapter.experiment.title for chapter in found]
            continue
        numbers = [int(chapter.number.split()[1]) for chapter in found]
        # Numbers that follow each other have the same distance to their place in the list.
        runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
        spans = [f"{run[0]} to {run[-1]}" if len(run) > 2 else " and ".join(map(str, run)) for run in runs]
        words.append(f"{kind}{'s' if len(numbers) > 1 else ''} {', '.join(spans)}")
    return " and ".join(", ".join(words).rsplit(", ", 1)) if len(words) > 1 else "".join(words)


def _within(title: str) -> str:
    """Return a title as it stands inside a sentence, with a small first letter unless it begins with an acronym."""
    return title if title[1:2].isupper() else title[:1].lower() + title[1:]


def _entry(chapter: Chapter) -> str:
    experiment, drawing = chapter.experiment, chapter.drawing
    thumbnail = _TABLE
    if drawing is not None:
        thumbnail = (
            f'<svg class="thumb" viewBox="{drawing.view}" preserveAspectRatio="none" aria-hidden="true">'
            f'<use href="#{drawing.key}-narrow-figure_1"/></svg>'
        )
    number = f'<span class="number">{escape(chapter.number)}</span> ' if chapter.number else ""
    label = f'<span class="label">{text(sentence(chapter.label))}</span>' if chapter.scale else ""
    return (
        f'<li><a href="#{experiment.name}">{thumbnail}<span class="line"><strong>{number}{escape(experiment.title)}'
        f"</strong>{label}<span>{pills(chapter.claims)}</span></span></a></li>\n"
    )


def _machines(chapters: Sequence[Chapter]) -> str:
    """List the machines, versions and commits of all results, once for the whole page."""
    used: dict[tuple[str, str], tuple[dict[str, None], dict[str, Chapter]]] = {}
    for chapter in chapters:
        for shown in (chapter, *chapter.others):
            for record in shown.results.records:
                versions = ", ".join(f"{name} {number}" for name, number in record.versions.items())
                commits, users = used.setdefault((record.hardware, versions), ({}, {}))
                commits[record.commit] = None
                users[chapter.experiment.name] = chapter
    if not used:
        return ""
    rows = (
        (hardware, versions, ", ".join(commit[:10] for commit in commits), names(list(users.values())))
        for (hardware, versions), (commits, users) in used.items()
    )
    table = words(("machine", "versions", "commits", "results"), rows)
    return f'<footer id="machines">{details("Machines and versions", table)}</footer>'
