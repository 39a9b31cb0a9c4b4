"""ONNX: exported models compute what PyTorch computes, and LinearAttention's own test cases what we compute."""

import logging
from importlib import import_module

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn
from typer.testing import CliRunner

import fastweights as fw
from fastweights.cli import app
from fastweights.models.language_model import LanguageModel, LanguageModelConfig
from fastweights.onnx.export import agreement, convert, export_onnx
from fastweights.ops.backends import BACKENDS

LIMIT = 1e-5


@pytest.fixture(autouse=True)
def _without_traces():
    """Keep pytest from collecting the thousands of lines that tracing logs."""
    logging.disable(logging.INFO)
    yield
    logging.disable(logging.NOTSET)


def node_cases():
    """Return LinearAttention's test cases of the package `onnx`: a node, its inputs and outputs, by name."""
    module, cases = import_module("onnx.backend.test.case.node.linear_attention"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "expect", lambda node, name, **case: cases.update({name: (node, case)}))
        for name, export in vars(module.LinearAttention).items():
            if name.startswith("export"):
                export.__func__()
    return cases


CASES = node_cases()


def test_there_are_14_node_cases():
    assert len(CASES) == 14


@pytest.mark.parametrize("name", CASES)
def test_node_cases_agree_with_ours(name):
    node, case = CASES[name]
    inputs, outputs = case["inputs"], case["outputs"]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    named = {name: torch.from_numpy(x) for name, x in zip([i for i in node.input if i], inputs, strict=True)}
    H, heads = attributes["q_num_heads"], attributes["kv_num_heads"]
    groups, dtype = H // heads, named["query"].dtype
    update_rule = attributes.get("update_rule", b"gated_delta").decode()
    rule = {"linear": "sum", "gated": "decay"}.get(update_rule, update_rule)

    def expanded(x):
        return x.float().unflatten(2, (heads, -1)).repeat_interleave(groups, 2)

    q, k, v = named["query"].float().unflatten(2, (H, -1)), expanded(named["key"]), expanded(named["value"])
    gates = {}
    if "decay" in named:
        decay = expanded(named["decay"])
        gates["log_decay"] = decay if decay.shape[-1] > 1 else decay.squeeze(-1)
    if "beta" in named:
        beta = named["beta"].float()
        gates["beta"] = (beta.expand(-1, -1, heads) if beta.shape[-1] == 1 else beta).repeat_interleave(groups, 2)
    past = named.get("past_state")
    state = None if past is None else fw.FastWeightState(past.float().repeat_interleave(groups, 1))
    scale = attributes.get("scale") or q.shape[-1] ** -0.5
    y, state = fw.fast_weight_memory(q * scale, k, v, rule=rule, state=state, **gates)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(y.flatten(2), torch.from_numpy(outputs[0]).float(), atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(
        state.W[:, ::groups], torch.from_numpy(outputs[1]).float(), atol=tolerance, rtol=tolerance
    )


class EveryKind(nn.Module):
    """Layers side by side: with decays, accumulators and a convolution in their states."""

    def __init__(self):
        super().__init__()
        forms = [("gated", "sum"), ("sum", "attention"), ("delta", "attention")]
        self.layers = nn.ModuleList(fw.FastWeightAttention(8, 2, rule=rule, normalization=n) for rule, n in forms)
        self.layers.append(fw.FastWeightAttention.recipe("kda", 8, 2))

        self.names = [list(layer(torch.randn(1, 1, 8))[1].tensors()) for layer in self.layers]

    def forward(self, x, past):
        given, outputs, states = iter(past), [], []
        for layer, names in zip(self.layers, self.names, strict=True):
            y, state = layer(x, fw.FastWeightState(**{name: next(given) for name in names}))
            outputs.append(y)
            states += state.tensors().values()
        return [torch.stack(outputs), *states]


@torch.no_grad()
def test_every_kind_of_layer_in_one_file():
    module = EveryKind().eval()
    past = [x for layer in module.layers for x in layer(torch.randn(3, 4, 8))[1].tensors().values()]
    inputs = {"x": ["batch", "length"], **{f"past.{i}": ["batch"] for i in range(len(past))}}
    outputs = ["y", *(f"present.{i}" for i in range(len(past)))]
    proto = convert(module, (torch.randn(3, 5, 8), past), inputs, outputs)
    kinds = [(node.domain, node.op_type) for node in proto.graph.node]
    # All but the delta rule under attention normalisation.
    assert kinds.count(("com.microsoft", "LinearAttention")) == 3 and kinds.count(("", "Scan")) == 1
    assert "onnx" not in BACKENDS and {layer.backend for layer in module.layers} == {"auto"}
    onnx.checker.check_model(proto)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    assert session.get_inputs()[0].shape == ["batch", "length", 8]
    for batch, length in ((2, 70), (1, 1)):
        x, past = torch.randn(batch, length, 8), [x[:batch] for x in past]
        expected = module(x, past)
        given = dict(zip(inputs, (x.numpy() for x in (x, *past)), strict=True))
        for name, found, right in zip(outputs, session.run(None, given), expected, strict=True):
            np.testing.assert_allclose(found, right.numpy(), atol=LIMIT, rtol=LIMIT, err_msg=name)


def language_model(**options):
    torch.manual_seed(0)
    options = {"d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 8, "dropout": 0.0, "init_std": 0.4, **options}
    return LanguageModel(LanguageModelConfig(vocab_size=30, **options)).eval()


def test_a_language_model_step_by_step(tmp_path):
    # Clusters of rare words and positions, which are counted in the state.
    model = language_model(rule="comba", cutoffs=(10, 20), positions="sinusoid", position_direction="forward")
    export_onnx(model, tmp_path / "step.onnx", step=True, operators="plain")
    errors = agreement(model, tmp_path / "step.onnx", step=True)
    assert list(errors) == ["log_probs", "present.0.W", "present.position"]
    assert max(errors.values()) < LIMIT and errors["present.position"] == 0


def test_the_standard_operator(tmp_path):
    model = language_model(rule="gated_delta")
    export_onnx(model, tmp_path / "model.onnx", operators="standard")
    proto = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(proto, full_check=True)
    assert [(entry.domain, entry.version) for entry in proto.opset_import] == [("", 27)]
    tokens, past = torch.randint(30, (2, 9)), torch.randn(2, 2, 8, 8)
    found = ReferenceEvaluator(proto).run(None, {"tokens": tokens.numpy(), "past.0.W": past.numpy()})
    with torch.no_grad():
        hidden, state = model(
            tokens, type(model(tokens)[1])([fw.FastWeightState(past)], torch.zeros(2, dtype=torch.long))
        )
    for a, b in zip(found, (model.softmax.log_prob(hidden), state.layers[0].W), strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), atol=LIMIT, rtol=LIMIT)


@pytest.mark.parametrize("way", ["forward", "step"])
@torch.no_grad()
def test_torch_export_takes_the_state_as_a_tree(way):
    class Step(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, token, state):
            return self.model.step(token, state)

    model = language_model(rule="gated_delta", normalization="attention")
    any_size, (B, T) = torch.export.Dim.DYNAMIC, (3, 5)
    tokens, (_, state) = torch.randint(30, (B, T)), model(torch.randint(30, (B, 4)))
    shapes = torch.export.ShapesCollection()
    tokens = tokens if way == "forward" else tokens[:, 0].clone()
    shapes[tokens] = dict.fromkeys(range(tokens.dim()), any_size)
    for x in (*state.layers[0].tensors().values(), state.position):
        shapes[x] = {0: any_size}
    module = model if way == "forward" else Step(model)
    exported = torch.export.export(module, (tokens, state), dynamic_shapes=shapes, strict=False).module()
    more, (_, before) = torch.randint(30, (2, 11)), model(torch.randint(30, (2, 70)))
    more = more if way == "forward" else more[:, 0]
    found, expected = exported(more, before), module(more, before)
    torch.testing.assert_close(found[0], expected[0])
    for a, b in zip(found[1].layers[0].tensors().values(), expected[1].layers[0].tensors().values(), strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(found[1].position, expected[1].position)


def test_what_cannot_be_exported_is_refused(tmp_path):
    for model, message in (
        (language_model(mixer="softmax"), "only mixer 'fast_weight'"),
        (language_model(positions="sinusoid"), "positions run backward"),
    ):
        with pytest.raises(ValueError, match=message):
            export_onnx(model, tmp_path / "model.onnx")
    with pytest.raises(ValueError, match="contrib, standard, plain"):
        export_onnx(language_model(), tmp_path / "model.onnx", operators="tensorrt")


def test_the_command(tmp_path, monkeypatch):
    small = language_model(rule="gated_delta")
    module = import_module("fastweights.commands.export")
    monkeypatch.setattr(module.LanguageRun, "load", lambda self, which: (small, None))

    def run(*arguments):
        return CliRunner(env={"COLUMNS": "200"}).invoke(
            app, ["export", "onnx", "demo", str(tmp_path / "x.onnx"), *arguments]
        )

    done = run("--step")
    assert done.exit_code == 0 and "Under ONNX Runtime it differs from PyTorch by" in done.output
    monkeypatch.setattr(module, "agreement", lambda *arguments, **options: {"log_probs": 1e-3})
    monkeypatch.setattr(module, "export_onnx", lambda *arguments, **options: None)
    assert run().exit_code == 1
    assert run("--checkpoint", "worst").exit_code == 2
