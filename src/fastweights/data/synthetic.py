"""Associative retrieval, Sec. 6.1: key-value pairs in a row, then a query; drawn whole blocks at a time on any device.

S keys and S values are the numbers 0 … S-1. Setting 1 pairs every key with one value (without replacement, L = S);
setting 2 draws both with replacement, so that a key's last value is the one that counts. B sequences, L pairs, Q
queries.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """Sequences with their queries, as `RetrievalModel` takes them, and the values to be found.

    None as `keys` or `queries` stands for 0 … S-1 in order, which saves looking them up. `weights` says how much each
    query counts in the mean loss; None stands for 1.
    """

    keys: Tensor | None  # (B, L)
    values: Tensor  # (B, L)
    queries: Tensor | None  # (B, Q)
    targets: Tensor  # (B, Q)
    weights: Tensor | None = None  # (B, Q)


def permutations(rows: int, size: int, generator: torch.Generator) -> Tensor:
    """Draw `rows` independent uniform permutations of 0 … size-1, (rows, size)."""
    device = generator.device
    if device.type == "cpu" and size > 50:
        # Linear in the size: from here on a shuffle for each row beats sorting them all.
        return torch.stack([torch.randperm(size, generator=generator) for _ in range(rows)])
    # In float64 a tie, which would favour one order, has a chance of 1e-11 at the largest size used.
    return torch.rand(rows, size, generator=generator, device=device, dtype=torch.float64).argsort(-1)


def training_batches(
    setting: int, size: int, steps: int, batch: int, generator: torch.Generator, length: int | None = None
) -> Iterator[Batch]:
    """Draw `steps` mini-batches in one go, each with one query a sequence.

    Setting 1 gives the pairs sorted by key. No rule that is run there can see the order of the pairs, and a sequence of
    two random permutations is, sorted, one random permutation: half of the draws and every lookup of a key are saved.
    The query is one of the L keys, so in setting 2 a frequent key is asked for often.
    """
    if setting == 1:
        values = permutations(steps * batch, size, generator).view(steps, batch, size)
        queries = _integers(size, (steps, batch, 1), generator)
        for v, q, target in zip(values, queries, values.gather(-1, queries), strict=True):
            yield Batch(None, v, q, target)
        return
    length = 2 * size if length is None else length
    keys, values = _integers(size, (2, steps, batch, length), generator)
    queries = keys.gather(-1, _integers(length, (steps, batch, 1), generator))
    # The last position that holds the queried key: there is one, as the query was taken from the keys.
    last = ((keys == queries) * torch.arange(length, device=keys.device)).amax(-1, keepdim=True)
    for k, v, q, target in zip(keys, values, queries, values.gather(-1, last), strict=True):
        yield Batch(k, v, q, target)


def evaluation_batch(
    setting: int,
    size: int,
    sequences: int,
    generator: torch.Generator,
    length: int | None = None,
    query_cap: int | None = None,
    chunk: int | None = None,
) -> Batch:
    """Draw `sequences` fresh sequences, each with every key it holds as a query.

    Args:
        length: pairs a sequence in setting 2; S if None.
        query_cap: ask only for this many keys of each sequence, the first ones in order.
        chunk: weigh the queries so that their weighted mean is the mean over chunks of at most that many queries of one
            sequence, a last short chunk counting as much as a full one.
    """
    if setting == 1:
        values = permutations(sequences, size, generator)
        keys, targets, present = None, values, torch.ones_like(values, dtype=torch.bool)
    else:
        length = size if length is None else length
        keys, values = _integers(size, (2, sequences, length), generator)
        position = torch.arange(length, device=keys.device).expand_as(keys)
        last = torch.full((sequences, size), -1, device=keys.device).scatter_reduce(-1, keys, position, "amax")
        targets, present = values.gather(-1, last.clamp(min=0)), last >= 0
    rank = present.cumsum(-1)
    if query_cap is not None:
        present = present & (rank <= query_cap)
    weights = present.double()
    if chunk is not None:
        count = present.sum(-1, keepdim=True)
        in_full_chunk = rank <= count - count % chunk
        weights = weights / (count % chunk).clamp(min=1).expand_as(rank).masked_fill(in_full_chunk, chunk)
    return Batch(keys, values, None, targets, weights)


def _integers(below: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(below, shape, generator=generator, device=generator.device)
