// The products within a chunk where every key channel has its own decays, and their gradients.
//
// Γ[t, s] k_s follows from the step before as a_t ∘ Γ[t-1, s] k_s: products of decays, never quotients, so that decays of
// 0 are exact and small ones do no harm.
#pragma once

#include <algorithm>

#include "simd.h"

// Steps and key channels of a chunk, and the lengths of a row of D and of C elements.
struct Sizes {
  int64_t n, D, Dp, Cp;
};

// products[t, s] = q_t · Γ[t, s] k_s and keys[t, s] = k_t · Γ[t, s] k_s for s <= t; what stands at s > t is not defined.
// Turns k_T from k_s to Γ[n, s] k_s; `below` is room for a square.
template <class R>
void decayed_products(const Sizes& size, const R* a, const R* q, const R* k, R* k_T, R* below, R* products, R* keys) {
  using V = typename Simd<R>::Vector;
  constexpr int L = Simd<R>::lanes;
  for (int64_t t = 0; t < size.n; ++t) {
    const R *at = a + t * size.Dp, *qt = q + t * size.Dp, *kt = k + t * size.Dp;
    R* earlier = below + t * size.Cp;
    std::fill(earlier, earlier + t, R(1));
    std::fill(earlier + t, earlier + size.Cp, R(0));
    for (int64_t s = 0; s <= t; s += L) {
      const V one = V{} + R(1);
      const auto fades = vector(earlier + s) != V{};
      V by_q[2] = {}, by_k[2] = {};
      for (int64_t d = 0; d < size.D; d += 2) {
#pragma GCC unroll 2
        for (int64_t i = 0; i < 2; ++i) {
          V& x = vector(k_T + (d + i) * size.Cp + s);
          x *= fades ? V{} + at[d + i] : one;
          by_q[i] += qt[d + i] * x;
          by_k[i] += kt[d + i] * x;
        }
      }
      vector(products + t * size.Cp + s) = by_q[0] + by_q[1];
      vector(keys + t * size.Cp + s) = by_k[0] + by_k[1];
    }
  }
}

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
      const R *of_scores = dscores + t * size.Cp, *of_system = dsystem + t * size.Cp;
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
