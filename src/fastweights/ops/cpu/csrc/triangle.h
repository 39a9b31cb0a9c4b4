// Systems (I + A) x = y of a chunk, A strictly lower triangular, as matrix products: the inverses of the squares on the
// diagonal are small and soon computed, and everything else is a product.
#pragma once

#include "simd.h"

// The side of the squares on the diagonal: one or two vectors, whose rows the registers hold.
template <class R>
constexpr int64_t kSquare = Simd<R>::lanes < 8 ? 8 : Simd<R>::lanes;

// A, whose rows are `row` apart, and the inverses of the squares on the diagonal of I + A, row by row.
template <class R>
class Triangle {
 public:
  const R* A = nullptr;
  R* inverses = nullptr;  // kSquare elements for each row of A; there are rows for whole squares of both
  int64_t n = 0, row = 0;

  void invert() const {
    for (int64_t i = 0; i < n; i += kSquare<R>) invert_square(i);
  }

  // x = (I + A)^-1 y. Ruins y; both have `columns` columns and rows `stride` apart.
  void solve(int64_t columns, R* y, R* x, int64_t stride) const {
    for (int64_t i = 0; i < n; i += kSquare<R>) {
      const int64_t rows = std::min(n - i, kSquare<R>);
      R* rest = y + i * stride;
      if (i) multiply<R>(rows, columns, i, {A + i * row, row, 1}, x, stride, {rest, stride, rest, -1});
      const Operand<R> inverse{inverses + i * kSquare<R>, kSquare<R>, 1};
      multiply<R>(rows, columns, rows, inverse, rest, stride, {x + i * stride, stride}, Part::lower);
    }
  }

  // x = (I + A)^-T y, likewise.
  void solve_transposed(int64_t columns, R* y, R* x, int64_t stride) const {
    for (int64_t i = (n - 1) / kSquare<R> * kSquare<R>; i >= 0; i -= kSquare<R>) {
      const int64_t end = std::min(n, i + kSquare<R>), rows = end - i;
      R* rest = y + i * stride;
      const Operand<R> below{A + end * row + i, 1, row};
      if (end < n) multiply<R>(rows, columns, n - end, below, x + end * stride, stride, {rest, stride, rest, -1});
      const Operand<R> inverse{inverses + i * kSquare<R>, 1, kSquare<R>};
      multiply<R>(rows, columns, rows, inverse, rest, stride, {x + i * stride, stride}, Part::upper);
    }
  }

 private:
  // Row by row: when a row of the inverse is known, it is subtracted from all that follow. What comes of rows from n on,
  // which are of another chunk, nobody reads.
  [[gnu::noinline]] void invert_square(int64_t first) const {
    using V = typename Simd<R>::Vector;
    constexpr int S = kSquare<R>, L = Simd<R>::lanes;
    V rows[S][S / L] = {};
#pragma GCC unroll 16
    for (int t = 0; t < S; ++t) rows[t][t / L][t % L] = 1;
    const R* square = A + first * row + first;
#pragma GCC unroll 16
    for (int s = 0; s < S - 1; ++s) {
#pragma GCC unroll 16
      for (int t = s + 1; t < S; ++t) {
#pragma GCC unroll 2
        for (int j = 0; j < S / L; ++j) rows[t][j] -= square[t * row + s] * rows[s][j];
      }
    }
#pragma GCC unroll 16
    for (int t = 0; t < S; ++t) {
#pragma GCC unroll 2
      for (int j = 0; j < S / L; ++j) vector(inverses + (first + t) * S + j * L) = rows[t][j];
    }
  }
};
