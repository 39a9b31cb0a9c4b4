"""Train a small character model with a plain PyTorch loop, then let it write.

    python examples/train_language_model.py                          # Python's own documentation, a few seconds
    python examples/train_language_model.py book.txt --steps 2000 --carried

The rows of a batch are read from beginning to end, one segment after another. With `--carried` each segment starts from
the memory that the previous one left. Without it, every segment starts from an empty memory.
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch

import fastweights as fw


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small character model and let it write.")
    parser.add_argument("text", nargs="?", type=Path, help="a text file in UTF-8; Python's documentation by default")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="rows that are read side by side")
    parser.add_argument("--length", type=int, default=64, help="characters in a segment")
    parser.add_argument("--rate", type=float, default=5e-3)
    parser.add_argument("--rule", default="delta", help="how the memory is updated: delta, sum, gated, gated_delta ...")
    parser.add_argument("--carried", action="store_true", help="start each segment from the memory of the last one")
    parser.add_argument("--write", type=int, default=200, help="characters to write at the end")
    options = parser.parse_args()
    torch.manual_seed(0)

    text = options.text.read_text("utf-8") if options.text else "\n".join(topics.values())
    characters = sorted(set(text))
    number = {character: i for i, character in enumerate(characters)}
    tokens = torch.tensor([number[character] for character in text])
    # Row b holds a batch-th part of the text; a segment is the next `length` characters of every row.
    rows = tokens[: len(tokens) // options.batch * options.batch].view(options.batch, -1)
    segments = (rows.shape[1] - 1) // options.length
    if not segments:
        parser.error(f"the text has {len(text)} characters; {options.batch} rows of {options.length} need more")

    sizes = {"d_model": 64, "n_layers": 2, "n_heads": 4, "d_ff": 256, "dropout": 0.0, "init_std": 0.05}
    memory = {"rule": options.rule, "feature_map": "silu", "normalization": "l2"}
    config = fw.LanguageModelConfig(vocab_size=len(characters), norm="pre", **sizes, **memory)
    model = fw.LanguageModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.rate, total_steps=options.steps)
    print(f"{len(text):,} characters, {len(characters)} different ones, {model.n_parameters:,} parameters")

    state = None
    for step in range(options.steps):
        first = step % segments * options.length
        if not options.carried or first == 0:
            state = None
        inputs = rows[:, first : first + options.length]
        targets = rows[:, first + 1 : first + options.length + 1]
        losses, state = model.loss(inputs, targets, state)  # -log p of each target
        loss = losses.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        state = state.detach()  # carry the memory, but not the gradients
        if (step + 1) % 20 == 0 or step + 1 == options.steps:
            print(f"step {step + 1}: loss {loss.item():.3f} nats per character")

    stream = fw.Stream(model.eval())
    token = tokens[0]
    print(characters[token], end="")
    for _ in range(options.write):
        log_p = stream.feed(token.view(1))
        token = torch.multinomial((log_p / 0.7).softmax(-1), 1)[0]
        print(characters[token], end="")
    print()


main()
