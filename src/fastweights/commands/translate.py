"""`fastweights translate`: lines of text through a trained translation model."""

from __future__ import annotations

import sys
from typing import Annotated

from fastweights.commands.lines import waiting_lines
from fastweights.commands.options import Device, flag, option, pick_device, require
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
from fastweights.inference import translate as translation
from fastweights.inference.beam import Search
from fastweights.training.runs.trained import TrainedTranslationModel


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
        bool, flag("graph", "Capture steps as CUDA graphs; for decoders with fast weights on a GPU.")
    ] = False,
) -> None:
    """Translate standard input to standard output, line by line; empty lines stay empty.

    All lines that have arrived are translated together, in batches of similar length, without waiting for more.
    """
    with run_errors():
        require("tokenizers")
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
