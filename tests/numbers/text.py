"""The numbers of README and docs: which of them need a source, and whether one agrees with it."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DEMO = "src/fastweights/demo/README.md"
PAGES = ["README.md", DEMO, *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]

_ITEM = r"(?:\d|[A-Z]\b)[\d.]*"
_MORE = rf"(?:(?:,| and| to| or|-)\s?{_ITEM})*"
_PACKAGES = "fla-core|flash-linear-attention|transformers|PyTorch|Python|Triton|release|CC BY-SA"
KINDS = {
    "blocks of code": r"^```.*?^```$",
    "formulas": r"^ {4,}\S[^\n]*$",
    "comments": r"<!--.*?-->",
    "code": r"`[^`]*`",
    "addresses": r"\]\([^)]*\)|https?:\S+",
    "places in the paper": rf"\b(?:Figures?|Tables?|Eqs?\.|Sec\.|App\.)\s{_ITEM}{_MORE}",
    "years": r"\b(?:et al\.|ICML|of) (?:19|20)\d\d(?: and (?:19|20)\d\d)?",
    "versions": rf"\b(?:{_PACKAGES})\s(?:from )?\d[\d.]*{_MORE}|\b\d+\.\d+\.\d+\b",
    "names": r"\b[A-Za-z]\w*-\d+\b|\b[A-Za-z]+\d\w*",
    "widths of numbers": r"\b(?:16|32|64)(?: and \d\d)?(?:-|\s)bits?\b",
    "exit status": r"\b130 after Ctrl-C",
}
UNITS = {"K": 1e3, "M": 1e6, "million": 1e6, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "TFLOP": 1e12}
_NUMBER = re.compile(
    r"(?<![\w.,^⁻-])(\d[\d,]*\d|\d)(\.\d+)?(e-?\d+)?(?:\s?(%|µs|ms|s|words|times|" + "|".join(UNITS) + r")(?!\w))?"
)


def blocks(document):
    """Return the paragraphs, lists and tables of a document, without its blocks of code."""
    text = re.sub(KINDS["blocks of code"], "", (ROOT / document).read_text(), flags=re.DOTALL | re.MULTILINE)
    return [block.strip("\n") for block in re.split(r"\n\s*\n", text) if block.strip()]


def numbers(block, measured_only=False):
    """Return the numbers of a block that need a source: not single digits, nor those of `KINDS`.

    With `measured_only`, for pages that derive something, only those with a decimal point, an exponent or a unit.
    """
    for kind in KINDS.values():
        block = re.sub(kind, " ", block, flags=re.DOTALL | re.MULTILINE)
    found = []
    for match in _NUMBER.finditer(block):
        whole, *rest = match.groups()
        if any(rest) or (len(whole) > 1 and not measured_only):
            found.append("".join(filter(None, (whole, *rest[:2]))) + (f" {rest[2]}" if rest[2] else ""))
    return found


def agrees(text, value):
    """Say whether `text`, with its unit, is `value` rounded to the digits that `text` has."""
    number, _, unit = text.partition(" ")
    if "e" in number:
        return float(number) == value
    digits = len(number.partition(".")[2])
    return round(value / UNITS.get(unit, 1), digits) == float(number.replace(",", ""))
