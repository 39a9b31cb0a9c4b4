"""A few sentence pairs whose translation is their words in reverse order, and models to go with them."""

from fastweights.data.pairs.corpus import ParallelCorpus
from fastweights.data.prepare import prepare
from fastweights.training.engine.loop import train
from fastweights.training.tasks.translation import assemble_translation
from tests.data.pair_files import write_parallel

from .tiny import quiet

# What a run of a second has, for `assemble_translation`; the same as options of the command line.
SMALL = {"d_model": 16, "n_heads": 2, "d_ff": 24, "encoder_layers": 1, "decoder_layers": 1, "max_tokens": 200}
SMALL |= {"steps": 12, "lr": 0.01, "seed": 3, "log_every": 1, "eval_every": 6, "tensorboard": False}
SMALL |= {"accelerator": "cpu", "checkpoint_minutes": None, "bleu_sentences": 4}


def small_pairs(folder):
    folder.mkdir(parents=True, exist_ok=True)
    write_parallel(folder / "files")
    prepare("parallel", folder / "files", folder / "pairs", vocab=300)
    return ParallelCorpus.load(folder / "pairs")


def small_translation(corpus, attention="linear", **settings):
    return assemble_translation(corpus, preset="tiny", attention=attention, **{**SMALL, **settings})


def run(corpus, out, attention="linear", task=None, **settings):
    built, config = small_translation(corpus, attention, **settings)
    return train(task or built, config, out, console=quiet())
