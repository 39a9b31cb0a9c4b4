"""`patch()`: models of transformers give the same with our operators as without, and keep packed documents apart."""

import copy
import json
import pickle
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from typer.testing import CliRunner

from fastweights.cli import app
from fastweights.ops.cpu import products
from fastweights.ops.fused.linear import linear

transformers = pytest.importorskip("transformers")

from fastweights.compat import linear_layers  # noqa: E402
from fastweights.compat.transformers import LINEAR_LAYERS, MODELS, SLOTS, patch  # noqa: E402

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GATED_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 16,
}
PER_CHANNEL = {
    "linear_num_heads": 2,
    "linear_head_dim": 12,
    "kv_lora_rank": 8,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_layer_types": ["dense", "sparse"],
}
CONFIGURATIONS = {
    "qwen3_next": ("qwen3_next", GATED_DELTA),
    "qwen3_5": ("qwen3_5_text", GATED_DELTA),
    "qwen3_5_moe": ("qwen3_5_moe_text", GATED_DELTA),
    "olmo_hybrid": ("olmo_hybrid", {**GATED_DELTA, "linear_num_key_heads": 4}),
    "kimi_linear": ("kimi_linear", PER_CHANNEL),
}
# Models that are too large to be built for this: their linear-attention layers alone.
LAYERS = {
    "qwen4_exp": ("Qwen4ExpTextConfig", "Qwen4ExpTextGatedDeltaNet", GATED_DELTA),
    "glm5_next": (
        "Glm5NextTextConfig",
        "Glm5NextTextLinearAttention",
        {**PER_CHANNEL, "q_lora_rank": 8, "qk_rope_head_dim": 0, "head_dim": 0},
    ),
    "bailing_hybrid": ("BailingHybridConfig", "BailingHybridDeltaAttention", PER_CHANNEL),
}


# What is bound of each model.
BOUND = {*SLOTS, *([] if products.unavailable() else [LINEAR_LAYERS])}


def installed(names):
    return [name for name in names if find_spec(f"transformers.models.{name}")]


def enlarged(module):
    """Give weights a size at which gates and nonlinearities matter; 0.02, the usual one, is nearly linear."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1 and "A_log" not in name:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            elif "dt_bias" in name or "A_log" in name:
                parameter.uniform_(-1, 1)
    return module.eval()


@pytest.fixture(scope="module")
def models():
    made = {}

    def get(name):
        if name not in made:
            kind, sizes = CONFIGURATIONS[name]
            config = transformers.AutoConfig.for_model(kind, **SIZES | sizes)
            made[name] = enlarged(transformers.AutoModelForCausalLM.from_config(config))
        return made[name]

    return get


@pytest.fixture
def patched():
    with patch() as bound:
        yield bound


def ids(*shape):
    return torch.randint(3, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(0))


def close(x, y, tolerance=1e-5):
    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance * max(1.0, y.abs().max().item()))


def logits_and_gradients(model, **inputs):
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    return output.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", installed(CONFIGURATIONS))
def test_logits_gradients_and_search_are_those_of_the_fallback(name, models, monkeypatch):
    # Products as small as these would be left to PyTorch.
    monkeypatch.setattr(products, "pays", lambda *sizes: True)
    model, x = models(name), ids(2, 70)
    padded = x.clone()
    mask = torch.ones_like(x)
    mask[1, :9] = 0
    padded[1, :9] = SIZES["pad_token_id"]
    searches = [{"num_beams": 1}, {"num_beams": 3}]

    def everything():
        found = [model.generate(padded, attention_mask=mask, max_new_tokens=6, **search) for search in searches]
        first = model(x[:, :40])
        second = model(x[:, 40:69], past_key_values=first.past_key_values)
        third = model(x[:, 69:], past_key_values=second.past_key_values)
        parts = torch.cat([part.logits for part in (first, second, third)], 1)
        logits, gradients = logits_and_gradients(model, input_ids=padded, attention_mask=mask, labels=x)
        return found, parts, logits, gradients

    found, parts, logits, gradients = everything()
    with patch(name) as bound:
        assert bound.models == [name] and {binding.what for binding in bound.bindings} == BOUND
        found_here, parts_here, logits_here, gradients_here = everything()
        close(parts_here, model(x).logits)
    close(parts_here, parts)
    close(logits_here, logits)
    assert gradients_here.keys() == gradients.keys()
    for parameter, gradient in gradients.items():
        close(gradients_here[parameter], gradient)
    for here, there in zip(found_here, found, strict=True):
        assert torch.equal(here, there)


def layer_of(name):
    configuration, layer, sizes = LAYERS[name]
    module = import_module(f"transformers.models.{name}.modeling_{name}")
    small = {
        **SIZES,
        **sizes,
        "layer_types": ["linear_attention"],
        "num_hidden_layers": 1,
        "mlp_layer_types": ["dense"],
    }
    config = getattr(import_module(f"transformers.models.{name}.configuration_{name}"), configuration)(**small)
    return enlarged(getattr(module, layer)(config, 0))


@pytest.mark.parametrize("name", installed(LAYERS))
def test_layers_of_other_models_agree_with_their_fallback(name):
    layer = layer_of(name)
    x = torch.randn(2, 70, SIZES["hidden_size"], generator=torch.Generator().manual_seed(0), requires_grad=True)
    outputs = []
    for bind in (False, True):
        bound = patch(name) if bind else None
        y = layer(x)
        outputs.append([y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
        if bound:
            bound.undo()
    for there, here in zip(*outputs, strict=True):
        close(here, there)


PACKINGS = pytest.mark.parametrize("packing", ["cu_seq_lens_q", "seq_idx"])
LENGTHS = [13, 2, 1, 30, 24]


def packed_as(packing):
    """Return what says that documents of these lengths are packed."""
    if packing == "seq_idx":
        return {"seq_idx": torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).int()[None]}
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}


@torch.no_grad()
@pytest.mark.parametrize("name", installed(LAYERS))
@PACKINGS
def test_packed_documents_stay_apart_in_layers_of_other_models(name, packing, patched):
    layer, documents = layer_of(name), torch.randn(1, sum(LENGTHS), SIZES["hidden_size"]).split(LENGTHS, 1)
    whole = layer(torch.cat(documents, 1), **packed_as(packing))
    alone = torch.cat([layer(document) for document in documents], 1)
    assert (whole - alone).norm() < 1e-6 * alone.norm()


@pytest.mark.parametrize("name", installed(CONFIGURATIONS))
@PACKINGS
def test_packed_documents_stay_apart(name, packing, models, patched):
    model, documents = models(name), [ids(1, length) for length in LENGTHS]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    packed = torch.cat(documents, 1)
    whole = model(packed, position_ids=positions, use_cache=False, **packed_as(packing)).logits
    alone = torch.cat([model(document).logits for document in documents], 1)
    assert (whole - alone).norm() < 1e-6 * alone.norm()
    # What is not said to be packed is one text.
    assert (model(packed).logits - alone).abs().max() > 1e-2


def test_gradients_of_packed_documents_are_the_sum_of_theirs(models, patched):
    model, lengths = models("qwen3_next"), [20, 3, 12]
    documents = [ids(1, length) for length in lengths]
    labels = torch.cat([torch.cat([torch.tensor([[-100]]), document[:, 1:]], 1) for document in documents], 1)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = {"input_ids": torch.cat(documents, 1), "position_ids": positions, "labels": labels}
    _, together = logits_and_gradients(model, **packed, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, use_cache=False)
    model.zero_grad()
    for document in documents:
        n = document.shape[1] - 1
        (model(document, labels=document).loss * n / (sum(lengths) - len(lengths))).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            close(together[name], parameter.grad, 2e-6)


@torch.no_grad()
def test_sixteen_bits_cost_no_more_than_in_the_fallback(models):
    model, x = models("qwen3_5"), ids(1, 60)
    exact = model(x).logits
    model.bfloat16()
    try:
        there = model(x).logits.float()
        with patch():
            here = model(x).logits.float()
    finally:
        # The module's other tests use it too, in float32: weights are made anew.
        enlarged(model.float())
    assert (here - exact).norm() < 1.2 * (there - exact).norm()


def test_layers_are_compiled_as_one_graph(models, patched):
    layer = models("qwen3_5").model.layers[0].linear_attn
    x = torch.randn(1, 33, SIZES["hidden_size"])
    bounds = torch.tensor([0, 5, 33], dtype=torch.int32)
    # Both need one graph; "aot_eager" also traces its backward pass, which takes twice as long.
    for packing, backend in (({}, "aot_eager"), ({"cu_seq_lens_q": bounds}, "eager")):
        outputs = []
        for module in (layer, torch.compile(layer, fullgraph=True, backend=backend)):
            y = module(x, **packing)
            outputs.append([y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))])
        for there, here in zip(*outputs, strict=True):
            close(here, there)
    torch.compiler.reset()


def test_everything_is_bound_reported_and_undone():
    module = import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    original = module.torch_chunk_gated_delta_rule
    with patch() as bound:
        assert bound.models == installed(MODELS)
        assert module.torch_chunk_gated_delta_rule is not original
        assert "qwen3_next" in str(bound) and "torch_chunk_gated_delta_rule" in str(bound)
        with patch("qwen3_next") as again:
            assert not again.bindings
        assert module.torch_chunk_gated_delta_rule is not original
    assert module.torch_chunk_gated_delta_rule is original
    assert "nothing is bound" in str(bound)


@pytest.mark.skipif(products.unavailable() is not None, reason=f"{products.unavailable()}")
@torch.no_grad()
def test_linear_layers_are_bound_at_the_first_call_and_released(models, monkeypatch):
    calls = []
    monkeypatch.setattr(linear_layers, "linear", lambda *tensors: calls.append(tensors) or linear(*tensors))
    model, other = models("qwen3_5"), models("olmo_hybrid")
    layers = [layer for layer in model.modules() if type(layer) is torch.nn.Linear]
    with patch("qwen3_5"):
        model(ids(1, 5))
        assert len(calls) == len(layers) and all("forward" in vars(layer) for layer in layers)
        other(ids(1, 5))
        # Copies compute with their own weights.
        for another in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            another.lm_head.weight.zero_()
            assert not another(ids(1, 5)).logits.any()
        # What somebody else has bound since then stays.
        theirs = layers[0].forward = layers[0].forward.__call__
    assert vars(layers[0]).pop("forward") is theirs
    calls.clear()
    model(ids(1, 5))
    assert not calls and not any("forward" in vars(layer) for layer in layers)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
def test_gradients_through_checkpoints(models, patched):
    model, x = models("qwen3_5"), ids(2, 30)
    _, gradients = logits_and_gradients(model.train(), input_ids=x, labels=x, use_cache=False)
    model.gradient_checkpointing_enable()
    try:
        _, checkpointed = logits_and_gradients(model, input_ids=x, labels=x, use_cache=False)
    finally:
        model.eval().gradient_checkpointing_disable()
    for name, gradient in gradients.items():
        close(checkpointed[name], gradient)


def test_half_a_model_is_not_bound(monkeypatch):
    module = import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    original = module.torch_chunk_gated_delta_rule
    monkeypatch.delattr(module, "causal_conv1d_fn")
    with pytest.raises(RuntimeError, match=r"no convolution over a sequence.*nothing was bound"):
        patch("olmo_hybrid", "qwen3_next")
    assert module.torch_chunk_gated_delta_rule is original


def test_unknown_models_are_refused():
    with pytest.raises(ValueError, match=r"patch\(\) knows qwen3_next.*'qwen3'"):
        patch("qwen3")


def test_the_benchmark_measures_all_three_ways(tmp_path):
    out = tmp_path / "record.json"
    command = ["bench", "transformers", "--models", "qwen3.5-256", "--length", "8", "--repeats", "1", "--out", str(out)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert [row["what"] for row in rows] == ["prefill", "training step", "decoding"]
    assert all(min(row["fallback_ms"], row["fastweights_ms"], row["nothing_ms"]) > 0 for row in rows)
    # Everything is as it was.
    module = import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    assert module.causal_conv1d_fn.__module__ == module.__name__
