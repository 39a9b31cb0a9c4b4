"""Compute the gradient of every sample of a batch at once with torch.func, as differentially private training does.

`vmap`, `grad`, `jvp` and `jacrev` work on the memory as on any function of PyTorch.
"""

import torch
from torch.func import functional_call, grad, vmap

import fastweights as fw

torch.manual_seed(0)
layer = fw.FastWeightAttention(16, n_heads=2, rule="delta", feature_map="dpfp")
parameters = {name: value.detach() for name, value in layer.named_parameters()}
x, target = torch.randn(6, 20, 16), torch.randn(6, 20, 16)


def loss_of(parameters: dict[str, torch.Tensor], x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss of one sample, x (T, d_model)."""
    y, _ = functional_call(layer, parameters, (x.unsqueeze(0),))
    return (y[0] - target).square().mean()


gradients = vmap(grad(loss_of), in_dims=(None, 0, 0))(parameters, x, target)
for name, gradient in gradients.items():
    print(f"{name}: {tuple(gradient.shape)}, one gradient per sample")

# The same, one sample after another.
for i in range(len(x)):
    alone = grad(loss_of)(parameters, x[i], target[i])
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient[i], alone[name])

# Clip each sample's gradient to a norm of 0.01 before the mean, as DP-SGD does before it adds noise.
norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients.values()]).norm(dim=0)
scale = (0.01 / norms).clamp(max=1.0)
clipped = {name: torch.einsum("b,b...->...", scale, gradient) / len(x) for name, gradient in gradients.items()}
total = torch.stack([gradient.norm() for gradient in clipped.values()]).norm()
print(f"norms of the samples {norms.min():.3f} to {norms.max():.3f}; of their clipped mean {total:.4f}")
