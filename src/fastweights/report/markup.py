"""Texts and tables as HTML."""

import re
from collections.abc import Callable, Iterable, Sequence
from html import escape

from fastweights.experiments.engine.experiment import BEYOND_SCALE, Claim, Table
from fastweights.report.rows import tallies

_SIGNS = {True: ("holds", "✓"), False: ("fails", "✗"), None: ("open", "–")}


def text(content: str) -> str:
    """Return a text with what HTML would read as markup escaped, and the subscripts of d_dot and d_key."""
    return escape(content).replace("d_dot", "d<sub>dot</sub>").replace("d_key", "d<sub>key</sub>")


def document(title: str, style: str, body: str) -> str:
    """Return a whole page in one file, with its style sheet."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
{body}</body>
</html>
"""


def _unbroken(content: str) -> str:
    """Return a text of a narrow column, in which "S = 20" and "34.1 / 35.5" stay on one line."""
    return text(re.sub(r" ([=/]) ", "\u00a0\\1\u00a0", content))


def sentence(content: str) -> str:
    return content[:1].upper() + content[1:]


def details(summary: str, content: str) -> str:
    """Return content that is folded away behind a summary; an empty text where there is none."""
    return f"<details><summary>{summary}</summary>{content}</details>" if content else ""


def scrolled(table: str, label: str) -> str:
    """Return a table that scrolls sideways where the page is too narrow for it."""
    return f'<div class="scroll" role="region" aria-label="{escape(label)}" tabindex="0">{table}</div>'


def numbers(table: Table) -> str:
    """Return a table of numbers, the first column of which names the rows."""
    style = "numbers named" if any(len(row[0]) > 12 for row in table.rows) else "numbers"
    return _table(style, table.header, table.rows, _unbroken)


def words(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of words, which breaks them where it has to and never needs more width than there is."""
    return _table("words", header, rows, text)


def _table(style: str, header: Sequence[str], rows: Iterable[Sequence[str]], show: Callable[[str], str]) -> str:
    head = "".join(f'<th scope="col">{show(name)}</th>' for name in header)
    body = "".join("<tr>" + "".join(f"<td>{show(entry)}</td>" for entry in row) + "</tr>\n" for row in rows)
    return f'<table class="{style}"><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>'


def fold(table: Table) -> tuple[Table, str]:
    """Return a table without what repeats in every row, and a sentence that says it once.

    A column with one value in all rows leaves the table; an addition in brackets that all values of a column share,
    as in "27.7 (D = 1024)", moves to its header.
    """
    if len(table.rows) < 2:
        return table, ""
    columns = list(zip(table.header, zip(*table.rows, strict=True), strict=True))
    same = [(name, values[0]) for name, values in columns[1:] if len(set(values)) == 1]
    kept = [_lift(name, values) for name, values in columns if (name, values[0]) not in same]
    header, entries = zip(*kept, strict=True)
    said = "; ".join(f"{name} {value}" for name, value in same if value)
    return Table(header, tuple(zip(*entries, strict=True))), f"In every row: {said}." if said else ""


def _lift(name: str, values: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    added = {found[0] if (found := re.search(r" \([^()]*\)$", value)) else "" for value in values if value}
    if len(added) != 1 or added == {""}:
        return name, values
    (addition,) = added
    return name + addition, tuple(value.removesuffix(addition) for value in values)


def pills(claims: Sequence[Claim]) -> str:
    """Return how many statements got each verdict."""
    return " ".join(_pill(count, holds) for count, holds in tallies(claims))


def _pill(verdict: str, holds: bool | None) -> str:
    style, sign = _SIGNS[holds]
    shown = escape(verdict.replace(BEYOND_SCALE, "not decided"))
    return f'<span class="verdict {style}"><span aria-hidden="true">{sign}</span> {shown}</span>'


def statements(claims: Sequence[Claim]) -> str:
    """Return the paper's statements with our numbers, its numbers and the verdicts."""
    rows = []
    for claim in claims:
        ours, paper = _unbroken(claim.ours), _unbroken(claim.paper)
        rows.append(
            f'<tr><td>{text(claim.text)}</td><td data-label="ours">{ours}</td>'
            f'<td data-label="paper">{paper}</td><td>{_pill(claim.verdict, claim.holds)}</td></tr>\n'
        )
    head = "".join(f'<th scope="col">{name}</th>' for name in ("statement of the paper", "ours", "paper", "verdict"))
    table = f'<table class="claims"><thead><tr>{head}</tr></thead>\n<tbody>{"".join(rows)}</tbody></table>'
    needs = dict.fromkeys(claim.needs for claim in claims if claim.verdict == BEYOND_SCALE)
    return table + "".join(f'<p class="small">{sentence(BEYOND_SCALE)}. That needs {text(need)}.</p>' for need in needs)
