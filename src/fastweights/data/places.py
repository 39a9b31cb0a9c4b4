"""Where corpora that need no download are prepared on first use."""

from pathlib import Path

EMBEDDED = Path("data") / "embedded"
NUMBERS = Path("data") / "numbers"
