// Four tokens of a chunk at a time, forwards and backwards.
//
// With the state W before the four, γ_t = a_1 ⋯ a_t and Γ[t, s] = a_{s+1} ⋯ a_t,
//
//     u_t = w_t v_t - e_t γ_t k_t W - Σ_{s<t} A[t, s] u_s       A[t, s] = e_t (k_t · Γ[t, s] k_s)
//     y_t = γ_t q_t W + Σ_{s<=t} S[t, s] u_s                    S[t, s] = q_t · Γ[t, s] k_s
//     W   = γ_4 W + Σ_s Γ[4, s] k_s u_s^T
//
// and backwards, with the gradient dW of the state after the four,
//
//     du_s = Γ[4, s] k_s dW + Σ_{t>=s} S[t, s] dy_t - Σ_{t>s} A[t, s] du_t
//     dW   = γ_4 dW + Σ_t γ_t q_t dy_t^T - Σ_t e_t γ_t k_t du_t^T
//
// For some columns of W, k_t W and q_t W are eight sums for each column. These stay in registers while the rows of W
// pass by in the first cache, once to be read and once to be changed. What four tokens have to do with each other is
// an eighth of the work that it is for chunks of 32 tokens.
#pragma once

#include "pairs.h"
#include "simd.h"

constexpr int kQuad = 4;
// Vectors of columns at once: as many as have room for their sums in the registers.
constexpr int kQuadVectors = kTileRows == 8 ? 2 : 1;

// Rows of the tokens of a chunk, D and M numbers long, which begin Dp and Mp numbers apart; those of q and k of elements
// E, which begin De elements apart, see pairs.h. Only rows of q, k, v and y may also be used where they lie, which need
// not be at the start of a vector.
template <class R, class E = R>
struct QuadRows {
  int64_t D, Dp, Mp, De = padded<E>(elements<E>(D));
  int64_t q_row = De, k_row = De, v_row = Mp, y_row = Mp;  // from one row to the next
  E *q, *k;
  R *v, *y, *u, *dy, *du;
  // With decays per key γ_t, γ_t q_t, γ_t k_t and Γ[4, s] k_s, which `relate` writes; otherwise nothing, q, k and k, the
  // last of them in pairs of rows, Dp apart, where elements are pairs.
  R* fade;
  E *q_read, *k_read, *k_kept;
  // W dy_t, dW u_t and W du_t at first; the gradients of q and k, and nothing, in the end.
  R *dq, *dk, *dread;
};

// How the state fades in a chunk: `a` has the decays of its tokens, rows with PerKey, and `last` takes for each four of
// them by how much the pass over the state multiplies it. That need not be γ_4: where it `waits`, the state is kept as it
// was before it faded, which saves that product, and fades at the end of the chunk. Until then `start` is by how much it
// has to be faded where it is read. One decay for all rows waits as long as what is written in the meantime, divided by
// `start`, has room.
//
// Logarithms near 0 have more digits than decays near 1: products of rounded decays drift from the exponential of their
// sum, and so does a state that is rounded every four tokens. Where the sum of a chunk's logarithms, `exponent`, is
// small, the state therefore waits, with decays per key, too, and fades by `total`, the exponential. `exponent` may be
// null.
template <class R>
struct Fading {
  const R *a, *exponent, *total;
  R *start, *last;
  bool waits;
};

// The factors in the equations above, for tokens `first` to `first + 4` of a chunk.
template <class R, class E = R>
class Quad {
 public:
  // `e` and `w` are those of the chunk, `final` says whether these are its last four.
  template <bool PerKey>
  [[gnu::noinline]] void relate(const QuadRows<R, E>& rows, int64_t first, const Fading<R>& fading, const R* e,
                                const R* w, bool final) {
    const int64_t width = PerKey ? rows.Dp : 1;
    R* last = fading.last + first / kQuad * width;
    V sums[kQuad * kQuad] = {};
    for (int64_t d = 0; d < elements<E>(rows.D); d += L) {
      Elements keys[kQuad];
      V fade = V{} + R(1), start = fade, rest = fade;
      if (PerKey && fading.exponent && first) start = vector(fading.start + d);
#pragma GCC unroll 4
      for (int t = 0; t < kQuad; ++t) {
        const Elements query = loose(rows.q + (first + t) * rows.q_row + d);
        const Elements key = loose(rows.k + (first + t) * rows.k_row + d);
        if constexpr (PerKey) {
          const int64_t at = (first + t) * rows.Dp + d;
          const V decay = vector(fading.a + at);
#pragma GCC unroll 4
          for (int s = 0; s < t; ++s) keys[s] *= decay;
          fade *= decay;
          vector(rows.fade + at) = fade;
          vector(rows.q_read + at) = start * fade * query;
          vector(rows.k_read + at) = start * fade * key;
        }
        keys[t] = key;
        add_products(t, query, key, keys, sums);
      }
      if constexpr (PerKey) {
        V now = fade;
        if (fading.exponent) {
          const auto little = fades_little(vector(fading.exponent + d));
          const V one = V{} + R(1);
          start = little ? start * fade : one;
          vector(fading.start + d) = start;
          if (final) now = little ? vector(fading.total + d) : fade;
          else rest = one / start, now = little ? one : fade;
        }
#pragma GCC unroll 4
        for (int t = 0; t < kQuad; ++t) vector(rows.k_kept + (first + t) * rows.Dp + d) = rest * keys[t];
        vector(last + d) = now;
      }
    }
    Row products[kQuad], by_keys[kQuad], reach[kQuad], decays, erased;
    sum_up(sums, products, by_keys);
    R fade = 1, start = 1, rest = 1;
    const bool little = !PerKey && fading.exponent && fades_little(*fading.exponent);
    if (!PerKey && fading.waits && first) start = *fading.start;
#pragma GCC unroll 4
    for (int t = 0; t < kQuad; ++t) {
      erased[t] = e[first + t];
      decays[t] = PerKey ? R(1) : fading.a[first + t];
      fade *= decays[t];
      fade_[t] = start * fade;
      taken_[t] = erased[t] * fade_[t];
      written_[t] = w[first + t];
#pragma GCC unroll 4
      for (int s = 0; s <= t; ++s) {
        reach[t][s] = s == t ? R(1) : decays[t] * reach[t - 1][s];
        scores_[t][s] = reach[t][s] * products[t][s];
        if (s < t) system_[t][s] = erased[t] * reach[t][s] * by_keys[t][s];
      }
    }
    if (!fading.waits) {
      // Backwards, where the state does not wait.
      std::memcpy(products_, products, sizeof products), std::memcpy(keys_, by_keys, sizeof by_keys);
      std::memcpy(reach_, reach, sizeof reach), std::memcpy(decay_, decays, sizeof decays);
      std::memcpy(erased_, erased, sizeof erased);
    }
    if (!PerKey) {
      const R faded = fade_[kQuad - 1];
      const bool waits = fading.waits && !final && (little || has_room(faded));
      *fading.start = waits ? faded : R(1);
      *last = waits ? R(1) : little && final ? *fading.total : faded;
      if (waits) rest = 1 / faded;
    }
#pragma GCC unroll 4
    for (int t = 0; t < kQuad; ++t) kept_[t] = rest * reach[kQuad - 1][t];
  }

  // For `Vectors` vectors of columns from `column` on: y of the four tokens or, with `Again`, what they write, u; and
  // the state after them from W, unless `after` is null. Row d of W is multiplied by last[d * step], all of which are 1
  // without `Fades`; rows are `row` apart.
  template <bool Erases, int Vectors, bool Again, bool Fades>
  [[gnu::noinline]] void pass(const QuadRows<R, E>& rows, int64_t first, int64_t column, const R* last, int64_t step,
                              const R* W, R* after, int64_t row) const {
    const int64_t D = rows.D, q_row = rows.q_row, k_row = rows.k_row;
    V by_k[kQuad][Vectors] = {}, by_q[kQuad][Vectors] = {};
    const E *q = rows.q_read + first * q_row, *k = rows.k_read + first * k_row;
    const R* from = W;
    for (int64_t d = 0; (Erases || !Again) && d < D; d += kDepth, ++q, ++k, from += kDepth * row) {
      Elements state[Vectors];
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; ++j) {
        state[j] = elements_of<E>(vector(from + j * L), vector(from + (kDepth - 1) * row + j * L));
      }
#pragma GCC unroll 4
      for (int t = 0; t < kQuad; ++t) {
#pragma GCC unroll 2
        for (int j = 0; j < Vectors; ++j) {
          if (Erases) add_product(by_k[t][j], k[t * k_row], state[j]);
          if (!Again) add_product(by_q[t][j], q[t * q_row], state[j]);
        }
      }
    }
    V u[kQuad][Vectors];
#pragma GCC unroll 4
    for (int t = 0; t < kQuad; ++t) {
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; ++j) {
        const int64_t at = column + j * L;
        u[t][j] = written_[t] * loose(rows.v + (first + t) * rows.v_row + at);
        settle(u[t][j]);
        if (Erases) {
          subtract(u[t][j], taken_[t], by_k[t][j]);
#pragma GCC unroll 4
          for (int s = 0; s < t; ++s) subtract(u[t][j], system_[t][s], u[s][j]);
        }
        if (Again) {
          vector(rows.u + (first + t) * rows.Mp + at) = u[t][j];
          continue;
        }
        V y = fade_[t] * by_q[t][j];
        settle(y);
#pragma GCC unroll 4
        for (int s = 0; s <= t; ++s) add(y, scores_[t][s], u[s][j]);
        loose(rows.y + (first + t) * rows.y_row + at) = y;
      }
    }
    if (!after) return;
#pragma GCC unroll 4
    for (int t = 0; t < kQuad; ++t) {
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; ++j) u[t][j] = scaled(kept_[t], u[t][j]);
    }
    Elements written[kQuad / kDepth][Vectors];
#pragma GCC unroll 4
    for (int t = 0; t < kQuad / kDepth; ++t) {
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; ++j) {
        written[t][j] = elements_of<E>(u[t * kDepth][j], u[t * kDepth + kDepth - 1][j]);
      }
    }
    const int64_t kept_row = kDepth == 1 ? k_row : rows.Dp;
    k = rows.k_kept + first / kDepth * kept_row;
    for (int64_t d = 0; d < D; ++d, ++k, last += step, W += row, after += row) {
      V state[Vectors];
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; ++j) state[j] = Fades ? scaled(*last, vector(W + j * L)) : vector(W + j * L);
#pragma GCC unroll 4
      for (int t = 0; t < kQuad / kDepth; ++t) {
#pragma GCC unroll 2
        for (int j = 0; j < Vectors; ++j) {
          add_product(state[j], k[t * kept_row], written[t][j]);
          settle(state[j]);
        }
      }
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; ++j) vector(after + j * L) = state[j];
    }
  }

  // The same backwards: du, and dW from after the four tokens to before them.
  template <bool Erases, int Vectors>
  [[gnu::noinline]] void pass_back(const QuadRows<R, E>& rows, int64_t first, int64_t column, const R* last,
                                   int64_t step, R* dW, int64_t row) const {
    const int64_t D = rows.D, Dp = rows.Dp, Mp = rows.Mp;
    V du[kQuad][Vectors] = {}, dy[kQuad][Vectors];
    const R *k = rows.k_kept + first * Dp, *from = dW;
    for (int64_t d = 0; d < D; ++d, ++k, from += row) {
      V state[Vectors];
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; ++j) state[j] = vector(from + j * L);
#pragma GCC unroll 4
      for (int t = 0; t < kQuad; ++t) {
#pragma GCC unroll 2
        for (int j = 0; j < Vectors; ++j) du[t][j] += k[t * Dp] * state[j];
      }
    }
#pragma GCC unroll 4
    for (int s = kQuad - 1; s >= 0; --s) {
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; ++j) {
        const int64_t at = (first + s) * Mp + column + j * L;
        dy[s][j] = vector(rows.dy + at);
        V x = scaled(kept_[s], du[s][j]);
#pragma GCC unroll 4
        for (int t = s; t < kQuad; ++t) add(x, scores_[t][s], dy[t][j]);
#pragma GCC unroll 4
        for (int t = s + 1; Erases && t < kQuad; ++t) subtract(x, system_[t][s], du[t][j]);
        du[s][j] = x;
        vector(rows.du + at) = x;
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < kQuad; ++t) {
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; ++j) {
        dy[t][j] = scaled(fade_[t], dy[t][j]);
        if (Erases) du[t][j] = scaled(taken_[t], du[t][j]);
      }
    }
    const R* q = rows.q_read + first * Dp;
    k = rows.k_read + first * Dp;
    for (int64_t d = 0; d < D; ++d, ++q, ++k, last += step, dW += row) {
      V state[Vectors];
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; ++j) state[j] = scaled(*last, vector(dW + j * L));
#pragma GCC unroll 4
      for (int t = 0; t < kQuad; ++t) {
#pragma GCC unroll 2
        for (int j = 0; j < Vectors; ++j) {
          add(state[j], q[t * Dp], dy[t][j]);
          if (Erases) subtract(state[j], k[t * Dp], du[t][j]);
        }
      }
#pragma GCC unroll 2
      for (int j = 0; j < Vectors; ++j) vector(dW + j * L) = state[j];
    }
  }

  // Adds W dy_t, dW u_t and W du_t of some columns to dq, dk and dread, and the products of the rows of W and dW to
  // dlast, from W and dW transposed, whose rows are Dp apart.
  template <bool Erases>
  [[gnu::noinline]] static void contract(const QuadRows<R, E>& rows, int64_t first, int64_t column, int64_t columns,
                                         const R* W, const R* dW, R* dlast) {
    const int64_t Dp = rows.Dp, Mp = rows.Mp, begin = first * Mp + column;
    for (int64_t d = 0; d < rows.D; d += L) {
      const int64_t at = first * Dp + d;
      V by_dy[kQuad], by_u[kQuad], by_du[kQuad], sum = vector(dlast + d);
#pragma GCC unroll 4
      for (int t = 0; t < kQuad; ++t) {
        by_dy[t] = vector(rows.dq + at + t * Dp), by_u[t] = vector(rows.dk + at + t * Dp);
        if (Erases) by_du[t] = vector(rows.dread + at + t * Dp);
      }
      const R *dy = rows.dy + begin, *u = rows.u + begin, *du = rows.du + begin;
      for (int64_t m = 0; m < columns; ++m, ++dy, ++u, ++du) {
        const V state = vector(W + m * Dp + d), dstate = vector(dW + m * Dp + d);
        sum += state * dstate;
#pragma GCC unroll 4
        for (int t = 0; t < kQuad; ++t) {
          by_dy[t] += dy[t * Mp] * state;
          by_u[t] += u[t * Mp] * dstate;
          if (Erases) by_du[t] += du[t * Mp] * state;
        }
      }
#pragma GCC unroll 4
      for (int t = 0; t < kQuad; ++t) {
        vector(rows.dq + at + t * Dp) = by_dy[t], vector(rows.dk + at + t * Dp) = by_u[t];
        if (Erases) vector(rows.dread + at + t * Dp) = by_du[t];
      }
      vector(dlast + d) = sum;
    }
  }

 private:
  using V = typename Simd<R>::Vector;
  using Elements = typename Simd<E>::Vector;
  static constexpr int L = Simd<R>::lanes, kDepth = Simd<E>::depth;
  typedef R Row[kQuad];
  // S and A; γ_t, w_t, e_t γ_t and Γ[4, t].
  Row scores_[kQuad], system_[kQuad], fade_, written_, taken_, kept_;
  // For gradients: q_t · k_s and k_t · k_s, weighted with decays per key, when Γ and γ are 1 here; Γ; a_t and e_t.
  Row products_[kQuad], keys_[kQuad], reach_[kQuad], decay_, erased_;

  template <class X>
  static auto fades_little(const X& exponent) {
    return (exponent > R(-0.5)) & (exponent < R(0.5));
  }

  // Whether what is divided by x is far from overflowing.
  static bool has_room(R x) {
    const R size = x < 0 ? -x : x;
    return size > R(1e-4) && size < R(1e4);
  }

  static void add(V& x, R factor, const V& y) {
    x += factor * y;
    settle(x);
  }

  static void subtract(V& x, R factor, const V& y) {
    x -= factor * y;
    settle(x);
  }

  static V scaled(R factor, const V& x) {
    V y = factor * x;
    settle(y);
    return y;
  }

  // x_t z_s for s <= t and y_t z_s for s < t, of which the latter are put where the former have none.
  static void add_products(int t, const Elements& x, const Elements& y, const Elements* z, V* sums) {
#pragma GCC unroll 4
    for (int s = 0; s <= t; ++s) ::add_products(sums[t * kQuad + s], x, z[s]);
#pragma GCC unroll 4
    for (int s = 0; s < t; ++s) ::add_products(sums[s * kQuad + t], y, z[s]);
  }

  static void sum_up(V* sums, Row* xz, Row* yz) {
    alignas(kVectorBytes) R all[kQuad][kQuad];
#pragma GCC unroll 8
    for (int i = 0; i < kQuad * kQuad; i += L) vector(&all[0][0] + i) = sums_of<R>(sums + i);
#pragma GCC unroll 4
    for (int t = 0; t < kQuad; ++t) {
#pragma GCC unroll 4
      for (int s = 0; s <= t; ++s) xz[t][s] = all[t][s], yz[t][s] = s < t ? all[s][t] : R(0);
    }
  }

  template <class>
  friend struct QuadGradients;
};
