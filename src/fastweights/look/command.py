"""`fastweights look`: a page that shows what a trained language model keeps in its memory."""

from pathlib import Path
from typing import Annotated

import typer

from fastweights.commands.generate import note_unknown
from fastweights.commands.options import Device, option, pick_device, say
from fastweights.commands.results import LanguageFolder, Which, check_names, run_errors
from fastweights.common.files import write_atomically
from fastweights.look.page import bytes_per_layer, page
from fastweights.look.record import layers_of, record
from fastweights.training.runs.trained import TrainedLanguageModel

# Bytes that all layers together may take where nobody chooses layers.
ROOM = 1_850_000


def look(
    run: LanguageFolder,
    text: Annotated[Path | None, option("File with the text to read.", False)] = None,
    prompt: Annotated[str | None, option("The text itself.", False)] = None,
    out: Annotated[Path, option("HTML file to write.")] = Path("look.html"),
    tokens: Annotated[int, option("Largest number of tokens to read; a longer text is cut.")] = 200,
    layers: Annotated[
        str, option("Layers to record, such as 1,4,6.", "all, or as many as fit into a page of 2 MB")
    ] = "",
    checkpoint: Which = "best",
    data: Annotated[Path | None, option("The corpus, if RUN has no copy of its tokenizer.")] = None,
    device: Device = "auto",
) -> None:
    """Write a page that shows the memory of a language model while it reads a text.

    One HTML file, without network access: the fast weights of every layer and head token by token, what each key
    retrieves and how it is corrected, from which earlier tokens each read comes, and the sum and the delta rule side by
    side on the same keys. A second tab runs the paper's overwriting task live.
    """
    with run_errors():
        if (text is None) == (prompt is None):
            raise ValueError("give the text to read: either --text FILE or --prompt TEXT")
        if tokens < 2:
            raise ValueError(f"--tokens must be at least 2, got {tokens}")
        check_names(checkpoint)
        content = prompt if text is None else _read(text)
        assert content is not None
        trained = TrainedLanguageModel.load(run, checkpoint, pick_device(device), data)
        note_unknown(content, trained.tokenizer)
        ids = trained.tokenizer.encode(content)
        if len(ids) < 2:
            raise ValueError(f"the text must have at least 2 tokens, got {len(ids)}")
        if len(ids) > tokens:
            say(f"Reading the first {tokens} of {len(ids):,} tokens; --tokens reads more.")
            ids = ids[:tokens]
        count = len(layers_of(trained.model))
        chosen = _numbers(layers, count)
        recording = record(trained, ids, run.resolve().name, chosen or range(1, count + 1))
        if not chosen:
            fit = _spread(count, ROOM // bytes_per_layer(recording.blocks[0]))
            if len(fit) < count:
                shown = ", ".join(map(str, fit))
                say(f"Recorded layers {shown} of {count}, to keep the page below 2 MB; --layers takes others.")
                recording.blocks[:] = [recording.blocks[number - 1] for number in fit]
        html = page(recording).encode()
    try:
        write_atomically(out, html)
    except OSError as error:
        say(f"Error: {out} cannot be written: {error.strerror}")
        raise typer.Exit(1) from None
    typer.echo(f"Written to {out}: {len(ids)} tokens, {len(recording.blocks)} layers, {len(html) / 1e6:.2f} MB")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--text {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--text {path} is no text in UTF-8") from None


def _numbers(text: str, count: int) -> list[int]:
    """Return the layers of a list such as "1,4,6"; none for none."""
    try:
        numbers = sorted({int(part) for part in text.split(",")}) if text else []
    except ValueError:
        raise ValueError(f"--layers takes numbers such as 1,4,6, got {text!r}") from None
    if any(not 1 <= number <= count for number in numbers):
        raise ValueError(f"this model has layers 1 to {count}, got --layers {text}")
    return numbers


def _spread(count: int, most: int) -> list[int]:
    """Return the numbers of at most that many of the layers, at least one, from the first to the last."""
    kept = min(count, max(1, most))
    return [1 + round(i * (count - 1) / max(1, kept - 1)) for i in range(kept)]
