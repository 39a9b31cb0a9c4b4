"""A trained model in a folder of its own: what using it needs, and a card that says what it is.

FOLDER/config.json      the configuration, and where the run was made
FOLDER/checkpoints/     one checkpoint, without what resuming needs
FOLDER/tokenizer.json   or the file of another kind of tokenizer
FOLDER/eval/            the results of `fastweights eval`, where the run has any
FOLDER/README.md        the card

It is read like any other run.
"""

import json
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch

from fastweights.common.files import write_atomically
from fastweights.training.runs.checkpoint import Checkpoint, CheckpointStore, Contents
from fastweights.training.runs.folder import RunError
from fastweights.training.runs.saved import SavedRun, keep_tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(run: SavedRun, out: Path, *, which: str, dtype: torch.dtype, note: str) -> Checkpoint:
    """Write the model of a run to the new folder `out`; `note` goes to its card.

    Raises:
        RunError: there is something in the folder already.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} is not empty; choose a folder that is")
    model, checkpoint = run.load(which)
    weights = {name: x.to(dtype) if x.is_floating_point() else x for name, x in model.state_dict().items()}
    keep_tokenizer(out, run.tokenizer())
    stored = json.loads((run.folder / "config.json").read_bytes())
    # Where the corpus was says nothing to others.
    stored.get("about", {}).pop("data", None)
    write_atomically(out / "config.json", (json.dumps(stored, indent=1) + "\n").encode())
    CheckpointStore(out / "checkpoints").save(checkpoint.step, Contents(weights, None), checkpoint.scores)
    results = {path.name: path.read_bytes() for path in sorted((run.folder / "eval").glob("*.json"))}
    for name, content in results.items():
        write_atomically(out / "eval" / name, content)
    write_atomically(out / "README.md", _card(run, stored, checkpoint, dtype, note, results).encode())
    return checkpoint


def _card(
    run: SavedRun,
    stored: dict[str, Any],
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    note: str,
    results: dict[str, bytes],
) -> str:
    about, training = stored.get("about", {}), stored["training"]
    with torch.device("meta"):
        size = run.classes[1](run.model).n_parameters
    facts = {
        "model": f"{run.what}, {size:,} parameters, {str(dtype).removeprefix('torch.')}",
        "corpus": about.get("corpus", "unknown"),
        "training": f"{checkpoint.step:,} of {training['steps']:,} steps",
        "made with": f"commit {about.get('commit', 'unknown')}, {about.get('hardware', 'unknown hardware')}",
    }
    facts |= {f"validation {name}": f"{score:.4g}" for name, score in checkpoint.scores.items()}
    for name, content in results.items():
        result = json.loads(content)
        # A perplexity beyond all floats is kept as text.
        shown = (f"{key} {float(result[key]):.4g}" for key in ("ppl", "bits_per_byte", "bleu") if key in result)
        facts[f"eval/{name}"] = ", ".join(shown)
    rows = "".join(f"| {name} | {value} |\n" for name, value in facts.items())
    command = " \\\n      ".join(
        wrap(about.get("command", "unknown"), 100, break_long_words=False, break_on_hyphens=False)
    )
    return f"# A trained model of fastweights\n\n{note}\n\n| | |\n|---|---|\n{rows}\nTrained by\n\n    {command}\n"
