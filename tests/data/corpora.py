"""Small corpora in the official formats, and the plainest way to read them."""

import os
import random
import zipfile
from collections import Counter
from pathlib import Path

SPLITS = ("train", "valid", "test")
REAL = Path(os.environ.get("FASTWEIGHTS_DATA") or Path(__file__).parents[2].parent / "shared" / "data")


def lines(seed, count, words=60):
    """Lines as WikiText has them: a space at both ends, blank lines, headings, `<unk>`, signs beyond ASCII."""
    draw = random.Random(seed)
    vocabulary = ["<unk>", "=", "naïve", "東京", "@-@", *(f"w{n}" for n in range(words))]
    rows = [" ", " = Title = "]
    for _ in range(count):
        rows.append(" " + " ".join(draw.choices(vocabulary, k=draw.randrange(12))) + " ")
    return rows


def write_wikitext(folder, train=40, held_out=12, words=60):
    """The three official files; valid and test have words that train has not."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"train": lines(0, train, words), "valid": lines(1, held_out, words + 9), "test": lines(2, held_out, words)}
    for split, rows in texts.items():
        (folder / f"wiki.{split}.tokens").write_bytes("".join(f"{row}\n" for row in rows).encode())
    return texts


def zipped(folder, path, inside="some/where"):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.iterdir()):
            archive.write(file, f"{inside}/{file.name}")
            archive.writestr(f"__MACOSX/{file.name}", "not this")
    return path


def naive(texts):
    """Words and numbers of each split as the authors' code makes them, line by line."""
    counter = Counter()
    for row in texts["train"]:
        counter.update(row.strip().split())
    words = ["<eos>", *(word for word, _ in counter.most_common())]
    number = {word: n for n, word in enumerate(words)}
    tokens = {}
    for split, rows in texts.items():
        known = [number.get(word, number["<unk>"]) for row in rows for word in [*row.strip().split(), "<eos>"]]
        tokens[split] = known
    return words, tokens
