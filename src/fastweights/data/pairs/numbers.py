"""A translation corpus that needs no download: lists of numbers in English words to the same in German ones.

"one hundred twenty-three, seven" becomes "einhundertdreiundzwanzig, sieben": words are joined, and the ones come before
the tens. A number from 100 on belongs to one split, so that what is tested never came up in training.
"""

import random
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from fastweights.data.manifest import SPLITS, DataError
from fastweights.data.pairs.build import build_pairs
from fastweights.data.pairs.files import Pair
from fastweights.data.sources import Built, CorpusFiles, CorpusRequest, Progress

LANGUAGES = ("en", "de")
# Scores count words in a row, up to four: a line of one number would have none.
_SHORTEST, _LONGEST = 2, 4


def split_of(number: int) -> str:
    """Return the split of a number, by its hash: a tenth of those from 100 on is for valid and a tenth for test."""
    if number < 100:
        return "train"
    return {0: "valid", 1: "test"}.get(zlib.crc32(str(number).encode()) % 10, "train")


@cache
def english(number: int) -> str:
    """Say a number as in America: 1,234 is "one thousand two hundred thirty-four"."""
    return _words(number, "en").replace(" and ", " ").replace(",", "")


@cache
def german(number: int) -> str:
    """Say a number in German: 1,234 is "eintausendzweihundertvierunddreißig"."""
    return _words(number, "de")


def _words(number: int, language: str) -> str:
    try:
        from num2words import num2words
    except ImportError:
        raise DataError("the words of numbers take num2words: pip install 'fastweights[mt]'") from None
    return str(num2words(number, lang=language))


def lines(split: str, count: int, highest: int) -> Iterator[Pair]:
    """Draw lists of two to four numbers of a split, as many small as large ones; the same ones each time."""
    draw = random.Random(f"{split} of {highest}")
    # By number of digits first, or nearly all of them would be as long as the highest.
    by_digits: dict[int, list[int]] = {}
    for number in range(highest + 1):
        if split_of(number) == split:
            by_digits.setdefault(max(len(str(number)), 2), []).append(number)
    choices = list(by_digits.values())
    for number in range(1, count + 1):
        values = [draw.choice(draw.choice(choices)) for _ in range(draw.randint(_SHORTEST, _LONGEST))]
        yield Pair(number, ", ".join(map(english, values)), ", ".join(map(german, values)))


def build(sources: CorpusFiles, folder: Path, request: CorpusRequest) -> Built:
    """Build the corpus with the sizes of the request."""
    counts = dict(zip(SPLITS, (request.pairs, request.held_out, request.held_out), strict=True))

    def read(split: str, progress: Progress) -> Iterator[Pair]:
        for pair in lines(split, counts[split], request.highest):
            if pair.number % 4096 == 0:
                progress(pair.number / counts[split])
            yield pair

    return build_pairs(read, list(SPLITS), LANGUAGES, folder, request)
