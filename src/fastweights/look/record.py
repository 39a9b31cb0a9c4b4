"""Run a language model over a text and keep what its memories were given, token by token.

W itself is not kept: keys, queries, values and coefficients of the recurrence are, from which it can be replayed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from fastweights.layers.fast_weight import FastWeightAttention
from fastweights.models.language_model import LanguageModel
from fastweights.ops.family import coefficients_of, outside
from fastweights.ops.rules import RULES, Coefficients, Gate, Read, Rule, outer
from fastweights.probe import attribute, inputs_of
from fastweights.training.runs.trained import TrainedLanguageModel

# Tokens by which it is judged how far heads look back.
BEGINNING = 256


@dataclass(frozen=True, eq=False)
class RecordedBlock:
    """What the memories of one layer were given: q, k (H, T, D), v (H, T, M), and a, e and w of the recurrence.

    a is (H, T) or, with a decay for each key channel, (H, T, D); e and w are (H, T). One that is missing is 1, 0 or 1.
    `back` says how much each head looks back: the largest part of a read that comes from a token at least two before
    it, as a share of all parts, on average over reads.
    """

    number: int
    arrays: dict[str, Tensor]
    back: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Recording:
    """A text as a model read it.

    Attributes:
        name: of the model.
        tokens: the text, piece by piece.
        bits: what each token cost the model, -log2 p; None for the first, which nothing predicts.
        rule, feature_map, normalization: of its layers.
        attention: whether reads are divided, as attention normalisation does.
        n_layers: how many layers the model has.
        blocks: the layers that were recorded.
    """

    name: str
    tokens: list[str]
    bits: list[float | None]
    rule: Rule
    feature_map: str
    normalization: str
    attention: bool
    n_layers: int
    blocks: list[RecordedBlock]

    @property
    def start(self) -> tuple[int, int]:
        """The layer and the head, counted from 1, that look back most: the page shows them first."""
        _, layer, head = max((x, block.number, h) for block in self.blocks for h, x in enumerate(block.back, 1))
        return layer, head


def layers_of(model: LanguageModel) -> list[FastWeightAttention]:
    """Return the fast-weight layers of a model.

    Raises:
        ValueError: it has none, or its rule is none whose reads are sums over writes.
    """
    family = ", ".join(name for name, rule in RULES.items() if outside(rule) is None)
    layers = [block.mixer for block in model.blocks]
    config = model.config
    found = [layer for layer in layers if isinstance(layer, FastWeightAttention)]
    if len(found) < len(layers):
        raise ValueError(
            f"this model's mixer is {config.mixer!r}, which has no fast weights to look at; models with mixer "
            f"'fast_weight' work, with one of the rules {family}"
        )
    reason = outside(found[0].rule)
    if reason is not None:
        raise ValueError(f"{reason}, so that it cannot be replayed; models with one of the rules {family} work")
    return found


@torch.no_grad()
def record(trained: TrainedLanguageModel, ids: Sequence[int], name: str, layers: Sequence[int]) -> Recording:
    """Read tokens with a model, and record the layers of these numbers, counted from 1."""
    model = trained.model
    found = layers_of(model)
    blocks: dict[int, RecordedBlock] = {}

    def keep(number: int, layer: FastWeightAttention, arguments: tuple[Any, ...]) -> None:
        blocks[number] = _block(number, inputs_of(layer, arguments[0]))

    hooks = [found[number - 1].register_forward_pre_hook(partial(keep, number)) for number in layers]
    try:
        tokens = torch.tensor([ids], device=next(model.parameters()).device)
        hidden, _ = model(tokens)
        costs = model.softmax(hidden[:, :-1], tokens[:, 1:])[0].tolist() if len(ids) > 1 else []
    finally:
        for hook in hooks:
            hook.remove()
    config, first = model.config, found[0]
    options = "".join(f", {key} {value}" for key, value in config.feature_map_options.items())
    return Recording(
        name=name,
        # A last piece, if there is one, is what was left of an unfinished character.
        tokens=[piece for piece, _ in zip(trained.tokenizer.stream(ids), ids, strict=False)],
        bits=[None, *(cost / math.log(2) for cost in costs)],
        rule=first.rule,
        feature_map=config.feature_map + options,
        normalization=first.normalization,
        attention=first.memory_normalization is not None,
        n_layers=len(found),
        blocks=[blocks[number] for number in layers],
    )


def _block(number: int, call: dict[str, Any]) -> RecordedBlock:
    rule: Rule = call["rule"]
    gates = {name: call[name] for name in (*rule.gate_names, *rule.logarithms) if name in call}
    found = coefficients_of(rule, gates, False, torch.float32)
    given = {name: call[name].float() for name in "qkv"}
    given |= {name: x for name, x in zip("aew", found, strict=True) if x is not None}
    arrays = {name: x[0].transpose(0, 1).cpu() for name, x in given.items()}
    if found[1] is not None and found[1] is found[2]:
        arrays["e"] = arrays["w"]
    if not all(bool(x.isfinite().all()) for x in arrays.values()):
        raise ValueError(f"layer {number} of this model computes numbers from this text that are not finite")
    return RecordedBlock(number, arrays, _looks_back(call))


def _looks_back(call: dict[str, Any]) -> tuple[float, ...]:
    """Return `RecordedBlock.back` of a call, judged by its first tokens: there is a number for every pair of them."""
    beginning: Any = {name: x[:, :BEGINNING] if isinstance(x, Tensor) else x for name, x in call.items()}
    read = attribute(**beginning)
    parts = read.weights[0].abs() * read.stored[0].norm(dim=-1).unsqueeze(1)
    shares = parts / parts.sum(-1, keepdim=True).clamp(min=1e-30)
    return tuple(shares.tril(-2).amax(-1).mean(-1).tolist())


def replay_rule(arrays: Mapping[str, Tensor]) -> Rule:
    """Return a rule whose gates are the coefficients of a recorded block, by their names a, e and w."""
    return _replay_rule("".join(name for name in "aew" if name in arrays))


@cache
def _replay_rule(names: str) -> Rule:
    idle = {"a": 1.0, "e": 0.0, "w": 0.0}

    def step(W: Tensor, k: Tensor, v: Tensor, read: Read, a: Any = None, e: Any = None, w: Any = None) -> Tensor:
        W = W if a is None else a.unsqueeze(-1) * W
        change = v if w is None else w * v
        return W + outer(k, change if e is None else change - e * read(W, k))

    def coefficients(**gates: Tensor) -> Coefficients:
        return Coefficients(gates.get("a"), gates.get("e"), gates.get("w"))

    gates = tuple(Gate(name, idle[name], fades=name == "a") for name in names)
    return Rule("replay", "a recording", "a W - e (a W k) k + w v k", gates, step, coefficients)
