// Small matrix products on padded rows, with the vectors of the machine at hand.
//
// Every row starts on a vector boundary and has a whole number of vectors; what stands behind the last element of a row
// is zero or never read, so that no loop has a remainder along a row. The order in which an element is summed up does
// not depend on how many columns are computed together, which makes results independent of the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "ahead.h"

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// Rows of a result that are summed up together, or of a state that change together, two vectors of each: as many as the
// registers hold.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 8;
#else
constexpr int kTileRows = 4;
#endif

template <class R>
struct Simd {
  typedef R Vector __attribute__((vector_size(kVectorBytes)));
  typedef R Loose __attribute__((vector_size(kVectorBytes), aligned(sizeof(R))));
  static constexpr int lanes = kVectorBytes / sizeof(R);
  // Integers of the same size, as masks and for bits.
  typedef std::conditional_t<sizeof(R) == 4, int32_t, int64_t> Int;
  typedef Int Ints __attribute__((vector_size(kVectorBytes)));
  // What products of such elements are summed up as, and how many numbers an element is; see pairs.h.
  typedef R Sum, Number;
  static constexpr int depth = 1;
};

template <class R>
int64_t padded(int64_t size) {
  constexpr int64_t lanes = Simd<R>::lanes;
  return (size + lanes - 1) / lanes * lanes;
}

template <class R>
const typename Simd<R>::Vector& vector(const R* x) {
  return *reinterpret_cast<const typename Simd<R>::Vector*>(x);
}

template <class R>
typename Simd<R>::Vector& vector(R* x) {
  return *reinterpret_cast<typename Simd<R>::Vector*>(x);
}

// The same at any address.
template <class R>
const typename Simd<R>::Loose& loose(const R* x) {
  return *reinterpret_cast<const typename Simd<R>::Loose*>(x);
}

template <class R>
typename Simd<R>::Loose& loose(R* x) {
  return *reinterpret_cast<typename Simd<R>::Loose*>(x);
}

// Has x rounded. A compiler may fuse either product of a b + c d into the sum, here one and there the other; what is
// settled is no product any more, so that an element has the same bits in whichever tile it is computed.
template <class V>
void settle([[maybe_unused]] V& x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
}

// Which entries count: all; A's lower or upper triangle, the rest of A being zero; the lower triangle of the result.
enum class Part { all, lower, upper, result };

// A as it stands or transposed, by its strides: A(i, p) = data[i * row + p * column].
template <class R>
struct Operand {
  const R* data;
  int64_t row, column;
  Operand at(int64_t i, int64_t p) const { return {data + i * row + p * column, row, column}; }
};

// Where a product AB goes, and what happens to it on the way: data = keep ∘ base + sign gain ∘ AB. `keep` and `gain` are
// factors of rows, 1 where they are null; with `same`, the first of `keep` is that of all rows.
template <class R>
struct Result {
  R* data;
  int64_t row;
  const R* base = nullptr;  // has rows as long as those of data
  R sign = 1;
  const R *keep = nullptr, *gain = nullptr;
  bool same = false;
  Result at(int64_t i, int64_t j) const {
    return {data + i * row + j, row, base ? base + i * row + j : base, sign, keep && !same ? keep + i : keep,
            gain ? gain + i : gain, same};
  }
};

template <class E>
using ResultOf = Result<typename Simd<E>::Sum>;

// As many elements as hold so many numbers.
template <class E>
int64_t elements(int64_t size) {
  return (size + Simd<E>::depth - 1) / Simd<E>::depth;
}

// Elements of as many rows as each has numbers; these are the first and the last of them.
template <class E>
typename Simd<E>::Vector elements_of(const typename Simd<typename Simd<E>::Sum>::Vector& first,
                                     const typename Simd<typename Simd<E>::Sum>::Vector&) {
  return first;
}

template <class V>
void add_products(V& sum, const V& x, const V& y) {
  sum += x * y;
}

template <class R>
void add_product(typename Simd<R>::Vector& sum, R left, const typename Simd<R>::Vector& right) {
  sum += left * right;
}

// Of elements E, `inner` of which are summed up.
template <class E, int Rows, int Vectors>
[[gnu::noinline]] void tile(int64_t inner, const Operand<E>& A, const E* B, int64_t b, const ResultOf<E>& C) {
  using R = typename Simd<E>::Sum;
  using V = typename Simd<R>::Vector;
  constexpr int L = Simd<R>::lanes;
  V sums[Rows][Vectors] = {};
  const auto accumulate = [&](auto row) {
    // One pointer for every four rows: their addresses are then part of the instructions that read.
    const E* left[(Rows + 3) / 4];
#pragma GCC unroll 4
    for (int i = 0; i < Rows; i += 4) left[i / 4] = A.data + i * row;
    const int64_t column = A.column;
    for (int64_t p = 0; p < inner; ++p) {
      typename Simd<E>::Vector right[Vectors];
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) right[j] = vector(B + j * L);
#pragma GCC unroll 16
      for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
        for (int j = 0; j < Vectors; ++j) add_product(sums[i][j], left[i / 4][i % 4 * row], right[j]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < Rows; i += 4) left[i / 4] += column;
      B += b;
    }
  };
  if (A.row == 1) accumulate(std::integral_constant<int64_t, 1>());
  else accumulate(A.row);
  const auto store = [&](auto based) {
    const Result<R> out = C;
#pragma GCC unroll 16
    for (int i = 0; i < Rows; ++i) {
      const R gain = out.gain ? out.sign * out.gain[i] : out.sign, keep = out.keep ? out.keep[out.same ? 0 : i] : R(1);
#pragma GCC unroll 4
      for (int j = 0; j < Vectors; ++j) {
        V x = gain * sums[i][j];
        settle(x);
        if (based) x += keep * vector(out.base + i * out.row + j * L);
        vector(out.data + i * out.row + j * L) = x;
      }
    }
  };
  if (C.base) store(std::true_type());
  else store(std::false_type());
}

// `Rows` rows of a product.
template <class E, int Rows>
void band(int64_t columns, int64_t inner, const Operand<E>& A, const E* B, int64_t b, const ResultOf<E>& C) {
  constexpr int L = Simd<E>::lanes;
  for (int64_t j = 0; j < columns;) {
    const int64_t left = (columns - j) / L;
    if (Rows <= kTileRows && (left == 3 || left > 4)) {
      tile<E, Rows, 3>(inner, A, B + j, b, C.at(0, j));
      j += 3 * L;
    } else if (Rows <= kTileRows && left >= 2) {
      tile<E, Rows, 2>(inner, A, B + j, b, C.at(0, j));
      j += 2 * L;
    } else {
      tile<E, Rows, 1>(inner, A, B + j, b, C.at(0, j));
      j += L;
    }
  }
}

// C (rows x columns) of A (rows x inner) B (inner x columns), whose rows are b apart; asks `ahead` now and then.
template <class E>
[[gnu::noinline]] void multiply(int64_t rows, int64_t columns, int64_t inner, const Operand<E>& A, const E* B, int64_t b,
                                const ResultOf<E>& C, Part part = Part::all, Ahead* ahead = nullptr) {
  columns = padded<E>(columns);
  for (int64_t i = 0, step; i < rows; i += step) {
    if (ahead) ahead->ask();
    const int64_t left = rows - i;
    // A tile of one vector needs more rows to keep the machine busy. Of a triangle it would read too much.
    const int64_t most = part == Part::result ? std::min(columns, padded<E>(i + 2 * kTileRows)) : columns;
    const bool whole = part == Part::all || part == Part::result;
    const bool tall = whole && most <= Simd<E>::lanes && left >= 2 * kTileRows;
    step = tall ? 2 * kTileRows : left >= kTileRows ? kTileRows : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    const int64_t from = part == Part::upper ? i / Simd<E>::depth : 0;
    const int64_t to = elements<E>(part == Part::lower ? std::min(inner, i + step) : inner);
    const int64_t width = part == Part::result ? std::min(columns, padded<E>(i + step)) : columns;
    const auto left_part = A.at(i, from);
    const E* right = B + from * b;
    const auto out = C.at(i, 0);
    if (tall) band<E, 2 * kTileRows>(width, to - from, left_part, right, b, out);
    else if (step == kTileRows) band<E, kTileRows>(width, to - from, left_part, right, b, out);
    else if (step == 4) band<E, 4>(width, to - from, left_part, right, b, out);
    else if (step == 2) band<E, 2>(width, to - from, left_part, right, b, out);
    else band<E, 1>(width, to - from, left_part, right, b, out);
  }
}

#if __has_builtin(__builtin_shufflevector)
// Exchanges blocks of `Size` lanes between rows `Size` apart; the sizes 1, 2, 4, ... together transpose a square.
template <int Size, class V, int... Lane>
inline void exchange(V& upper, V& lower, std::integer_sequence<int, Lane...>) {
  constexpr int L = sizeof...(Lane);
  const V first = __builtin_shufflevector(upper, lower, ((Lane & Size) ? L + Lane - Size : Lane)...);
  lower = __builtin_shufflevector(upper, lower, ((Lane & Size) ? L + Lane : Lane + Size)...);
  upper = first;
}

template <int Size, int L, class V>
inline void exchange_all(V (&square)[L]) {
  if constexpr (Size < L) {
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) {
      if (!(i & Size)) exchange<Size>(square[i], square[i + Size], std::make_integer_sequence<int, L>());
    }
    exchange_all<2 * Size>(square);
  }
}
#endif

// out (columns x rows) = in (rows x columns)^T; both sizes are rounded up to whole vectors.
template <class R>
void transpose(int64_t rows, int64_t columns, const R* in, int64_t stride, R* out, int64_t out_stride) {
  using V = typename Simd<R>::Vector;
  constexpr int L = Simd<R>::lanes;
  for (int64_t i = 0; i < rows; i += L) {
    for (int64_t j = 0; j < columns; j += L) {
      V square[L];
#pragma GCC unroll 16
      for (int r = 0; r < L; ++r) square[r] = vector(in + (i + r) * stride + j);
#if __has_builtin(__builtin_shufflevector)
      exchange_all<1>(square);
#pragma GCC unroll 16
      for (int r = 0; r < L; ++r) vector(out + (j + r) * out_stride + i) = square[r];
#else
      for (int r = 0; r < L; ++r) {
        for (int lane = 0; lane < L; ++lane) out[(j + lane) * out_stride + i + r] = square[r][lane];
      }
#endif
    }
  }
}

// These go over whole vectors: `size` is rounded up, and what stands behind it must be there.

// The sum of a vector's lanes, half added to half.
template <class R>
R sum_of(typename Simd<R>::Vector x) {
  constexpr int L = Simd<R>::lanes;
  R lanes[L];
  std::memcpy(lanes, &x, sizeof x);
#pragma GCC unroll 8
  for (int half = L / 2; half; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

// Has lane i of the result be the sum of the lanes of x[i], for as many vectors as a vector has lanes. Ruins x.
template <class R, int Size = Simd<R>::lanes / 2>
typename Simd<R>::Vector sums_of(typename Simd<R>::Vector* x) {
#if __has_builtin(__builtin_shufflevector)
  if constexpr (Size > 0) {
#pragma GCC unroll 8
    for (int i = 0; i < Size; ++i) {
      exchange<Size>(x[i], x[i + Size], std::make_integer_sequence<int, Simd<R>::lanes>());
      x[i] += x[i + Size];
    }
    return sums_of<R, Size / 2>(x);
  }
  return x[0];
#else
  typename Simd<R>::Vector sums;
  for (int i = 0; i < Simd<R>::lanes; ++i) sums[i] = sum_of<R>(x[i]);
  return sums;
#endif
}

// 0, 1, 2, ...
template <class R>
typename Simd<R>::Ints lane_numbers() {
  typename Simd<R>::Ints lanes;
  for (int i = 0; i < Simd<R>::lanes; ++i) lanes[i] = i;
  return lanes;
}

template <class R>
R dot(int64_t size, const R* x, const R* y) {
  typename Simd<R>::Vector sums = {};
  for (int64_t i = 0; i < size; i += Simd<R>::lanes) sums += vector(x + i) * vector(y + i);
  return sum_of<R>(sums);
}

// y = factor * x.
template <class R>
void scale(int64_t size, R factor, const R* x, R* y) {
  for (int64_t i = 0; i < size; i += Simd<R>::lanes) vector(y + i) = factor * vector(x + i);
}

// y += factor * x.
template <class R>
void add_scaled(int64_t size, R factor, const R* x, R* y) {
  for (int64_t i = 0; i < size; i += Simd<R>::lanes) vector(y + i) += factor * vector(x + i);
}

// z = x * y, element by element.
template <class R>
void hadamard(int64_t size, const R* x, const R* y, R* z) {
  for (int64_t i = 0; i < size; i += Simd<R>::lanes) vector(z + i) = vector(x + i) * vector(y + i);
}

// y = exp(x), element by element: 2^n e^r with |r| <= ln(2) / 2, and the series of e^r.
template <class R>
void exponential(int64_t size, const R* x, R* y) {
  using V = typename Simd<R>::Vector;
  using Ints = typename Simd<R>::Ints;
  constexpr int digits = std::numeric_limits<R>::digits - 1, offset = std::numeric_limits<R>::max_exponent - 1;
  constexpr R ln2 = R(0.693147180559945309417), most = sizeof(R) == 4 ? 170 : 1400;
  const V one = V{} + R(1), half = V{} + R(0.5);
  for (int64_t i = 0; i < size; i += Simd<R>::lanes) {
    V r = vector(x + i);
    r = r < -most ? V{} - most : r > most ? V{} + most : r;
    const Ints n = __builtin_convertvector(r / ln2 + (r < 0 ? -half : half), Ints), low = n >> 1;
    r -= __builtin_convertvector(n, V) * ln2;
    V sum = one;
#pragma GCC unroll 16
    for (int j = sizeof(R) == 4 ? 7 : 13; j > 0; --j) sum = one + sum * r * R(1.0 / j);
    // These casts keep the bits. In two steps, because 2^n alone may be too small for a normal number.
    const Ints first = (low + offset) << digits, second = (n - low + offset) << digits;
    vector(y + i) = sum * (V)first * (V)second;
  }
}
