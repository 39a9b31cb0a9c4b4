"""Roll a stream back: try two continuations of one text, and end exactly where it began."""

import torch

import fastweights as fw

lm = fw.load("demo")
stream = fw.Stream(lm.model, tokenizer=lm.tokenizer, snapshot_every=16, snapshot_last=2)
stream.feed("The film was released in the United States, where it was received well by critics and by")
print(f"{stream.position} tokens read, snapshots at {stream.snapshots}, {stream.nbytes:,} bytes each")

here, before = stream.snapshot(), stream.log_probs
for text in (" the audience.", " nobody else."):
    stream.roll_back(here)
    log_p = stream.log_probs[lm.tokenizer.encode(text)[0]]
    stream.feed(text)
    print(f"{text!r}: log p of its first token {log_p:.2f}, then {stream.position} tokens read")

# As if neither had ever been fed: every bit is the same.
stream.roll_back(here)
assert torch.equal(stream.log_probs, before)

# A shared beginning is read once, also by other processes with the same folder.
store = fw.PrefixStore(lm.model, every=8)
prompt = lm.tokenizer.encode("The film was released in the United States, where it was")
store.open(prompt + lm.tokenizer.encode(" a success"))
question = prompt + lm.tokenizer.encode(" not a success")
print(f"{store.longest(question)} of {len(question)} tokens need not be read again")
