"""Export a language model as ONNX and let ONNX Runtime continue a text, without PyTorch after the export.

One file reads a prompt at once, another continues it token by token. The state passes from call to call.
"""

import tempfile
from pathlib import Path

import numpy as np
import onnxruntime

from fastweights.models.language_model import LanguageModel, LanguageModelConfig
from fastweights.onnx.export import export_onnx

# Untrained and tiny, so that this takes seconds; `fastweights export onnx demo FILE` writes a trained one.
model = LanguageModel(LanguageModelConfig(vocab_size=50, d_model=16, n_layers=1, n_heads=2, d_ff=32, rule="delta"))
folder = Path(tempfile.mkdtemp())
export_onnx(model, folder / "prompt.onnx")
export_onnx(model, folder / "step.onnx", step=True)
prompt, step = (onnxruntime.InferenceSession(str(folder / name)) for name in ("prompt.onnx", "step.onnx"))


def run(session, tokens, state):
    """Return log probabilities and the new state."""
    names = [x.name for x in session.get_outputs()[1:]]
    log_probs, *after = session.run(None, {"tokens": tokens, **state})
    return log_probs, {name.replace("present", "past"): x for name, x in zip(names, after, strict=True)}


# The state before the first token is all zeros; the batch size, 1 here, is arbitrary.
state = {x.name: np.zeros([1, *x.shape[1:]], np.float32) for x in prompt.get_inputs()[1:]}
log_probs, state = run(prompt, np.array([[3, 14, 15, 9, 26]]), state)
text = [int(log_probs[0, -1].argmax())]
for _ in range(9):
    log_probs, state = run(step, np.array(text[-1:]), state)
    text.append(int(log_probs[0].argmax()))
print("continued by", text)
