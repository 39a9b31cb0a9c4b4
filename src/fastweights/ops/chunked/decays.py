"""How decays weigh the products within a chunk: none, one a head, or one a key channel; for `ops.chunked`.

A chunk has C steps, Γ[t, s] = a_{s+1} ⋯ a_t and γ_t = a_1 ⋯ a_t, all of them one number, or one for each key channel.
Products of decays are never quotients of longer products: decays may be 0, and a quotient of small numbers overflows.
With `log` the a are natural logarithms, and products are exponentials of sums.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

Gradients = tuple[list[Tensor], Tensor, Tensor | None]
# The gradients of γ_t and of Γ[C, t] by key channel, (..., C, D) each.
Ends = tuple[Tensor, Tensor] | None


class NoDecay:
    """Γ and γ are 1."""

    def faded(self, x: Tensor) -> Tensor:
        """Compute γ_t x_t."""
        return x

    def left(self, x: Tensor) -> Tensor:
        """Compute Γ[C, t] x_t."""
        return x

    def end(self, W: Tensor, at: slice) -> Tensor:
        """Compute γ_C W for the states of the chunks `at`."""
        return W

    def products(self, k: Tensor, *rows: Tensor) -> list[Tensor]:
        """Return x_t Γ[t, s] k_s for s <= t, 0 above the diagonal, for each x of `rows`."""
        return [(x @ k.mT).tril_() for x in rows]

    def gradients(self, k: Tensor, rows: list[Tensor], dproducts: list[Tensor], ends: Ends) -> Gradients:
        """Return the gradients of each of `rows`, of k and of a, from those of what `products` returned and `ends`."""
        lower = [d.tril() for d in dproducts]
        dk = total(d.mT @ x for x, d in zip(rows, lower, strict=True))
        return [d @ k for d in lower], dk, None


class HeadDecay(NoDecay):
    """One decay a head: a (..., C)."""

    def __init__(self, a: Tensor, log: bool) -> None:
        self.log, C = log, a.shape[-1]
        ones = torch.ones(C, C + 1, dtype=torch.bool, device=a.device)
        # Column 0 belongs to the state before the chunk: γ.
        spread = torch.where(ones.tril(), a.unsqueeze(-1), 0 if log else 1)
        products = spread.cumsum(-2).exp_() if log else spread.cumprod(-2)
        self.span = products.masked_fill(~ones.tril(1), 0)
        self.reach, self.fade = self.span[..., 1:], self.span[..., :1]

    def faded(self, x: Tensor) -> Tensor:
        return self.fade * x

    def left(self, x: Tensor) -> Tensor:
        return self.reach[..., -1, :, None] * x

    def end(self, W: Tensor, at: slice) -> Tensor:
        return self.fade[at, :, -1:] * W

    def products(self, k: Tensor, *rows: Tensor) -> list[Tensor]:
        return [(x @ k.mT).mul_(self.reach) for x in rows]

    def gradients(self, k: Tensor, rows: list[Tensor], dproducts: list[Tensor], ends: Ends) -> Gradients:
        assert ends is not None
        dfade, dleft = ends
        dreach = total((x @ k.mT).mul_(d) for x, d in zip(rows, dproducts, strict=True))
        dreach[..., -1, :] += dleft.sum(-1)
        dspan = torch.cat([dfade.sum(-1, keepdim=True), dreach], -1)
        drows, dk, _ = super().gradients(k, rows, [d * self.reach for d in dproducts], None)
        return drows, dk, self._gradient(dspan)

    def _gradient(self, dspan: Tensor) -> Tensor:
        """Return the gradient of a from that of span[t, s] = a_{s+1} ⋯ a_t, without dividing by any a.

        da_r = sum over s < r <= t of dspan[t, s] (a_{r+1} ⋯ a_t) (a_{s+1} ⋯ a_{r-1}).
        """
        if self.log:
            later = (dspan * self.span).flip(-2).cumsum(-2).flip(-2)
            return later[..., :-1].tril().sum(-1)
        later = self.reach.mT @ dspan
        earlier = pad(self.span[..., :-1, :], (0, 0, 1, 0))
        earlier[..., 0, 0] = 1
        return (later * earlier).sum(-1)


class KeyDecay(NoDecay):
    """One decay a key channel: a (..., C, D).

    Products across the middle m of a stretch of time are x_t Γ[t, m] · Γ[m, s] k_s, for all t in its second half and s
    in its first half one matrix product. Stretches of 2, 4, 8, ... steps together have every pair of steps once, and
    what multiplies x and k for a stretch follows from what does for its halves:

        before[t] = the product of decays from the start of the stretch to t
        after[s]  = the product of those past s to its end
    """

    def __init__(self, a: Tensor, log: bool) -> None:
        self.log, self.length = log, a.shape[-2]
        before = _padded(a, 0 if log else 1)
        after = torch.full_like(before, 0 if log else 1)
        self.levels: list[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]] = []
        while (half := 1 << len(self.levels)) < before.shape[-2]:
            b, s = _halves(before, half), _halves(after, half)
            self.levels.append((b, s))
            before = _joined(b[0], self._times(b[1], b[0][..., -1:, :]))
            after = _joined(self._times(s[0], b[1][..., -1:, :]), s[1])
        self.before, self.after = (self._factor(x)[..., : self.length, :] for x in (before, after))

    def _times(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y if self.log else x * y

    def _factor(self, x: Tensor) -> Tensor:
        return x.exp() if self.log else x

    def faded(self, x: Tensor) -> Tensor:
        return self.before * x

    def left(self, x: Tensor) -> Tensor:
        return self.after * x

    def end(self, W: Tensor, at: slice) -> Tensor:
        return self.before[at, :, -1].unsqueeze(-1) * W

    def products(self, k: Tensor, *rows: Tensor) -> list[Tensor]:
        k, *rows_ = (_padded(x) for x in (k, *rows))
        results = [torch.diag_embed((x * k).sum(-1)) for x in rows_]
        for b, s in self.levels:
            half = b[0].shape[-2]
            keys = _halves(k, half)[0] * self._factor(s[0])
            later = self._factor(b[1])
            for x, result in zip(rows_, results, strict=True):
                diagonal_blocks(result, 2 * half)[..., half:, :half] = (_halves(x, half)[1] * later) @ keys.mT
        return [x[..., : self.length, : self.length] for x in results]

    def gradients(self, k: Tensor, rows: list[Tensor], dproducts: list[Tensor], ends: Ends) -> Gradients:
        assert ends is not None
        if self.log:
            # Of the logarithms.
            ends = ends[0] * self.before, ends[1] * self.after
        dbefore, dafter, k, *rows = (_padded(x) for x in (*ends, k, *rows))
        more = k.shape[-2] - self.length
        dproducts = [pad(d, (0, more, 0, more)) for d in dproducts]
        diagonals = [d.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) for d in dproducts]
        drows = [d * k for d in diagonals]
        dk = total(d * x for d, x in zip(diagonals, rows, strict=True))
        for b, s in reversed(self.levels):
            half = b[0].shape[-2]
            # From the gradients of a stretch's factors to those of its halves'.
            first_b, second_b = (x.clone() for x in _halves(dbefore, half))
            first_s, second_s = (x.clone() for x in _halves(dafter, half))
            in_first = (second_b if self.log else second_b * b[1]).sum(-2)
            in_second = (first_s if self.log else first_s * s[0]).sum(-2)
            if not self.log:
                second_b *= b[0][..., -1:, :]
                first_s *= b[1][..., -1:, :]
            first_b[..., -1, :] += in_first
            second_b[..., -1, :] += in_second
            # And what the products across its middle add.
            later, earlier = self._factor(b[1]), self._factor(s[0])
            keys = _halves(k, half)[0]
            for x, d, dx in zip(rows, dproducts, drows, strict=True):
                queries, block = _halves(x, half)[1], diagonal_blocks(d, 2 * half)[..., half:, :half]
                of_later, of_earlier = block @ (keys * earlier), block.mT @ (queries * later)
                _halves(dx, half)[1].add_(of_later * later)
                _halves(dk, half)[0].add_(of_earlier * earlier)
                second_b += of_later * queries * (later if self.log else 1)
                first_s += of_earlier * keys * (earlier if self.log else 1)
            dbefore, dafter = _joined(first_b, second_b), _joined(first_s, second_s)
        past = slice(self.length)
        return [x[..., past, :] for x in drows], dk[..., past, :], dbefore[..., past, :]


def decay_of(a: Tensor | None, log: bool) -> NoDecay:
    """Return what fits the decays of chunks: None, (..., H, C) or (..., H, C, D)."""
    if a is None:
        return NoDecay()
    return HeadDecay(a, log) if a.dim() == 3 else KeyDecay(a, log)


def total(terms: Iterator[Tensor]) -> Tensor:
    """Return the sum of tensors, in the memory of the first."""
    result = next(terms)
    for term in terms:
        result += term
    return result


def diagonal_blocks(x: Tensor, width: int) -> Tensor:
    """View (..., C / width, width, width) of the blocks on the diagonal of x (..., C, C)."""
    count = x.shape[-1] // width
    blocks = x.unflatten(-1, (count, width)).unflatten(-3, (count, width))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _padded(x: Tensor, value: float = 0.0) -> Tensor:
    """Return x (..., C, D) with rows of `value` up to a power of two."""
    return pad(x, (0, 0, 0, (1 << (x.shape[-2] - 1).bit_length()) - x.shape[-2]), value=value)


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """View the first and the second halves (..., C / 2 half, half, D) of the stretches of x (..., C, D)."""
    first, second = x.unflatten(-2, (-1, 2, half)).unbind(-3)
    return first, second


def _joined(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack([first, second], -3).flatten(-4, -2)
