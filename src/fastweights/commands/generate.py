"""`fastweights generate`: text from a trained language model, token by token."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from fastweights.commands.options import Device, check_seed, option, pick_device, say
from fastweights.commands.results import LanguageFolder, Which, check_names, run_errors, writing
from fastweights.data.tokenizer import UNKNOWN, Tokenizer, WordTokenizer, split_words
from fastweights.inference.sample import Sampling
from fastweights.inference.stream import SlidingWindow, Stream
from fastweights.training.runs.trained import TrainedLanguageModel


def generate(
    run: LanguageFolder,
    prompt: Annotated[
        str,
        option("The beginning of the text; for models of words, separate words by spaces. Empty starts a new line."),
    ] = "",
    tokens: Annotated[
        int, option("Tokens to add: words, byte pairs, characters or bytes, depending on the model.")
    ] = 100,
    temperature: Annotated[float, option("Below 1: more predictable; 0: always the most likely token.")] = 1.0,
    top_k: Annotated[int | None, option("Sample from the k most likely tokens.")] = None,
    top_p: Annotated[
        float | None, option("Sample from the most likely tokens that together have probability p.")
    ] = None,
    seed: Annotated[int, option("The same seed gives the same text.")] = 0,
    checkpoint: Which = "best",
    data: Annotated[Path | None, option("The corpus, if RUN has no copy of its tokenizer.")] = None,
    device: Device = "auto",
) -> None:
    """Continue a prompt with a trained language model, and print each token as it comes.

    A model with fast weights keeps a memory of constant size, however long the text. A model whose positions count
    backward from the end of a window, as in the paper, reads the last tokens again for each new one.
    """
    with run_errors():
        if tokens < 1:
            raise ValueError(f"--tokens must be at least 1, got {tokens}")
        check_names(checkpoint)
        check_seed(seed)
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
        device = pick_device(device)
        trained = TrainedLanguageModel.load(run, checkpoint, device, data)
        note_unknown(prompt, trained.tokenizer)
        reader = trained.reader()
    start = time.monotonic()
    with writing():
        try:
            for piece in trained.stream_text(reader, prompt, tokens, sampling, seed):
                sys.stdout.write(piece)
                sys.stdout.flush()
        finally:
            typer.echo()
    say(_summary(reader, tokens, time.monotonic() - start))


def note_unknown(prompt: str, tokenizer: Tokenizer) -> None:
    """Say which words of the prompt are not in the vocabulary."""
    if not isinstance(tokenizer, WordTokenizer):
        return
    unknown = list(dict.fromkeys(word for word in split_words(prompt) if word not in tokenizer))
    if unknown:
        shown = ", ".join(map(repr, unknown[:8])) + (", ..." if len(unknown) > 8 else "")
        say(f"Note: not in the vocabulary and read as {UNKNOWN}: {shown}")


def _summary(reader: Stream | SlidingWindow, written: int, seconds: float) -> str:
    speed = f"{written} tokens in {seconds:.1f} s, {written / max(seconds, 1e-9):.0f} a second"
    if isinstance(reader, SlidingWindow):
        return f"{speed}; this model does not stream: for each token the last {reader.length} were read again"
    return f"{speed}; {reader.position} tokens are kept as a state of {reader.nbytes:,} bytes"
