// Products of bfloat16 on processors that multiply pairs of them, twice as many numbers a cycle as in float32, and sum
// them up in float32.
//
// Operands are rounded to bfloat16 and laid out in pairs along the axis that is summed over, so that a pair takes the
// place of a number: in a row of a left operand two columns are one element, and in a right operand, or a left one that
// is read transposed, two rows are one. Elements of other types are numbers, and what lays them out returns them as they
// are.
#pragma once

#include "simd.h"

#if defined(__AVX512BF16__) && __has_builtin(__builtin_shufflevector)
#define FASTWEIGHTS_PAIRS
#include <immintrin.h>

struct BFloat16;

// Two numbers of bfloat16, the first in the lower half.
struct Pair {
  int32_t bits;
};

template <>
struct Simd<Pair> : Simd<int32_t> {
  typedef float Sum;
  typedef BFloat16 Number;
  static constexpr int depth = 2;
};

template <>
struct Simd<const Pair> : Simd<Pair> {};

using Floats = Simd<float>::Vector;
using Pairs = Simd<Pair>::Vector;
typedef int16_t Halves __attribute__((vector_size(kVectorBytes)));

inline void add_products(Floats& sum, const Pairs& x, const Pairs& y) {
  sum = (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y);
}

inline void add_product(Floats& sum, Pair x, const Pairs& y) { add_products(sum, Pairs{} + x.bits, y); }

// Pairs of lanes of `low`, then of `high`.
inline Pairs side_by_side(const Floats& low, const Floats& high) {
  return (Pairs)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

// Pairs of a lane of each.
template <int... Lane>
Pairs one_of_each(const Floats& first, const Floats& second, std::integer_sequence<int, Lane...>) {
  const auto both = (Halves)side_by_side(first, second);
  return (Pairs)__builtin_shufflevector(both, both, (Lane % 2 * Simd<Pair>::lanes + Lane / 2)...);
}

inline Pairs one_of_each(const Floats& first, const Floats& second) {
  return one_of_each(first, second, std::make_integer_sequence<int, 2 * Simd<Pair>::lanes>());
}

// The same of pairs that are side by side, of which there are twice as many: those from lane `From` on.
template <int From, int... Lane>
Pairs one_of_each(const Pairs& first, const Pairs& second, std::integer_sequence<int, Lane...>) {
  constexpr int halves = sizeof...(Lane);
  return (Pairs)__builtin_shufflevector((Halves)first, (Halves)second, (Lane % 2 * halves + From + Lane / 2)...);
}

template <>
inline Pairs elements_of<Pair>(const Floats& first, const Floats& second) {
  return one_of_each(first, second);
}

// Writes 0 behind the last of `columns`, where that is the first of a pair.
inline void close(Pair* row, int64_t columns) {
  if (columns % 2) row[columns / 2].bits &= 0xffff;
}

// Each of these writes a matrix into `out`, rows of which are `out_stride` elements apart, and returns it.
inline const Pair* pairs_of_columns(int64_t rows, int64_t columns, const float* in, int64_t stride, Pair* out,
                                    int64_t out_stride) {
  constexpr int L = Simd<float>::lanes;
  for (int64_t i = 0; i < rows; ++i) {
    const float* row = in + i * stride;
    Pair* made = out + i * out_stride;
    for (int64_t j = 0; j < columns; j += 2 * L) {
      vector(made + j / 2) = side_by_side(vector(row + j), j + L < columns ? vector(row + j + L) : Floats{});
    }
    close(made, columns);
  }
  return out;
}

// Of each row times its factor, if there are factors.
inline const Pair* pairs_of_rows(int64_t rows, int64_t columns, const float* in, int64_t stride, Pair* out,
                                 int64_t out_stride, const float* factors = nullptr) {
  for (int64_t i = 0; i < rows; i += 2) {
    const bool whole = i + 1 < rows;
    const float first = factors ? factors[i] : 1, second = factors && whole ? factors[i + 1] : 1;
    for (int64_t j = 0; j < columns; j += Simd<float>::lanes) {
      const float* at = in + i * stride + j;
      vector(out + i / 2 * out_stride + j) =
          one_of_each(first * vector(at), whole ? second * vector(at + stride) : Floats{});
    }
  }
  return out;
}

// Of rows that are pairs of columns.
inline const Pair* pairs_of_rows(int64_t rows, int64_t columns, const Pair* in, int64_t stride, Pair* out,
                                 int64_t out_stride) {
  constexpr int L = Simd<Pair>::lanes;
  const auto lanes = std::make_integer_sequence<int, 2 * L>();
  for (int64_t i = 0; i < rows; i += 2) {
    for (int64_t j = 0; j < columns; j += 2 * L) {
      const Pair* at = in + i * stride + j / 2;
      const Pairs first = loose(at), second = i + 1 < rows ? Pairs(loose(at + stride)) : Pairs{};
      Pair* made = out + i / 2 * out_stride + j;
      vector(made) = one_of_each<0>(first, second, lanes);
      if (j + L < columns) vector(made + L) = one_of_each<L>(first, second, lanes);
    }
  }
  return out;
}

// Pairs of rows of a matrix and, in `turned`, of its transpose, unless that is null. There are rows for whole vectors.
inline const Pair* laid_out(int64_t rows, int64_t columns, const float* in, int64_t stride, Pair* out,
                            int64_t out_stride, Pair* turned, int64_t turned_stride) {
  constexpr int L = Simd<float>::lanes;
  const auto lanes = lane_numbers<float>();
  for (int64_t i = 0; i < rows; i += L) {
    for (int64_t j = 0; j < columns; j += 2 * L) {
      const bool second = j + L < columns;
      // The last pair may have one column only.
      const Pairs kept = lanes == int32_t(columns / 2 - j / 2) ? Pairs{} + 0xffff : ~Pairs{};
      Pairs square[L];
#pragma GCC unroll 16
      for (int r = 0; r < L; r += 2) {
        const float* at = in + (i + r) * stride + j;
        Pair* made = out + (i + r) / 2 * out_stride + j;
        const Floats x = vector(at), z = i + r + 1 < rows ? vector(at + stride) : Floats{};
        Floats y = {}, w = {};
        vector(made) = one_of_each(x, z);
        if (second) {
          y = vector(at + L), w = i + r + 1 < rows ? vector(at + stride + L) : Floats{};
          vector(made + L) = one_of_each(y, w);
        }
        square[r] = side_by_side(x, y) & kept, square[r + 1] = side_by_side(z, w) & kept;
      }
      if (!turned) continue;
      exchange_all<1>(square);
#pragma GCC unroll 16
      for (int r = 0; r < L; ++r) vector(turned + (j / 2 + r) * turned_stride + i) = square[r];
    }
  }
  return out;
}

// The same of pairs of columns.
inline const Pair* laid_out(int64_t rows, int64_t columns, const Pair* in, int64_t stride, Pair* out,
                            int64_t out_stride, Pair* turned, int64_t turned_stride) {
  constexpr int L = Simd<Pair>::lanes;
  const auto lanes = std::make_integer_sequence<int, 2 * L>();
  for (int64_t i = 0; i < rows; i += L) {
    for (int64_t j = 0; j < columns; j += 2 * L) {
      Pairs square[L];
#pragma GCC unroll 16
      for (int r = 0; r < L; ++r) square[r] = loose(in + (i + r) * stride + j / 2);
#pragma GCC unroll 16
      for (int r = 0; r < L; r += 2) {
        Pair* made = out + (i + r) / 2 * out_stride + j;
        vector(made) = one_of_each<0>(square[r], square[r + 1], lanes);
        if (j + L < columns) vector(made + L) = one_of_each<L>(square[r], square[r + 1], lanes);
      }
      if (!turned) continue;
      exchange_all<1>(square);
#pragma GCC unroll 16
      for (int r = 0; r < L; ++r) vector(turned + (j / 2 + r) * turned_stride + i) = square[r];
    }
  }
  return out;
}

// The product of floats and pairs of columns.
inline float dot(int64_t size, const float* x, const Pair* y) {
  Floats sums = {};
  for (int64_t i = 0; i < size; i += Simd<float>::lanes) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(y + i / 2));
    sums += vector(x + i) * (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
  }
  return sum_of<float>(sums);
}
#else
using Pair = float;
#endif

// Whether there are pairs.
constexpr bool kPairs = !std::is_same_v<Pair, float>;

// The same of numbers.
template <class R>
const R* pairs_of_columns(int64_t, int64_t, const R* in, int64_t, R*, int64_t) {
  return in;
}

template <class R>
const R* pairs_of_rows(int64_t rows, int64_t columns, const R* in, int64_t stride, R* out, int64_t out_stride,
                       const R* factors = nullptr) {
  if (!factors) return in;
  for (int64_t i = 0; i < rows; ++i) scale(columns, factors[i], in + i * stride, out + i * out_stride);
  return out;
}

template <class R>
const R* laid_out(int64_t, int64_t, const R* in, int64_t, R*, int64_t, R*, int64_t) {
  return in;
}
