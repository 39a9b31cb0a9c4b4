"""Register an update rule, a feature map and a backend from outside the package, and use them by name.

A rule that fits W = a W - e (a W k) k^T + w v k^T gives (a, e, w) as its coefficients, and every backend runs it: the
GPU kernels, the C++ code and the chunked form, each with its backward pass.
"""

import torch

import fastweights as fw
from fastweights.ops import chunked, family
from fastweights.ops.rules import Coefficients, outer
from fastweights.ops.spec import Backend, Refusal, mapping_first

ERASE, WRITE = fw.Gate("erase", idle=0.0), fw.Gate("write", idle=0.0)


@fw.register_rule(
    "two_gates",
    "an example",
    gates=(ERASE, WRITE),
    coefficients=lambda erase, write: Coefficients(erase=erase, write=write),
)
def two_gates(W, k, v, read, erase, write):
    """W - erase (W k) ⊗ k + write v ⊗ k: the delta rule with one gate for erasing and one for writing."""
    return W + outer(k, write * v - erase * read(W, k))


@fw.register_feature_map("squared_relu")
class SquaredReLU(fw.FeatureMap):
    """relu(x)², dim = d_key."""

    def map(self, x):
        return x.relu().square()


def prepare(spec):
    """Return what runs a call of this description, or a reason why this backend does not."""
    if reason := family.outside(spec.rule):
        return Refusal(reason)
    return family.executable(spec, chunked.recurrence)


fw.register_backend(Backend("mine", "the chunked form under another name", mapping_first(prepare)))

torch.manual_seed(0)
layer = fw.FastWeightAttention(32, n_heads=4, rule="two_gates", feature_map="squared_relu").double()
x = torch.randn(2, 40, 32, dtype=torch.float64)
whole, _ = layer(x)

state, parts = None, []
for part in x.split([7, 20, 13], dim=1):
    y, state = layer(part, state)
    parts.append(y)
print(f"whole sequence and segments differ by {(torch.cat(parts, 1) - whole).abs().max():.1e}")

for backend in fw.list_backends():
    layer.backend = backend
    try:
        y, _ = layer(x)
        print(f"backend {backend}: differs by {(y - whole).abs().max():.1e}")
    except ValueError as error:
        print(error)
