"""Small aligned files."""

import random

ENGLISH = ["the", "cat", "sees", "a", "big", "house", "and", "naïve", "dogs"]
GERMAN = ["die", "Katze", "sieht", "ein", "großes", "Haus", "und", "naive", "Hunde"]


def sentences(seed, count, longest=12):
    """Pairs of lines of the same number of words, in reverse order."""
    draw = random.Random(seed)
    chosen = [draw.choices(range(len(ENGLISH)), k=draw.randint(1, longest)) for _ in range(count)]
    return [(" ".join(ENGLISH[n] for n in row), " ".join(GERMAN[n] for n in reversed(row))) for row in chosen]


def write_set(folder, name, pairs, languages=("en", "de"), suffix="", open_=open):
    folder.mkdir(parents=True, exist_ok=True)
    for side, language in enumerate(languages):
        with open_(folder / f"{name}.{language}{suffix}", "wb") as file:
            file.write("".join(f"{pair[side]}\n" for pair in pairs).encode())


def write_parallel(folder, train=60, held_out=9, test=True):
    splits = {"train": sentences(0, train), "valid": sentences(1, held_out), "test": sentences(2, held_out)}
    if not test:
        del splits["test"]
    for split, pairs in splits.items():
        write_set(folder, split, pairs)
    return splits
