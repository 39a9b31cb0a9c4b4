"""A trained model as a folder that transformers reads: `save_pretrained` of model and tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastweights.common.files import write_atomically
from fastweights.huggingface.configuration import FastWeightConfig, FastWeightTranslationConfig
from fastweights.huggingface.language_model import FastWeightForCausalLM
from fastweights.huggingface.tokenizers import fast_tokenizer
from fastweights.huggingface.translation import FastWeightForSeq2SeqLM
from fastweights.training.runs.folder import RunError
from fastweights.training.runs.saved import LanguageRun, TranslationRun, task_of

# Programs that do not import this package find the classes by this file, if they trust code of the folder.
MODULE = "modeling_fastweights"
CODE = '''"""Where transformers finds the classes of this folder: in the package fastweights."""

from fastweights.huggingface import {names}

__all__ = [{listed}]
'''


def write_folder(run: Path | str, out: Path | str, which: str = "best") -> Any:
    """Write the model of a run, with its tokenizer, to the new folder `out`, and return it as a model of transformers.

    Raises:
        RunError: there is no such run, or something is in the folder already.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} is not empty; choose a folder that is")
    translates = task_of(run) == TranslationRun.name
    opened: TranslationRun | LanguageRun = TranslationRun.open(run) if translates else LanguageRun.open(run)
    tokenizer = opened.tokenizer()
    model: Any
    if isinstance(opened, TranslationRun):
        model, auto = FastWeightForSeq2SeqLM(FastWeightTranslationConfig.of(opened.model)), "AutoModelForSeq2SeqLM"
    else:
        config = FastWeightConfig.of(opened.model, tokenizer.encode("\n")[-1])
        model, auto = FastWeightForCausalLM(config), "AutoModelForCausalLM"
    model.network.load_state_dict(opened.load(which)[0].state_dict())
    model.eval()
    classes = {"AutoConfig": type(model.config).__name__, auto: type(model).__name__}
    model.config.auto_map = {kind: f"{MODULE}.{name}" for kind, name in classes.items()}
    names = sorted(classes.values())
    code = CODE.format(names=", ".join(names), listed=", ".join(f'"{name}"' for name in names))
    model.save_pretrained(out)
    fast_tokenizer(tokenizer).save_pretrained(out)
    write_atomically(out / f"{MODULE}.py", code.encode())
    return model
