// Γ of a chunk with one decay for each step, and the squares that it weighs: how queries and keys of the chunk relate.
#pragma once

#include "simd.h"

template <class R>
struct Weights {
  int64_t n = 0, row = 0;    // steps of the chunk, and the length of a row of a square
  const R *a = nullptr, *e = nullptr, *fade = nullptr;  // decays, erase gates and γ
  // Γ, k_t·k_s, q_t·k_s, Γ ∘ q_t·k_s and A.
  R *reach = nullptr, *keys = nullptr, *products = nullptr, *scores = nullptr, *system = nullptr;

  // Γ[C, t], by which what step t writes has faded when the chunk ends.
  const R* kept() const { return reach + (n - 1) * row; }

  // Γ from products of decays, not quotients of products: exact for a gate that closes, and for any sign. Zeros where
  // s > t, by choice and not by product: what stood there may be of another chunk.
  template <bool Fades, bool Erases>
  void weigh() const {
    using V = typename Simd<R>::Vector;
    using Int = typename Simd<R>::Int;
    const auto lanes = lane_numbers<R>();
    const V none = {}, one = none + R(1);
    for (int64_t t = 0; t < n; ++t) {
      for (int64_t j = 0; j < width(t); j += Simd<R>::lanes) {
        const int64_t at = t * row + j;
        const auto earlier = lanes < Int(t - j), now = lanes == Int(t - j);
        V kept = one;
        if (Fades) {
          kept = earlier ? a[t] * vector(reach + at - (t ? row : 0)) : none;
          vector(reach + at) = now ? one : kept;
        }
        const V product = earlier | now ? vector(products + at) : none;
        vector(products + at) = product;
        if (Fades) vector(scores + at) = (now ? one : kept) * product;
        if (!Erases) continue;
        const V key = earlier ? vector(keys + at) : none;
        vector(keys + at) = key;
        vector(system + at) = e[t] * kept * key;
      }
    }
  }

  // From the gradients of scores and of A to those of products, of keys, of e (dgate) and of Γ, which take the place of
  // products. `read` is the part of dgate that comes by way of the state.
  template <bool Fades, bool Erases>
  void unweigh(R* dscores, R* dsystem, const R* read, R* dgate) const {
    using V = typename Simd<R>::Vector;
    using Int = typename Simd<R>::Int;
    const auto lanes = lane_numbers<R>();
    const V none = {}, one = none + R(1);
    for (int64_t t = 0; t < n; ++t) {
      V of_erase = {};
      for (int64_t j = 0; j < width(t); j += Simd<R>::lanes) {
        const int64_t at = t * row + j;
        const auto earlier = lanes < Int(t - j), now = lanes == Int(t - j);
        const V kept = Fades ? vector(reach + at) : one;
        const V score = earlier | now ? vector(dscores + at) : none;
        vector(dscores + at) = kept * score;
        V of_reach = {};
        if (Fades) of_reach = earlier ? vector(products + at) * score : none;
        if (Erases) {
          const V erased = earlier ? vector(dsystem + at) : none, by_key = erased * vector(keys + at);
          if (Fades) of_reach -= e[t] * by_key;
          of_erase += kept * by_key;
          vector(dsystem + at) = e[t] * kept * erased;
        }
        if (Fades) vector(products + at) = of_reach;
      }
      if (Erases) dgate[t] = -sum_of<R>(of_erase) - (Fades ? fade[t] : R(1)) * read[t];
    }
  }

  // da_r = sum over s < r <= t of dΓ[t, s] (a_{r+1} ⋯ a_t) (a_{s+1} ⋯ a_{r-1}), and the same for γ, from what unweigh
  // left, the gradients of Γ[C, t] by way of the state (dkept), and those of γ. Ruins all of these.
  void differentiate(const R* dkept, R* dfade, R* da) const {
    using V = typename Simd<R>::Vector;
    constexpr int L = Simd<R>::lanes;
    const auto lanes = lane_numbers<R>();
    R* dreach = products;
    for (int64_t s = 0; s < n - 1; ++s) dreach[(n - 1) * row + s] += dkept[s];
    for (int64_t t = n - 1; t >= 0; --t) {
      if (t + 1 < n) dfade[t] += a[t + 1] * dfade[t + 1];
      V sums = {};
      for (int64_t j = 0; j < t; j += L) {
        V& of_reach = vector(dreach + t * row + j);
        const auto earlier = lanes < typename Simd<R>::Int(t - j);
        if (t + 1 < n) of_reach += earlier ? a[t + 1] * vector(dreach + (t + 1) * row + j) : V{};
        sums += of_reach * vector(reach + (t - 1) * row + j);
      }
      da[t] = t ? dfade[t] * fade[t - 1] + sum_of<R>(sums) : dfade[t];
    }
  }

 private:
  // How far tiles read into row t of a lower triangle.
  int64_t width(int64_t t) const { return padded<R>((t / kTileRows + 1) * kTileRows); }
};
