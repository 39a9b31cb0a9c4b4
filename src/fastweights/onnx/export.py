"""Write a language model as an ONNX file: tokens and the state go in, log probabilities and the new state come out."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import fastweights
from fastweights.common.files import write_atomically
from fastweights.common.tables import look_up
from fastweights.models.language_model import LanguageModel, LanguageModelState
from fastweights.onnx.memory import traced
from fastweights.ops.state import FastWeightState, State

# What the memory becomes, and the domain of its operator; None for operators that every runtime has.
OPERATORS = {"contrib": "com.microsoft", "standard": "", "plain": None}
# The first version of ONNX's operators that has LinearAttention.
STANDARD_OPSET = 27


class _Exported(nn.Module):
    """A model as it is exported. Where it does not count positions, the state is that of its layers alone."""

    def __init__(self, model: LanguageModel, step: bool) -> None:
        super().__init__()
        self.model, self.step = model, step
        self.counts = model.config.positions != "none"
        self.fields = [list(layer.tensors()) for layer in self.empty(1).layers]

    def forward(self, tokens: Tensor, past: list[Tensor]) -> list[Tensor]:
        """Return log p, then the state, tensor by tensor."""
        state = self.state(past, tokens.shape[0])
        if self.step:
            log_p, state = self.model.step(tokens, state)
        else:
            hidden, state = self.model(tokens, state)
            log_p = self.model.softmax.log_prob(hidden)
        return [log_p, *self.tensors(state)]

    def names(self) -> list[str]:
        """Return the names of the state's tensors."""
        names = [f"{i}.{name}" for i, fields in enumerate(self.fields) for name in fields]
        return [*names, "position"] if self.counts else names

    def tensors(self, state: LanguageModelState) -> list[Tensor]:
        """Return the state's tensors in the order of their names."""
        layers = [x for layer in state.layers for x in layer.tensors().values()]
        return [*layers, state.position] if self.counts else layers

    def state(self, tensors: list[Tensor], batch: int) -> LanguageModelState:
        """Return the state from its tensors."""
        position = tensors[-1] if self.counts else torch.zeros(batch, dtype=torch.int64)
        given = iter(tensors)
        layers: list[State] = [FastWeightState(**{name: next(given) for name in fields}) for fields in self.fields]
        return LanguageModelState(layers, position)

    def empty(self, batch: int) -> LanguageModelState:
        """Return the state before the first token."""
        layers: list[State] = []
        for block in self.model.blocks:
            mixer: Any = block.mixer
            D, H = mixer.feature_map.dim, mixer.n_heads
            z = torch.zeros(batch, H, D) if mixer.memory_normalization else None
            recent = None if mixer.conv is None else torch.zeros(batch, mixer.conv.taps - 1, mixer.conv.channels)
            layers.append(FastWeightState(torch.zeros(batch, H, D, mixer.d_value), z, recent))
        return LanguageModelState(layers, torch.zeros(batch, dtype=torch.int64))


def export_onnx(model: LanguageModel, file: Path | str, *, step: bool = False, operators: str = "contrib") -> None:
    """Write a model to an ONNX file.

    Its inputs are `tokens` (batch, length), or with `step` (batch,), and the state as `past.LAYER.NAME`; its outputs
    `log_probs` (batch, length, words), or with `step` (batch, words), and the state as `present.LAYER.NAME`. Batch and
    length may be any. A state of zeros is that before the first token.

    Args:
        model: a language model with fast weights.
        file: where to write.
        step: whether it takes one token instead of any number.
        operators: "contrib" for ONNX Runtime's LinearAttention, "standard" for that of ONNX from opset 27 on, "plain"
            for a Scan of older operators. Rules that LinearAttention does not have become a Scan in any case.

    Raises:
        ValueError: the model has no state of constant size.
    """
    look_up(OPERATORS, operators, "operators")
    if model.config.mixer != "fast_weight":
        raise ValueError(
            f"mixer {model.config.mixer!r} keeps past inputs; only mixer 'fast_weight', whose state has one size for "
            "texts of any length, is exported"
        )
    if model.config.positions == "sinusoid" and model.config.position_direction == "backward":
        raise ValueError(
            "positions run backward from the end of a window, so that no state can be continued; train with positions "
            "= 'none' or position_direction = 'forward'"
        )
    exported = _Exported(model.eval(), step)
    # Sizes that are no others, so that nothing is taken for a constant.
    tokens = torch.zeros((5,) if step else (5, 7), dtype=torch.int64)
    past = exported.tensors(exported.empty(5))
    names = exported.names()
    proto = convert(
        exported,
        (tokens, past),
        {"tokens": ["batch"] if step else ["batch", "length"], **{f"past.{name}": ["batch"] for name in names}},
        ["log_probs", *(f"present.{name}" for name in names)],
        operators,
    )
    proto.doc_string = "One token" if step else "Any number of tokens"
    write_atomically(Path(file), proto.SerializeToString())


def convert(
    module: nn.Module,
    arguments: tuple[Any, ...],
    inputs: Mapping[str, Sequence[str]],
    outputs: Sequence[str],
    operators: str = "contrib",
) -> Any:
    """Return any module with fast weights as an ONNX `ModelProto`.

    Args:
        module: in evaluation mode.
        arguments: what it is called with as an example, tensors or trees of tensors such as states. Sizes that may be
            any must be at least 2 here.
        inputs: names of these tensors in their order, each with names of its first axes, which may have any size.
        outputs: names of what it returns.
        operators: see `export_onnx`.
    """
    domain = look_up(OPERATORS, operators, "operators")
    # A view would be exported with the sizes of what it is a view of.
    arguments = pytree.tree_map(torch.clone, arguments)
    shapes: Any = torch.export.ShapesCollection()
    for x, axes in zip(pytree.tree_leaves(arguments), inputs.values(), strict=True):
        shapes[x] = dict.fromkeys(range(len(axes)), torch.export.Dim.DYNAMIC)
    with torch.no_grad(), _quietly(), traced(module, None if domain is None else OPERATORS["contrib"]):
        program = torch.export.export(module, arguments, dynamic_shapes=shapes, strict=False)
        made = torch.onnx.export(program, dynamo=True, verbose=False, input_names=list(inputs), output_names=outputs)
    assert made is not None
    proto = made.model_proto
    _name_sizes(proto, inputs)
    if operators == "standard":
        proto = _standard(proto)
    proto.producer_name, proto.producer_version = "fastweights", fastweights.__version__
    return proto


def _name_sizes(proto: Any, inputs: Mapping[str, Sequence[str]]) -> None:
    """Call the sizes that may be any what they are."""
    wanted = {
        size.dim_param: name
        for value in proto.graph.input
        for size, name in zip(value.type.tensor_type.shape.dim, inputs[value.name], strict=False)
    }
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param in wanted:
                size.dim_param = wanted[size.dim_param]


def _standard(proto: Any) -> Any:
    """Return the same in the first opset that has LinearAttention, with that."""
    from onnx import version_converter

    # Before the domain is changed: the converter knows nothing of an operator older than itself.
    proto = version_converter.convert_version(proto, STANDARD_OPSET)
    for node in proto.graph.node:
        if node.op_type == "LinearAttention":
            node.domain = ""
    for entry in [entry for entry in proto.opset_import if entry.domain == OPERATORS["contrib"]]:
        proto.opset_import.remove(entry)
    return proto


def agreement(model: LanguageModel, file: Path | str, *, step: bool = False, seed: int = 0) -> dict[str, float]:
    """Compare a file under ONNX Runtime with the model in PyTorch, and return the largest error by output.

    Random tokens are read from an empty state, and more from the state that they leave. An error is the largest
    difference over the largest number of PyTorch's.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    exported, generator = _Exported(model.eval(), step), torch.Generator().manual_seed(seed)
    inputs, outputs = ([x.name for x in those] for those in (session.get_inputs(), session.get_outputs()))
    ours = theirs = exported.tensors(exported.empty(2))
    worst: dict[str, float] = dict.fromkeys(outputs, 0.0)
    for length in (1, 1, 1) if step else (70, 1, 9):
        tokens = torch.randint(model.config.vocab_size, (2,) if step else (2, length), generator=generator)
        with torch.no_grad():
            expected = exported(tokens, ours)
        given = dict(zip(inputs, (x.numpy() for x in (tokens, *theirs)), strict=True))
        found = [torch.from_numpy(x) for x in session.run(None, given)]
        for name, a, b in zip(outputs, found, expected, strict=True):
            worst[name] = max(worst[name], ((a - b).abs().max() / b.abs().max().clamp(min=1e-6)).item())
        ours, theirs = expected[1:], found[1:]
    return worst


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep what PyTorch's exporter says to its developers from users."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
