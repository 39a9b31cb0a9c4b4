// The gradients of the queries, keys and gates of four tokens, from sums over columns that `Quad` left in rows.
#pragma once

#include <algorithm>

#include "quad.h"

// For the four tokens from `first` on.
template <class R>
struct QuadGradients {
  using V = typename Simd<R>::Vector;
  static constexpr int L = Simd<R>::lanes;
  using Row = R[kQuad];

  const Quad<R>& quad;
  const QuadRows<R>& rows;
  int64_t first, M;

  // Writes dq, dk, de and da; `dlast` has the products of the rows of W and dW.
  template <bool Erases>
  void per_head(const R* dlast, R* de, R* da) const {
    Row of_scores[kQuad], of_system[kQuad], of_reach[kQuad], dfade, dkept, read;
    multiply_columns(of_scores, of_system);
    multiply_keys<Erases>(dfade, dkept, read);
#pragma GCC unroll 4
    for (int t = 0; t < kQuad; ++t) {
      R of_erase = quad.fade_[t] * read[t];
      dfade[t] -= quad.erased_[t] * read[t];
#pragma GCC unroll 4
      for (int s = 0; s <= t; ++s) {
        of_reach[t][s] = quad.products_[t][s] * of_scores[t][s];
        of_scores[t][s] *= quad.reach_[t][s];
        if (s == t) continue;
        of_reach[t][s] -= quad.erased_[t] * quad.keys_[t][s] * of_system[t][s];
        of_erase += quad.reach_[t][s] * quad.keys_[t][s] * of_system[t][s];
        of_system[t][s] *= quad.erased_[t] * quad.reach_[t][s];
      }
      de[first + t] = -of_erase;
    }
    constexpr int end = kQuad - 1;
    for (int s = 0; s < end; ++s) of_reach[end][s] += dkept[s];
    V sums = {};
    for (int64_t d = 0; d < rows.D; d += L) sums += vector(dlast + d);
    dfade[end] += sum_of<R>(sums);
    // da_r = Σ_{s<r<=t} dΓ[t, s] (a_{r+1} ⋯ a_t) (a_{s+1} ⋯ a_{r-1}), and the same for γ.
#pragma GCC unroll 4
    for (int t = end; t >= 0; --t) {
      if (t < end) dfade[t] += quad.decay_[t + 1] * dfade[t + 1];
      R sum = t ? dfade[t] * quad.fade_[t - 1] : dfade[t];
#pragma GCC unroll 4
      for (int s = 0; s < t; ++s) {
        if (t < end) of_reach[t][s] += quad.decay_[t + 1] * of_reach[t + 1][s];
        sum += of_reach[t][s] * quad.reach_[t - 1][s];
      }
      da[first + t] = sum;
    }
    combine<Erases>(of_scores, of_system);
  }

  // The same with decays per key, of which `a` and `da` are rows.
  template <bool Erases>
  void per_key(const R* a, const R* dlast, R* de, R* da) const {
    Row of_scores[kQuad], of_system[kQuad];
    multiply_columns(of_scores, of_system);
    for (int t = 0; t < kQuad; ++t) {
      const int64_t row = (first + t) * rows.Dp;
      de[first + t] = Erases ? -dot(rows.D, rows.dread + row, rows.k_read + row) : R(0);
      for (int s = 0; s < t; ++s) {
        de[first + t] -= quad.keys_[t][s] * of_system[t][s];
        of_system[t][s] *= quad.erased_[t];
      }
    }
    const int64_t Dp = rows.Dp;
    for (int64_t d = 0; d < rows.D; d += L) {
      const int64_t at = first * Dp + d;
      // Γ[t, s] k_s, from the step before by a factor a_t. Products of decays, never quotients: decays of 0 are exact,
      // and small ones do no harm.
      V past[kQuad][kQuad], of_past[kQuad], of_fade = vector(dlast + d);
#pragma GCC unroll 4
      for (int t = 0; t < kQuad; ++t) {
#pragma GCC unroll 4
        for (int s = 0; s < t; ++s) past[t][s] = vector(a + at + t * Dp) * past[t - 1][s];
        past[t][t] = vector(rows.k + at + t * Dp);
        of_past[t] = vector(rows.dk + at + t * Dp);
      }
#pragma GCC unroll 4
      for (int t = kQuad - 1; t >= 0; --t) {
        const int64_t row = at + t * Dp;
        const V decay = vector(a + row), query = vector(rows.q + row), key = past[t][t], fade = vector(rows.fade + row);
        V of_q = vector(rows.dq + row), of_k = {};
        of_fade += query * of_q;
        of_q *= fade;
        if (Erases) {
          of_k = -quad.erased_[t] * vector(rows.dread + row);
          of_fade += key * of_k;
          of_k *= fade;
        }
        V of_decay = t ? of_fade * vector(rows.fade + row - Dp) : of_fade;
        of_fade *= decay;
#pragma GCC unroll 4
        for (int s = 0; s < t; ++s) {
          of_q += of_scores[t][s] * past[t][s];
          of_past[s] += of_scores[t][s] * query;
          if (Erases) {
            of_k -= of_system[t][s] * past[t][s];
            of_past[s] -= of_system[t][s] * key;
          }
          of_decay += of_past[s] * past[t - 1][s];
          of_past[s] *= decay;
        }
        vector(rows.dq + row) = of_q + of_scores[t][t] * key;
        vector(rows.dk + row) = of_past[t] + of_k + of_scores[t][t] * query;
        vector(da + row) = of_decay;
      }
    }
  }

 private:
  // dy_t · u_s and du_t · u_s.
  [[gnu::noinline]] void multiply_columns(Row* of_scores, Row* of_system) const {
    V sums[kQuad * kQuad] = {};
    for (int64_t m = 0; m < M; m += L) {
      V u[kQuad];
#pragma GCC unroll 4
      for (int t = 0; t < kQuad; ++t) {
        const int64_t at = (first + t) * rows.Mp + m;
        u[t] = vector(rows.u + at);
        Quad<R>::add_products(t, vector(rows.dy + at), vector(rows.du + at), u, sums);
      }
    }
    Quad<R>::sum_up(sums, of_scores, of_system);
  }

  // The gradients of γ_t by way of y and of Γ[4, t], and k_t W du_t.
  template <bool Erases>
  [[gnu::noinline]] void multiply_keys(R* dfade, R* dkept, R* read) const {
    V sums[kQuad * kQuad] = {};
    for (int64_t d = 0; d < rows.D; d += L) {
#pragma GCC unroll 4
      for (int t = 0; t < kQuad; ++t) {
        const int64_t at = (first + t) * rows.Dp + d;
        const V key = vector(rows.k + at);
        sums[t] += vector(rows.q + at) * vector(rows.dq + at);
        sums[kQuad + t] += key * vector(rows.dk + at);
        if (Erases) sums[2 * kQuad + t] += key * vector(rows.dread + at);
      }
    }
    alignas(kVectorBytes) R all[kQuad][kQuad];
#pragma GCC unroll 8
    for (int i = 0; i < kQuad * kQuad; i += L) vector(&all[0][0] + i) = sums_of<R>(sums + i);
    std::copy_n(all[0], kQuad, dfade);
    std::copy_n(all[1], kQuad, dkept);
    std::copy_n(all[2], kQuad, read);
  }

  template <bool Erases>
  [[gnu::noinline]] void combine(const Row* of_scores, const Row* of_system) const {
    for (int64_t d = 0; d < rows.D; d += L) {
      V q[kQuad], k[kQuad];
#pragma GCC unroll 4
      for (int t = 0; t < kQuad; ++t) {
        const int64_t at = (first + t) * rows.Dp + d;
        q[t] = vector(rows.q + at), k[t] = vector(rows.k + at);
      }
#pragma GCC unroll 4
      for (int t = 0; t < kQuad; ++t) {
        const int64_t at = (first + t) * rows.Dp + d;
        V dq = quad.fade_[t] * vector(rows.dq + at), dk = quad.kept_[t] * vector(rows.dk + at);
        if (Erases) dk -= quad.taken_[t] * vector(rows.dread + at);
#pragma GCC unroll 4
        for (int s = 0; s < kQuad; ++s) {
          if (s <= t) dq += of_scores[t][s] * k[s];
          if (s >= t) dk += of_scores[s][t] * q[s];
          if (Erases && s < t) dk -= of_system[t][s] * k[s];
          if (Erases && s > t) dk -= of_system[s][t] * k[s];
        }
        vector(rows.dq + at) = dq, vector(rows.dk + at) = dk;
      }
    }
  }
};
