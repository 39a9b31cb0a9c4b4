"""What CONTRIBUTING promises: a rule, a map or a backend is added in one place, also from outside the package."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch

import fastweights as fw
from fastweights.feature_maps import FEATURE_MAPS
from fastweights.models.language_model import LanguageModel, LanguageModelConfig
from fastweights.ops import chunked, family
from fastweights.ops.backends import BACKENDS, EXECUTABLES
from fastweights.ops.features import MAPS, Features, MapFeatures
from fastweights.ops.rules import DECAY, RULES, Coefficients, outer
from fastweights.ops.spec import Backend, Refusal, mapping_first
from tests.ops.calls import random_call


@pytest.fixture
def clean():
    """Whatever a test registers is forgotten after it."""
    before = [(table, dict(table)) for table in (RULES, FEATURE_MAPS, MAPS, BACKENDS, EXECUTABLES)]
    yield
    for table, content in before:
        table.clear()
        table.update(content)


WRITE = fw.Gate("strength", idle=0.0)
KEEP = fw.Gate("retention", idle=1.0, per="key", bias=(1.0, 3.0))


def register_rules():
    """One rule of the family and one outside of it, both with gates of their own."""

    @fw.register_rule("scaled_sum", "a test", (WRITE,), lambda strength: Coefficients(write=strength))
    def scaled_sum(W, k, v, read, strength):
        """W + strength v ⊗ k."""
        return W + outer(k, strength * v)

    @fw.register_rule("channel_decay", "a test", (KEEP, WRITE))
    def channel_decay(W, k, v, read, retention, strength):
        """Diag(retention) W + strength v ⊗ k."""
        return retention.unsqueeze(-1) * W + outer(k, strength * v)


def test_a_rule_with_gates_of_new_names(clean):
    register_rules()
    call = random_call("sum", B=2, T=7, H=2, D=4, M=3)
    strength = torch.rand(2, 7, 2, dtype=torch.float64)
    wanted, _ = fw.fast_weight_memory(call.q, call.k, strength.unsqueeze(-1) * call.v, rule="sum")
    for backend in ("reference", "chunked", "cpu"):
        y, _ = fw.fast_weight_memory(call.q, call.k, call.v, rule="scaled_sum", strength=strength, backend=backend)
        torch.testing.assert_close(y, wanted)
    with pytest.raises(ValueError, match=r"rule 'scaled_sum' needs strength of shape \(2, 7, 2\), got None"):
        fw.fast_weight_memory(call.q, call.k, call.v, rule="scaled_sum")
    with pytest.raises(ValueError, match=r"rule 'sum' has no strength \(it takes no gates\)"):
        fw.fast_weight_memory(call.q, call.k, call.v, rule="sum", strength=strength)
    with pytest.raises(ValueError, match="unknown argument of fast_weight_memory 'strenght'; did you mean 'strength'"):
        fw.fast_weight_memory(call.q, call.k, call.v, rule="scaled_sum", strength=strength, strenght=strength)


def test_a_gate_for_each_key_channel(clean):
    register_rules()
    call = random_call("sum", B=2, T=6, H=2, D=4, M=3)
    keep, strength = torch.rand(2, 6, 2, 4, dtype=torch.float64), torch.rand(2, 6, 2, dtype=torch.float64)
    gates = {"retention": keep, "strength": strength}
    mask = torch.rand(2, 6) < 0.7
    y, state = fw.fast_weight_memory(call.q, call.k, call.v, rule="channel_decay", mask=mask, **gates)
    W = torch.zeros(2, 2, 4, 3, dtype=torch.float64)
    for t in range(6):
        now = keep[:, t, :, :, None] * W + outer(call.k[:, t], strength[:, t, :, None] * call.v[:, t])
        W = torch.where(mask[:, t, None, None, None], now, W)
        read = (call.q[:, t].unsqueeze(-2) @ W).squeeze(-2)
        torch.testing.assert_close(y[:, t], torch.where(mask[:, t, None, None], read, 0.0))
    torch.testing.assert_close(state.W, W)
    with pytest.raises(ValueError, match=r"retention must have shape \(B, T, H, D\) = \(2, 6, 2, 4\), got"):
        fw.fast_weight_memory(call.q, call.k, call.v, rule="channel_decay", retention=strength, strength=strength)


@pytest.mark.parametrize("T", [1, 37])
def test_a_coefficient_that_is_one_minus_a_decay(clean, T):
    """Where the decay comes as a logarithm, what is written is one minus the decay, not minus the logarithm."""

    @fw.register_rule("mixing", "a test", (DECAY,), lambda decay: Coefficients(decay=decay, write=1 - decay))
    def mixing(W, k, v, read, decay):
        """Decay W + (1 - decay) v ⊗ k."""
        return decay.unsqueeze(-1) * W + outer(k, (1 - decay) * v)

    call = random_call("sum", B=2, T=T, H=2, D=4, M=3)
    log_decay = torch.rand(2, T, 2, dtype=torch.float64).log()
    wanted = fw.fast_weight_memory(call.q, call.k, call.v, rule="mixing", decay=log_decay.exp(), backend="reference")
    for backend in ("reference", "chunked", "cpu"):
        for gates in ({"decay": log_decay.exp()}, {"log_decay": log_decay}):
            found = fw.fast_weight_memory(call.q, call.k, call.v, rule="mixing", backend=backend, **gates)
            torch.testing.assert_close(found[0], wanted[0])
            torch.testing.assert_close(found[1].W, wanted[1].W)


@pytest.mark.parametrize("error", [AssertionError, RuntimeError, ValueError])
def test_coefficients_that_take_nothing_but_tensors(clean, error):
    def coefficients(strength):
        if not isinstance(strength, torch.Tensor):
            raise error("strength is no tensor")
        return Coefficients(write=strength)

    @fw.register_rule("particular", "a test", (WRITE,), coefficients)
    def particular(W, k, v, read, strength):
        """W + strength v ⊗ k."""
        return W + outer(k, strength * v)

    call = random_call("sum", B=1, T=6, H=2, D=4, M=3)
    strength = torch.rand(1, 6, 2, dtype=torch.float64)
    for backend in ("reference", "chunked", "cpu"):
        y, _ = fw.fast_weight_memory(call.q, call.k, call.v, rule="particular", strength=strength, backend=backend)
        wanted, _ = fw.fast_weight_memory(call.q, call.k, strength[..., None] * call.v, rule="sum", backend=backend)
        torch.testing.assert_close(y, wanted)


def test_a_decay_that_is_computed_from_gates_per_head_and_per_key(clean):
    gates = (DECAY, fw.Gate("pace", idle=1.0, fades=True))

    @fw.register_rule("two_decays", "a test", gates, lambda decay, pace: Coefficients(decay=decay * pace))
    def two_decays(W, k, v, read, decay, pace):
        """Decay pace W + v ⊗ k."""
        return (decay * pace).unsqueeze(-1) * W + outer(k, v)

    call = random_call("sum", B=2, T=9, H=3, D=4, M=2)
    per_key, per_head = torch.rand(2, 9, 3, 4, dtype=torch.float64), torch.rand(2, 9, 3, dtype=torch.float64)
    decay = per_key * per_head.unsqueeze(-1)
    wanted, _ = fw.fast_weight_memory(call.q, call.k, call.v, rule="decay", decay=decay, backend="reference")
    for backend in ("reference", "chunked", "cpu"):
        for given in ({"decay": per_key, "pace": per_head}, {"log_decay": per_head.log(), "pace": per_key}):
            y, _ = fw.fast_weight_memory(call.q, call.k, call.v, rule="two_decays", backend=backend, **given)
            torch.testing.assert_close(y, wanted)


@pytest.mark.parametrize("T", [1, 9])
def test_a_decay_per_head_of_a_gate_per_key(clean, T):
    @fw.register_rule("slowest", "a test", (KEEP,), lambda retention: Coefficients(decay=retention.amax(-1, True)))
    def slowest(W, k, v, read, retention):
        """The largest retention of all, W + v ⊗ k."""
        return retention.amax(-1, True).unsqueeze(-1) * W + outer(k, v)

    call = random_call("sum", B=2, T=T, H=3, D=4, M=2)
    retention = torch.rand(2, T, 3, 4, dtype=torch.float64)
    for backend in ("reference", "chunked", "cpu"):
        wanted, _ = fw.fast_weight_memory(call.q, call.k, call.v, rule="decay", decay=retention.amax(-1))
        found, _ = fw.fast_weight_memory(call.q, call.k, call.v, rule="slowest", retention=retention, backend=backend)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("backend", ["reference", "chunked", "cpu"])
def test_what_is_erased_or_written_is_one_number_a_head(clean, backend):
    shared = fw.Gate("per_channel", idle=0.0, per="key")
    with pytest.raises(ValueError, match="rule 'rows' erases or writes by per_channel, a gate per key channel"):
        fw.register_rule("rows", "a test", (shared,), lambda per_channel: Coefficients(write=per_channel))(outer)

    @fw.register_rule("mixing", "a test", (DECAY,), lambda decay: Coefficients(decay=decay, write=1 - decay))
    def mixing(W, k, v, read, decay):
        """Decay W + (1 - decay) v ⊗ k."""
        return decay.unsqueeze(-1) * W + outer(k, (1 - decay) * v)

    # As many values as key channels: sizes fit that should not.
    call = random_call("decay per key", B=2, T=5, H=2, D=4, M=4)
    with pytest.raises(ValueError, match=r"decay must have .* = \(2, 5, 2\), as rule 'mixing' also erases or writes"):
        fw.fast_weight_memory(call.q, call.k, call.v, rule="mixing", backend=backend, **call.gates)


@pytest.mark.parametrize("T", [1, 7])
def test_a_copy_of_a_rule_that_is_in_no_table(T):
    rule = replace(RULES["comba"], name="unlisted")
    call = random_call("comba", B=2, T=T, H=2, D=4, M=3)
    for backend in ("reference", "chunked", "cpu"):
        found, wanted = (
            fw.fast_weight_memory(call.q, call.k, call.v, rule=rule, backend=backend, **call.gates)[0]
            for rule in (copy.deepcopy(rule), rule)
        )
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("rule", ["scaled_sum", "channel_decay"])
def test_layers_and_models_make_the_gates_of_a_new_rule(clean, rule):
    register_rules()
    layer = fw.FastWeightAttention(8, 2, rule=rule).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    whole, _ = layer(x)
    state, tokens = None, []
    for t in range(5):
        y, state = layer.step(x[:, t], state)
        tokens.append(y)
    torch.testing.assert_close(torch.stack(tokens, 1), whole)
    assert hasattr(layer, "retention_bias") == (rule == "channel_decay")
    for twin in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        torch.testing.assert_close(twin(x)[0], whole)
        assert twin.rule is layer.rule
    config = LanguageModelConfig(
        vocab_size=11, d_model=8, n_heads=2, n_layers=1, d_ff=8, mixer="fast_weight", rule=rule
    )
    assert LanguageModel(config).loss(torch.randint(11, (1, 6)), torch.randint(11, (1, 6)))[0].isfinite().all()


def test_a_feature_map(clean):
    @fw.register_feature_map("squares")
    class Squares(fw.FeatureMap):
        """x², positive; dim = d_key."""

        kernel = "square"

        def map(self, x):
            return x.square()

    layer = fw.FastWeightAttention(8, 2, feature_map="squares")
    assert isinstance(layer.feature_map, Squares)
    assert layer(torch.randn(1, 4, 8))[0].isfinite().all()
    assert fw.list_feature_maps()["squares"] == "x², positive; dim = d_key."
    # Kernels are asked for it by name, and what they compute is compared with the class.
    heads, *_ = layer.memory_inputs(torch.randn(1, 4, 8), None)
    assert heads["features"].description == Features.named("square", sum=True, logits=True)
    q, k, v = torch.randn(3, 2, 5, 2, 4, dtype=torch.float64)
    y, _ = fw.fast_weight_memory(q, k, v, rule="sum", features=Features.named("square"))
    torch.testing.assert_close(y, fw.fast_weight_memory(q.square(), k.square(), v, rule="sum")[0])


def test_a_map_made_of_another_is_not_taken_for_that(clean):
    @fw.register_feature_map("squared_elu")
    class SquaredELU(type(fw.feature_map("elu", 4))):
        """(ELU(x) + 1)²; dim = d_key."""

        def map(self, x):
            return super().map(x).square()

    class Squared:
        """A mixin, which replaces the map of the class after it."""

        def map(self, x):
            return super().map(x).square()

    @fw.register_feature_map("mixed_elu")
    class MixedELU(Squared, type(fw.feature_map("elu", 4))):
        """(ELU(x) + 1)²; dim = d_key."""

    q, k, v = torch.randn(3, 1, 3, 2, 4)
    expected = fw.linear_attention(*(fw.feature_map("elu", 4)(x).square() for x in (q, k)), v)
    for name in ("squared_elu", "mixed_elu"):
        found = fw.linear_attention(q, k, v, features=MapFeatures(fw.feature_map(name, 4)))
        torch.testing.assert_close(found, expected)


def test_a_backend(clean):
    asked = []

    def prepare(spec):
        asked.append(spec)
        if spec.rule.name != "delta":
            return Refusal("it runs the delta rule only")
        return family.executable(spec, chunked.recurrence)

    call = random_call("delta", "attention", B=2, T=7)
    call.run("auto")
    # Calls that ran before go to it, too.
    fw.register_backend(Backend("mine", "a test", mapping_first(prepare)), before="cpu")
    assert list(fw.list_backends()).index("mine") < list(fw.list_backends()).index("cpu")
    torch.testing.assert_close(call.run("mine"), call.run("reference"))
    torch.testing.assert_close(call.run("auto"), call.run("reference"))
    assert len(asked) == 2
    other = random_call("sum", B=2, T=7)
    with pytest.raises(ValueError, match=r"'mine' cannot run this call: it runs the delta rule only; these can: "):
        other.run("mine")
    torch.testing.assert_close(other.run("auto"), other.run("reference"))
    layer = fw.FastWeightAttention(8, 2, backend="mine")
    assert layer(torch.randn(1, 4, 8))[0].isfinite().all()


@pytest.mark.parametrize(
    "register",
    [
        lambda: fw.register_rule("delta", "a test")(lambda W, k, v, read: W),
        lambda: fw.register_feature_map("elu")(fw.FeatureMap),
        lambda: fw.register_backend(BACKENDS["cpu"]),
    ],
    ids=["rule", "map", "backend"],
)
def test_names_are_not_taken_twice(register):
    with pytest.raises(ValueError, match=r"there is a (rule|feature map|backend) .* already"):
        register()
