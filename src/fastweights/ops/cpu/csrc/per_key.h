// The gradients within a few tokens where every key channel has its own decays.
//
// Γ[t, s] k_s follows from the step before as a_t ∘ Γ[t-1, s] k_s: products of decays, never quotients, so that decays
// of 0 are exact and small ones do no harm.
#pragma once

#include <algorithm>

#include "simd.h"

// Steps and key channels, and the lengths of a row of D elements and of one of steps.
struct Sizes {
  int64_t n, D, Dp, row;
};

// Backwards in time: from the gradients of γ_t q_t (dq), γ_t e_t k_t (-dread), Γ[n, s] k_s (dk) and γ_n (dlast), and of
// products (dscores) and e_t keys (-dsystem), to those of q, k and the decays. `e` may be null; `past` is room for a row
// of every pair of steps.
template <class R>
void decayed_gradients(const Sizes& size, const R* a, const R* q, const R* k, const R* e, const R* fade, const R* dlast,
                       const R* dscores, const R* dsystem, const R* dread, R* past, R* dq, R* dk, R* da) {
  using V = typename Simd<R>::Vector;
  constexpr int L = Simd<R>::lanes;
  const int64_t n = size.n, D = size.D, Dp = size.Dp;
  // Γ[t, s] k_s
  const auto pair = [&](int64_t t, int64_t s) { return past + (t * (t + 1) / 2 + s) * Dp; };
  for (int64_t t = 0; t < n; ++t) {
    for (int64_t s = 0; s < t; ++s) hadamard(D, a + t * Dp, pair(t - 1, s), pair(t, s));
    std::copy_n(k + t * Dp, Dp, pair(t, t));
  }
  for (int64_t j = 0; j < D; j += L) {
    V of_fade = vector(dlast + j);
    for (int64_t t = n - 1; t >= 0; --t) {
      const int64_t row = t * Dp + j;
      const R *of_scores = dscores + t * size.row, *of_system = dsystem + t * size.row;
      const V at = vector(a + row), qt = vector(q + row), kt = vector(k + row);
      V of_q = vector(dq + row), of_k = {};
      of_fade += qt * of_q;
      of_q *= vector(fade + row);
      if (e) {
        of_k = -e[t] * vector(dread + row);
        of_fade += kt * of_k;
        of_k *= vector(fade + row);
      }
      V of_a = t ? of_fade * vector(fade + row - Dp) : of_fade;
      of_fade *= at;
      for (int64_t s = 0; s < t; ++s) {
        const V now = vector(pair(t, s) + j);
        V& of_past = vector(dk + s * Dp + j);
        of_q += of_scores[s] * now;
        of_past += of_scores[s] * qt;
        if (e) {
          of_k -= of_system[s] * now;
          of_past -= of_system[s] * kt;
        }
        of_a += of_past * vector(pair(t - 1, s) + j);
        of_past *= at;
      }
      vector(dq + row) = of_q + of_scores[t] * kt;
      vector(dk + row) += of_k + of_scores[t] * qt;
      vector(da + row) = of_a;
    }
  }
}
