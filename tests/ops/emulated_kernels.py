"""The walks of docs/kernels.md in plain PyTorch: in float64, with roundings where the kernels round.

What the kernels lose in 16 bits is so seen without a GPU, also where it hangs on the rounding of a few numbers: the
gradient of the decay in `random_call("gated_delta", None, 2, 1, 1, 8, 8)` was off by 1.073 % here and on an H200.
"""

import torch
from torch.nn.functional import pad

from fastweights.ops.gpu.memory.variants import HALF, TF32, FusedWalk, configuration


def recurrence(q, k, v, a, e, w, W, packed, dtype):
    """As `ops.family.Recurrence` has it, with the configuration that the kernels would have."""
    (B, T, H, D), tied = q.shape, e is not None and e is w
    return Walk.apply(
        q, k, v, a, e, None if tied else w, W, dtype, tied, configuration(D, v.shape[3], q.dtype, B * H, T)
    )


def roundings(dtype, config):
    """Of operands of products, and of what is kept for the way back."""
    if config.precision == HALF:
        return [lambda x: x.to(dtype).double()] * 2
    if config.precision == TF32:
        # Cut off, which is the most that a chip may lose.
        return lambda x: (x.float().view(torch.int32) & -8192).view(torch.float32).double(), lambda x: x
    return [lambda x: x] * 2


def reach_and_fade(a):
    """Γ[t, s] and γ_t of decays (..., C)."""
    later = torch.ones(a.shape[-1], a.shape[-1]).tril(-1) > 0
    return a.unsqueeze(-1).where(later, 1.0).cumprod(-2).tril(), a.cumprod(-1)


class Walk(torch.autograd.Function):
    """There and back, a chunk at a time; names are those of docs/kernels.md."""

    @staticmethod
    def forward(ctx, q, k, v, a, e, w, W, dtype, tied, config):
        T, C = q.shape[1], config.chunk

        def chunks(x, filler=0.0):
            x = x.double().transpose(1, 2)
            return pad(x, (0, 0) * (x.dim() - 3) + (0, -T % C), value=filler).unflatten(2, (-1, C)).unbind(2)

        one = torch.ones_like(q[..., 0])
        fades, erases = chunks(one if a is None else a, 1.0), chunks(0 * one if e is None else e)
        writes = erases if tied else chunks(one if w is None else w)
        ctx.kinds = [None if x is None else x.dtype for x in (q, k, v, a, e, w, W)]
        R, keep = roundings(q.dtype, config)
        ctx.how, ctx.kept = (T, chunks, tied, R, tied and isinstance(config, FusedWalk) and config.prefetch), []
        W, found = W.double(), []
        for Q, K, V, a_, *gates in zip(*map(chunks, (q, k, v)), fades, erases, writes, strict=True):
            (G, fade), (e_, w_) = reach_and_fade(a_), (x.unsqueeze(-1) for x in gates)
            A = (K @ K.mT).tril(-1) * G
            Z = R(torch.linalg.solve(torch.eye(C, dtype=A.dtype) + A * e_.mT, A))
            recalled = fade.unsqueeze(-1) * (K @ R(W))
            B, H = (0 * V, V - recalled) if tied else (w_ * V, -recalled)
            E = H - Z @ R(e_ * H + B)
            U = B + e_ * E
            ctx.kept.append((Q, K, V, a_, e_, w_, Z, keep(W), keep(E)))
            found.append(fade.unsqueeze(-1) * (Q @ R(W)) + R((Q @ K.mT).tril() * G) @ R(U))
            W = fade[..., -1:, None] * W + K.mT @ R(G[..., -1, :, None] * U)
        return torch.cat(found, 2)[:, :, :T].transpose(1, 2).to(dtype), W.to(ctx.kinds[6])

    @staticmethod
    def backward(ctx, dy, dW):
        T, chunks, tied, R, diagonal = ctx.how
        dW, found = dW.double(), []
        for dY, (Q, K, V, a_, e_, w_, Z, W, E) in zip(chunks(dy)[::-1], ctx.kept[::-1], strict=True):
            G, fade = reach_and_fade(a_)
            last = torch.arange(a_.shape[-1]) == a_.shape[-1] - 1
            dU = R((Q @ K.mT).tril() * G).mT @ R(dY) + G[..., -1, :, None] * (K @ R(dW))
            dR = dU - Z.mT @ R(e_ * dU)
            U = R(e_ * E if tied else w_ * V + e_ * E)
            if diagonal:
                pairs = R(dR) @ R(E).mT
                dA, recalled, de = (e_ * pairs * e_.mT).tril(-1), e_ * (R(dR) @ R(W).mT), pairs.diagonal(0, -2, -1)
            else:
                rest = R(e_ * dR)
                dA, recalled, de = (rest @ U.mT).tril(-1), rest @ R(W).mT, (dR * E).sum(-1)
            read, written, dP = R(dY) @ R(W).mT, U @ R(dW).mT, R(dY) @ U.mT
            dG = (dP * (Q @ K.mT)).tril() - dA * (K @ K.mT) + last.unsqueeze(-1) * (written * K).sum(-1).unsqueeze(-2)
            dfade = (read * Q - recalled * K).sum(-1) + last * (dW * W).sum((-1, -2)).unsqueeze(-1)
            with torch.enable_grad():
                decay = a_.detach().requires_grad_()
                (da,) = torch.autograd.grad(reach_and_fade(decay), decay, (dG, dfade))
            dP, dA, fade = R(dP * G), R(dA * G), fade.unsqueeze(-1)
            dQ = fade * read + dP @ K
            dK = G[..., -1, :, None] * written + dP.mT @ Q - (dA + dA.mT) @ K - fade * recalled
            found.append((dQ, dK, (e_ if tied else w_) * dR, da, de, (dR * V).sum(-1)))
            dW = fade[..., -1:, :] * dW + Q.mT @ R(fade * dY) - K.mT @ R(fade * e_ * dR)
        grads = [torch.cat(x[::-1], 2)[:, :, :T].transpose(1, 2) for x in zip(*found, strict=True)]
        grads = [None if kind is None else x.to(kind) for x, kind in zip(grads, ctx.kinds[:6], strict=True)]
        return *grads, dW.to(ctx.kinds[6]), None, None, None
