"""Check your own kernel against float64: the same as `fastweights verify MODULE:FUNCTION`, in Python.

This gated delta rule is right for whole sequences, but ignores the initial state.
"""

import torch

from fastweights.conformance.adapters import adapt
from fastweights.conformance.cases import CASES
from fastweights.conformance.judge import Bench
from fastweights.conformance.problem import RECURRENCES


def my_gated_delta_rule(q, k, v, g, beta, initial_state=None, output_final_state=False):
    """Compute it token by token, in fla's layouts."""
    S = q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3])
    outputs = []
    for t in range(q.shape[1]):
        S = S * g[:, t, :, None, None].exp()
        new = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], new)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * q.shape[3] ** -0.5, S))
    return torch.stack(outputs, 1), S


recurrence = RECURRENCES["gated_delta"]
function = adapt(my_gated_delta_rule, "fla", recurrence, {})
chosen = ("plain", "T = 1", "log decay -100", "initial state", "packed, some sequences empty")
for row in Bench(recurrence).judge(function, [case for case in CASES if case.name in chosen]):
    print(f"{row.case}: {row.verdict} {row.note}")
