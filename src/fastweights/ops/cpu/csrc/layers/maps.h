// The maps that keys and queries go through, and what divides their features, forwards and backwards.
//
// Rows begin on vector boundaries and have room for whole vectors. What stands behind a row is read and written, too.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"

// Mirrored by `MAPS` and `NORMS` in features.py.
enum Map : int32_t { kNone, kElu, kRelu, kSilu, kDpfp, kFavor };
enum Norm : int32_t { kAsIs, kSum, kSmoothL2, kL2 };

// The square root of the smallest normal number, as `normalization.safe_divide` has it.
template <class R>
constexpr R kTiny = sizeof(R) == 4 ? R(1.0842021724855044e-19) : R(1.4916681462400413e-154);

template <class R>
R quotient(R x, R by) {
  return by > -kTiny<R> && by < kTiny<R> ? R(0) : x / by;
}

// max(0, x), and NaN for NaN.
template <class R>
R rectified(R x) {
  return x < 0 ? R(0) : x;
}

// y = sigmoid(x).
template <class R>
void sigmoid(int64_t size, const R* x, R* y) {
  using V = typename Simd<R>::Vector;
  for (int64_t i = 0; i < size; i += Simd<R>::lanes) vector(y + i) = -vector(x + i);
  exponential(size, y, y);
  for (int64_t i = 0; i < size; i += Simd<R>::lanes) vector(y + i) = (V{} + R(1)) / (R(1) + vector(y + i));
}

// phi of each of `size` numbers x, and its slope there unless that is null; `scratch` is of the same size.
template <class R>
void map_each(Map map, int64_t size, const R* x, R* phi, R* scratch, R* slope = nullptr) {
  switch (map) {
    case kElu:
      for (int64_t i = 0; i < size; ++i) scratch[i] = x[i] > 0 ? R(0) : x[i];
      exponential(size, scratch, scratch);
      for (int64_t i = 0; i < size; ++i) phi[i] = scratch[i] + rectified(x[i]);
      // Beside positive numbers stands exp(0).
      if (slope) std::copy_n(scratch, size, slope);
      break;
    case kRelu:
      for (int64_t i = 0; i < size; ++i) phi[i] = rectified(x[i]);
      if (slope) {
        for (int64_t i = 0; i < size; ++i) slope[i] = x[i] > 0 ? R(1) : R(0);
      }
      break;
    case kSilu:
      sigmoid(size, x, scratch);
      for (int64_t i = 0; i < size; ++i) phi[i] = x[i] * scratch[i];
      if (slope) {
        for (int64_t i = 0; i < size; ++i) slope[i] = scratch[i] + phi[i] * (R(1) - scratch[i]);
      }
      break;
    default:
      std::copy_n(x, size, phi);
      if (slope) std::fill_n(slope, size, R(1));
  }
}

// r = (max(0, x), max(0, -x)), written twice over: (4 size). Entries before the first are then those of the first copy.
template <class R>
void rectify_both(int64_t size, const R* x, R* r) {
  for (int64_t i = 0; i < size; ++i) r[i] = rectified(x[i]), r[size + i] = rectified(-x[i]);
  std::copy_n(r, 2 * size, r + 2 * size);
}

// DPFP of x (size): products of entries of r up to nu apart (2 size nu); `r` has room for 4 size.
template <class R>
void map_dpfp(int64_t nu, int64_t size, const R* x, R* phi, R* r) {
  rectify_both(size, x, r);
  for (int64_t j = 1; j <= nu; ++j, phi += 2 * size) {
    const R *now = r + 2 * size, *before = now - j;
    for (int64_t i = 0; i < 2 * size; ++i) phi[i] = now[i] * before[i];
  }
}

// dx for the gradient dphi of DPFP; `r` and `dr` have room for 4 size each.
template <class R>
void unmap_dpfp(int64_t nu, int64_t size, const R* x, const R* dphi, R* dx, R* r, R* dr) {
  rectify_both(size, x, r);
  std::fill_n(dr, 4 * size, R(0));
  for (int64_t j = 1; j <= nu; ++j, dphi += 2 * size) {
    const R *now = r + 2 * size, *before = now - j;
    R *dnow = dr + 2 * size, *dbefore = dnow - j;
    for (int64_t i = 0; i < 2 * size; ++i) dnow[i] += dphi[i] * before[i];
    for (int64_t i = 0; i < 2 * size; ++i) dbefore[i] += dphi[i] * now[i];
  }
  const R *rest = dr + 2 * size, *negative = dr + size, *negative_rest = dr + 3 * size;
  for (int64_t i = 0; i < size; ++i) {
    const R up = dr[i] + rest[i], down = negative[i] + negative_rest[i];
    dx[i] = x[i] > 0 ? up : x[i] < 0 ? -down : R(0);
  }
}

// 1 / |x| where squares may overflow or underflow; 0 where all entries are next to 0.
template <class R>
R inverse_length(int64_t size, const R* x) {
  R largest = 0, squares = 0;
  for (int64_t i = 0; i < size; ++i) largest = std::abs(x[i]) > largest ? std::abs(x[i]) : largest;
  const R inverse = quotient(R(1), largest);
  for (int64_t i = 0; i < size; ++i) squares += x[i] * inverse * (x[i] * inverse);
  return squares == 0 ? R(0) : inverse / std::sqrt(squares);
}

// Divides the D features of phi, and returns by what they were multiplied: 0 where all become 0.
template <class R>
R normalize(Norm norm, int64_t D, R* phi) {
  using V = typename Simd<R>::Vector;
  constexpr int L = Simd<R>::lanes;
  if (norm == kAsIs) return R(1);
  for (int64_t d = D; d % L; ++d) phi[d] = 0;
  const auto each = [&](const auto& use) {
    for (int64_t d = 0; d < D; d += L) use(vector(phi + d));
  };
  V found = {};
  R factor;
  if (norm == kSum) {
    each([&](V& x) { found += x; });
    factor = quotient(R(1), sum_of<R>(found));
  } else {
    each([&](V& x) { found += x * x; });
    const R squares = sum_of<R>(found) + (norm == kSmoothL2 ? R(1e-6) : R(0));
    const bool exact = norm == kSmoothL2 || (squares > kTiny<R> && squares < 1 / kTiny<R>);
    factor = exact ? R(1) / std::sqrt(squares) : inverse_length(D, phi);
  }
  if (factor == 0) std::fill_n(phi, D, R(0));
  else each([&](V& x) { x *= factor; });
  return factor;
}

// dphi becomes the gradient of the features before they were divided: `phi` are those after it.
template <class R>
void unnormalize(Norm norm, int64_t D, R factor, const R* phi, R* dphi) {
  constexpr int L = Simd<R>::lanes;
  if (norm == kAsIs) return;
  if (factor == 0) return void(std::fill_n(dphi, D, R(0)));
  for (int64_t d = D; d % L; ++d) dphi[d] = 0;
  typename Simd<R>::Vector sums = {};
  for (int64_t d = 0; d < D; d += L) sums += vector(phi + d) * vector(dphi + d);
  const R common = sum_of<R>(sums);
  for (int64_t d = 0; d < D; d += L) {
    if (norm == kSum) vector(dphi + d) = factor * (vector(dphi + d) - common);
    else vector(dphi + d) = factor * (vector(dphi + d) - common * vector(phi + d));
  }
}
