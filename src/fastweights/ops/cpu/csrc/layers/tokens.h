// Tokens of one head on their way through a map, and their gradients on the way back.
#pragma once

#include <vector>

#include "call.h"
#include "maps.h"

// Memory of a thread, handed out from its beginning: arrays on vector boundaries, of whole vectors, with anything in
// them.
template <class R>
class Room {
 public:
  explicit Room(int64_t size) {
    constexpr int64_t lanes = Simd<R>::lanes;
    thread_local std::vector<R> kept;
    if (static_cast<int64_t>(kept.size()) < size + lanes) kept.resize(size + lanes);
    next = kept.data();
    next += (lanes - reinterpret_cast<uintptr_t>(next) / sizeof(R) % lanes) % lanes;
  }

  R* take(int64_t size) {
    R* found = next;
    next += padded<R>(size);
    return found;
  }

 private:
  R* next;
};

// Mirrored in features.py: what heads of size r go through to become features of size D, the same for all tokens.
// `vectors` (m, r) are those of FAVOR+, drawn and times `inner`; with `divided` what queries read is divided, too, so
// that their features may be over any number.
struct Mapping {
  int64_t r, D, nu, map, norm, m, divided;
  double scale, inner;
  View vectors;
};

// A `Mapping` for all jobs of a call.
template <class R>
class Features {
 public:
  explicit Features(const Mapping& how)
      : how(how), map(Map(how.map)), norm(Norm(how.norm)), rp(padded<R>(how.r)), Dp(padded<R>(how.D)),
        mp(padded<R>(how.m)) {
    if (map != kFavor) return;
    kept.resize(2 * rp * mp + Simd<R>::lanes);
    vectors = kept.data();
    vectors += (Simd<R>::lanes - reinterpret_cast<uintptr_t>(vectors) / sizeof(R) % Simd<R>::lanes) % Simd<R>::lanes;
    transposed = vectors + rp * mp;
    for (int64_t i = 0; i < how.m; ++i) load_rows(how.vectors, 0, i, 1, 0, 0, how.r, vectors + i * rp, 0);
    transpose(how.m, how.r, vectors, rp, transposed, mp);
  }

  // Whether features may be over their largest, which leaves no trace in what becomes of them.
  bool scaled(bool queries) const { return norm == kSum || norm == kL2 || (queries && norm == kAsIs && how.divided); }

  const Mapping& how;
  const Map map;
  const Norm norm;
  const int64_t rp, Dp, mp;
  R *vectors = nullptr, *transposed = nullptr;

 private:
  std::vector<R> kept;
};

// Up to `most` tokens: loaded, mapped, and, once the gradient of their features is known, stored as a gradient.
template <class R>
class Tokens {
 public:
  // Numbers that `most` tokens need.
  static int64_t size(const Features<R>& to, int64_t most) {
    return most * (3 * to.rp + to.Dp + to.mp) + 2 * to.mp + 2 * padded<R>(most) + 2 * padded<R>(4 * to.how.r);
  }

  Tokens(const Features<R>& to, bool queries, int64_t most, Room<R>& room)
      : to(to), how(to.how), scaled(to.scaled(queries)), scale(queries ? R(how.scale) : R(1)) {
    for (R** x : {&raw, &scratch, &slope}) *x = room.take(most * to.rp);
    phi = room.take(most * to.Dp), exponents = room.take(most * to.mp), up = room.take(to.mp), down = room.take(to.mp);
    factors = room.take(most), levels = room.take(most);
    r = room.take(4 * how.r), dr = room.take(4 * how.r);
  }

  R* phi;  // features of the tokens that were loaded last, Dp apart, with zeros behind them

  // Features of tokens t to t + count; with slopes, for `store_gradient`.
  void load(const View& x, int64_t b, int64_t t, int64_t count, int64_t h, bool slopes) {
    load_rows(x, b, t, count, h, 0, how.r, raw, to.rp);
    if (to.map == kFavor) {
      map_favor(count);
    } else if (to.map == kDpfp) {
      for (int64_t i = 0; i < count; ++i) map_dpfp(how.nu, how.r, raw + i * to.rp, phi + i * to.Dp, r);
    } else {
      map_each(to.map, count * to.rp, raw, phi, scratch, slopes ? slope : nullptr);
    }
    for (int64_t i = 0; i < count; ++i) {
      R* row = phi + i * to.Dp;
      for (int64_t d = how.D; d < to.Dp; ++d) row[d] = 0;
      factors[i] = normalize(to.norm, how.D, row);
      if (scale == 1) continue;
      for (int64_t d = 0; d < how.D; ++d) row[d] *= scale;
    }
  }

  // Stores the gradient of the tokens of `load` for the gradient of their features, Dp apart, which it overwrites.
  void store_gradient(R* dphi, const View& dx, int64_t b, int64_t t, int64_t count, int64_t h) {
    const R unscale = scale == 0 ? R(0) : R(1) / scale;
    for (int64_t i = 0; i < count; ++i) {
      R *row = dphi + i * to.Dp, *features = phi + i * to.Dp;
      if (scale != 1) {
        for (int64_t d = 0; d < how.D; ++d) row[d] *= scale, features[d] *= unscale;
      }
      unnormalize(to.norm, how.D, factors[i], features, row);
      if (to.map == kDpfp) unmap_dpfp(how.nu, how.r, raw + i * to.rp, row, slope + i * to.rp, r, dr);
    }
    if (to.map == kFavor) {
      unmap_favor(dphi, count);
    } else if (to.map != kDpfp) {
      for (int64_t i = 0; i < count * to.rp; ++i) slope[i] *= dphi[i];
    }
    store_rows(dx, b, t, count, h, 0, how.r, slope, to.rp);
  }

 private:
  const Features<R>& to;
  const Mapping& how;
  const bool scaled;
  const R scale;
  R *raw, *scratch, *slope, *exponents, *up, *down, *factors, *levels, *r, *dr;

  // FAVOR+: exp(e) and exp(-e) for e = vectors x, over sqrt(2 m) exp(|inner x|² / 2) or over the largest of them.
  void map_favor(int64_t count) {
    const int64_t m = how.m, mp = to.mp;
    multiply(count, m, how.r, Operand<R>{raw, to.rp, 1}, to.transposed, mp, Result<R>{exponents, mp});
    for (int64_t i = 0; i < count; ++i) {
      const R *e = exponents + i * mp, *x = raw + i * to.rp;
      R level = 0, squares = 0;
      if (scaled) {
        for (int64_t j = 0; j < m; ++j) level = std::abs(e[j]) > level ? std::abs(e[j]) : level;
      } else {
        for (int64_t j = 0; j < how.r; ++j) squares += x[j] * x[j];
        level = squares * R(how.inner * how.inner / 2) + std::log(R(2 * m)) / 2;
      }
      for (int64_t j = 0; j < mp; ++j) up[j] = e[j] - level, down[j] = -e[j] - level;
      exponential(m, up, up);
      exponential(m, down, down);
      std::copy_n(up, m, phi + i * to.Dp);
      std::copy_n(down, m, phi + i * to.Dp + m);
    }
  }

  // From the gradient of features, which were divided, to that of x, in `slope`.
  void unmap_favor(const R* dphi, int64_t count) {
    const int64_t m = how.m;
    for (int64_t i = 0; i < count; ++i) {
      const R *row = dphi + i * to.Dp, *features = phi + i * to.Dp;
      const R undivided = factors[i] == 0 ? R(0) : R(1) / factors[i];
      R *e = exponents + i * to.mp, total = 0;
      for (int64_t j = 0; j < m; ++j) {
        const R rise = row[j] * features[j] * undivided, fall = row[m + j] * features[m + j] * undivided;
        e[j] = rise - fall, total += rise + fall;
      }
      levels[i] = scaled ? R(0) : total * R(how.inner * how.inner);
    }
    multiply(count, how.r, m, Operand<R>{exponents, to.mp, 1}, to.vectors, to.rp, Result<R>{slope, to.rp});
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j = 0; j < how.r; ++j) slope[i * to.rp + j] -= levels[i] * raw[i * to.rp + j];
    }
  }
};
