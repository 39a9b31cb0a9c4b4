"""Train one layer in several processes with DistributedDataParallel; every process sees its share of the data.

    torchrun --nproc-per-node 2 examples/ddp.py            # two CPU processes, or two GPUs if there are two

It prints how much the averaged gradients differ from those of the whole batch in one process: only by rounding.
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fastweights as fw


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return how badly the layer predicts the next vector of each sequence."""
    y, _ = model(x[:, :-1])
    return (y - x[:, 1:]).square().mean()


gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
dist.init_process_group("nccl" if gpu else "gloo")
rank, processes = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # the same weights and the same data in every process
layer = fw.FastWeightAttention(32, n_heads=4, feature_map="dpfp").to(device)
data = torch.randn(8 * processes, 50, 32, device=device)
whole = torch.autograd.grad(loss_of(layer, data), list(layer.parameters()))

model = DistributedDataParallel(layer, device_ids=[device.index] if gpu else None)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(20):
    loss = loss_of(model, data[rank::processes])
    optimizer.zero_grad()
    loss.backward()
    if step == 0:
        errors = [(p.grad - g).abs().max() / g.abs().max() for p, g in zip(layer.parameters(), whole, strict=True)]
    optimizer.step()
mean = loss.detach().clone()
dist.all_reduce(mean)
if rank == 0:
    print(f"{processes} processes: gradients differ from one process by {max(errors).item():.1e} of the largest entry")
    print(f"loss {mean.item() / processes:.3f} after 20 steps")
dist.destroy_process_group()
