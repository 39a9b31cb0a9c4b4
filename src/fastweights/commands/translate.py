"""`fastweights translate`: lines of text through a trained translation model."""

import io
import select
import sys
import time
from collections.abc import Iterator
from typing import Annotated, BinaryIO

import typer

from fastweights.commands.options import Device, option, pick_device
from fastweights.commands.results import (
    Beam,
    LengthPenalty,
    TranslationFolder,
    Which,
    check_batch,
    check_names,
    run_errors,
    writing,
)
from fastweights.data.pairs.files import decode_line
from fastweights.inference import translate as translation
from fastweights.inference.beam import Search
from fastweights.training.runs.trained import TrainedTranslationModel

# Lines that are sorted by length together.
WINDOW = 1024
# Seconds in which a group with lines may wait for more: `cat` needs some time between two pieces of a file.
PATIENCE = 0.02
_PIECE = 1 << 16


def translate(
    run: TranslationFolder,
    beam: Beam = 4,
    length_penalty: LengthPenalty = 0.6,
    n_best: Annotated[
        int, option("Translations of each line; with 2 or more, print LINE, SCORE and TEXT separated by tabs.")
    ] = 1,
    max_length: Annotated[
        int | None, option("Largest number of tokens in a translation.", "50 more than the line has")
    ] = None,
    batch: Annotated[int | None, option("Lines at once.", "as many as suit the device")] = None,
    checkpoint: Which = "best",
    device: Device = "auto",
    graph: Annotated[
        bool | None,
        typer.Option(
            "--graph/--no-graph",
            help="Capture steps as CUDA graphs; for decoders with fast weights on a GPU.",
            show_default="where possible",
        ),
    ] = None,
) -> None:
    """Translate standard input to standard output, line by line; empty lines stay empty.

    All lines that have arrived are translated together, in batches of similar length, without waiting for more.
    """
    with run_errors():
        check_names(checkpoint)
        check_batch(batch)
        search = Search(beam=beam, length_penalty=length_penalty, n_best=n_best, max_length=max_length)
        device = pick_device(device)
        trained = TrainedTranslationModel.load(run, checkpoint, device)
    with writing():
        groups = waiting_lines(sys.stdin.buffer, "standard input")
        translations = translation.stream(trained.model, trained.tokenizer, groups, search, batch=batch, graph=graph)
        for number, hypotheses in enumerate(translations, 1):
            if n_best == 1:
                text = f"{hypotheses[0].text if hypotheses else ''}\n"
            else:
                text = "".join(f"{number}\t{best.score:.4f}\t{best.text}\n" for best in hypotheses)
            # As UTF-8, which is how lines are read, whatever the terminal has.
            sys.stdout.buffer.write(text.encode())
            sys.stdout.buffer.flush()


def waiting_lines(file: BinaryIO, name: str, window: int = WINDOW) -> Iterator[list[str]]:
    """Yield the lines of a UTF-8 file in groups of up to `window`; a group ends early where no further line is waiting.

    What follows the last end of a line is a line too; white space at the ends of lines is left out.

    Raises:
        DataError: a line is not UTF-8; it is named by `name` and its number.
    """
    lines: list[bytes] = []
    rest, done, until, more = b"", 0, 0.0, True
    while more:
        # What there is, once there is something; nothing is the end.
        piece = file.read1(_PIECE)  # type: ignore[attr-defined]
        more = bool(piece)
        if not lines:
            until = time.monotonic() + PATIENCE
        *whole, rest = (rest + piece).split(b"\n")
        lines += whole if more or not rest else [*whole, rest]
        while len(lines) >= window or (lines and not (more and _ready(file, until))):
            group, lines = lines[:window], lines[window:]
            yield [decode_line(line, done + i, name) for i, line in enumerate(group, 1)]
            done += len(group)
            until = time.monotonic() + PATIENCE


def _ready(file: BinaryIO, until: float) -> bool:
    """Return whether there is something to read, more lines or the end, now or by that time."""
    try:
        descriptor = file.fileno()
    except io.UnsupportedOperation:
        # A file in memory.
        return True
    return bool(select.select([descriptor], [], [], max(0.0, until - time.monotonic()))[0])
