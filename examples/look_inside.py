"""Look inside a trained model: which earlier tokens its memories read from, and a page to watch them.

python examples/look_inside.py [OUT.html]
"""

import sys
from pathlib import Path

import torch

import fastweights as fw
from fastweights.look.page import page
from fastweights.look.record import record

out = Path(sys.argv[1] if len(sys.argv) > 1 else "look.html")
lm = fw.load("demo")
text = "The film was released in the United States in 1999. It was directed by John Smith and written"
ids = lm.tokenizer.encode(text)
pieces = list(lm.tokenizer.stream(ids))

calls: dict[int, dict] = {}
for number, block in enumerate(lm.model.blocks, 1):
    keep = lambda layer, inputs, number=number: calls.update({number: fw.probe.inputs_of(layer, inputs[0])})  # noqa: E731
    block.mixer.register_forward_pre_hook(keep)
with torch.no_grad():
    lm.model(torch.tensor([ids]))

print(f"The read at {pieces[len(ids) - 1]!r} comes from")
for number, call in calls.items():
    parts = fw.probe.attribute(**call)
    torch.testing.assert_close(parts.y, fw.fast_weight_memory(**call)[0], rtol=1e-3, atol=1e-3)
    for head, shares in enumerate(parts.shares[0, :, -1], 1):
        share, token = shares.max(-1)
        print(f"  layer {number}, head {head}: most from token {int(token) + 1}, {pieces[token]!r}, {share:.0%}")

out.write_text(page(record(lm, ids, "demo", list(calls))), encoding="utf-8")
print(f"Written to {out}: open it in a browser")
