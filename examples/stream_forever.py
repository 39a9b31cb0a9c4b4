"""Run a layer as a stream: each token costs the same, and so does the memory, however long the stream."""

import tempfile
from pathlib import Path

import torch

import fastweights as fw

torch.manual_seed(0)
layer = fw.FastWeightAttention(64, 4, feature_map="dpfp").eval()
state = None
with torch.no_grad():
    for t in range(3000):
        y, state = layer.step(torch.randn(1, 64), state)
        if t % 1000 == 999:
            print(f"token {t + 1}: state of {state.nbytes} bytes, |y| = {y.norm():.3f}")

# The state can be saved, and the stream continued elsewhere.
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "stream.safetensors"
    state.save(path)
    layer.step(torch.randn(1, 64), fw.FastWeightState.load(path))
