"""Speculative decoding: a small model proposes tokens, a large one checks them together, and states roll back."""

import sys
import time
from dataclasses import replace

import torch

import fastweights as fw


def distill(large, steps, batch=32, length=64):
    """Return a model of one block that learns from texts that the large model writes."""
    small = fw.LanguageModel(replace(large.config, n_layers=1))
    known = {name: x for name, x in large.state_dict().items() if name in small.state_dict()}
    small.load_state_dict(known)  # the embedding, the first block, the last norm
    tokens, state, texts = torch.randint(large.config.vocab_size, (batch,)), None, []
    with torch.no_grad():
        for _ in range(length + 2 * steps):
            log_p, state = large.step(tokens, state)
            tokens = torch.multinomial((log_p / 0.7).softmax(-1), 1)[:, 0]
            texts.append(tokens)
    texts = torch.stack(texts, 1)
    optimizer = torch.optim.AdamW(small.parameters(), 3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    for _ in range(steps):
        start = int(torch.randint(texts.shape[1] - length, ()))
        part = texts[:, start : start + length]
        loss, _ = small.loss(part[:, :-1], part[:, 1:])
        loss.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return small


def plain(large, prompt, count):
    """Take the likeliest token, `count` times."""
    stream, text = fw.Stream(large), []
    log_p = stream.feed(prompt)
    while len(text) < count:
        text.append(int(log_p.argmax()))
        log_p = stream.feed(text[-1:])
    return text


def speculative(large, small, prompt, count, ahead=3):
    """Do the same, with `ahead` tokens from the small model for each call of the large one; also count the calls."""
    checker, proposer = fw.Stream(large), fw.Stream(small, snapshot_last=ahead + 2)
    text, calls = [int(checker.feed(prompt).argmax())], 1
    proposer.feed(prompt)
    base, unread = checker.snapshot(), text[:]  # tokens that the large model has not finally read
    proposer_unread = text[:]
    while len(text) < count:
        proposals = []
        for _ in range(ahead):
            proposals.append(int(proposer.feed(proposer_unread).argmax()))
            proposer_unread = proposals[-1:]
        best = checker.feed_each(unread + proposals)[len(unread) - 1 :].argmax(-1).tolist()
        calls += 1
        agreed = next((i for i in range(ahead) if proposals[i] != best[i]), ahead)
        text += best[: agreed + 1]  # what both agree on, and one more token from the large model
        if agreed == ahead:
            base, unread, proposer_unread = checker.snapshot(), best[-1:], [proposals[-1], best[-1]]
        else:
            checker.roll_back(base)
            unread = unread + best[: agreed + 1]
            proposer.roll_back(len(prompt) + len(text) - 1)
            proposer_unread = best[agreed : agreed + 1]
    return text[:count], calls


def main(steps=60, count=100):
    """Write one text both ways."""
    torch.manual_seed(0)
    lm = fw.load("demo")
    small, prompt = distill(lm.model, steps), lm.tokenizer.encode("The film was released in")
    times = [time.perf_counter()]
    expected = plain(lm.model, prompt, count)
    times.append(time.perf_counter())
    text, calls = speculative(lm.model, small, prompt, count)
    times.append(time.perf_counter())
    assert text == expected
    print(lm.tokenizer.decode(prompt + text))
    speedup = (times[1] - times[0]) / (times[2] - times[1])
    print(f"The same text with {calls} calls of the large model instead of {count}: {speedup:.2f} times as fast.")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
