"""Our models as Hugging Face's transformers knows them: configurations, models, tokenizers, Auto classes.

Importing this package registers them, so that `AutoModelForCausalLM.from_pretrained(folder)` and its like find them.
"""

from __future__ import annotations

import sys

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from fastweights.huggingface.configuration import FastWeightConfig, FastWeightTranslationConfig
from fastweights.huggingface.language_model import FastWeightForCausalLM
from fastweights.huggingface.tokenizers import fast_tokenizer
from fastweights.huggingface.translation import FastWeightForSeq2SeqLM

__all__ = [
    "FastWeightConfig",
    "FastWeightForCausalLM",
    "FastWeightForSeq2SeqLM",
    "FastWeightTranslationConfig",
    "fast_tokenizer",
]

for _config in (FastWeightConfig, FastWeightTranslationConfig):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
AutoModelForCausalLM.register(FastWeightConfig, FastWeightForCausalLM, exist_ok=True)
AutoModelForSeq2SeqLM.register(FastWeightTranslationConfig, FastWeightForSeq2SeqLM, exist_ok=True)
# `transformers serve` looks the class of a model up in its own package, whatever Auto classes know. By the time it
# loads a model that package has been imported a second time, and it still holds the first.
_server = sys.modules.get("transformers.cli.serving.model_manager")
for _package in (transformers, getattr(_server, "transformers", transformers)):
    for _model in (FastWeightForCausalLM, FastWeightForSeq2SeqLM):
        setattr(_package, _model.__name__, _model)
