"""A small corpus that can be learned, and language models to go with it."""

import json
import random
import shutil

import torch

from fastweights.data.prepare import prepare
from fastweights.data.text.corpus import Corpus
from fastweights.models.language_model import LanguageModel, LanguageModelConfig
from fastweights.training.engine.loop import train
from fastweights.training.runs.checkpoint import CheckpointStore, list_checkpoints, read
from fastweights.training.tasks.language import LanguageTask, assemble

from .tiny import quiet

# What a run of a second has, for `assemble`; the same as options of the command line.
SMALL = {"d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 24, "segment": 12, "batch_size": 8, "cutoffs": [9]}
SMALL |= {"steps": 30, "lr": 0.02, "seed": 3, "log_every": 1, "eval_every": 10, "tensorboard": False}
SMALL |= {"accelerator": "cpu", "checkpoint_minutes": None, "eval_batch": 4}
MIXERS = ("delta", "linear", "performer", "dpfp", "transformer", "xl")


def write_text(path, lines=160):
    """Lines in which most words follow from the one before; `<unk>` is one of them."""
    draw, word, rows = random.Random(5), 0, []
    words = ["<unk>", *(f"w{n}" for n in range(20))]
    for _ in range(lines):
        row = []
        for _ in range(8):
            word = (3 * word + 1) % len(words) if draw.random() < 0.8 else int(draw.random() * len(words))
            row.append(words[word])
        rows.append(" ".join(row))
    path.write_text("\n".join(rows) + "\n")
    return path


def small_corpus(folder):
    folder.mkdir(parents=True, exist_ok=True)
    prepare("text", write_text(folder / "text.txt"), folder / "corpus")
    return Corpus.load(folder / "corpus")


def small_task(corpus, mixer="delta", **settings) -> tuple[LanguageTask, object]:
    return assemble(corpus, preset="tiny", mixer=mixer, **{**SMALL, **settings})


def run(corpus, out, mixer="delta", task=None, **settings):
    built, config = small_task(corpus, mixer, **settings)
    return train(task or built, config, out, console=quiet())


def random_model(seed=0, **options):
    """In float64, with weights large enough that every part of it shows in the result."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 23, "cutoffs": (5, 11), "d_model": 12, "n_layers": 2, "n_heads": 2, "d_ff": 10}
    config = LanguageModelConfig(**{**sizes, "init_std": 0.3, **options})
    return LanguageModel(config).double().eval()


def as_options(settings):
    """The settings as FIELD=VALUE."""
    return [part for name, value in settings.items() for part in ("--set", f"{name}={json.dumps(value)}")]


def spoil(source, target, value):
    """Copy a run and fill the weights of its best checkpoint."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("eval"))
    store = CheckpointStore(target / "checkpoints")
    (best,) = list_checkpoints(store.folder, "best")
    checkpoint, contents = read(best)
    weights = {name: torch.full_like(weight, value) for name, weight in contents.weights.items()}
    store.save(checkpoint.step, contents._replace(weights=weights), checkpoint.scores)
