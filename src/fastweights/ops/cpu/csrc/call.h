// What backend.py passes and gets back: tensors as addresses and strides, of any of four types.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "pairs.h"

// The two types of 16 bits are converted from and to float, rounded to the nearest and to even, in steps that a compiler
// can take for a whole vector at once.
inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// The upper half of a float.
struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;
  explicit BFloat16(float x) {
    const uint32_t wide = bits_of(x), rounded = wide + 0x7fff + ((wide >> 16) & 1);
    bits = static_cast<uint16_t>(x != x ? 0x7fc0 : rounded >> 16);
  }
  operator float() const { return float_of(static_cast<uint32_t>(bits) << 16); }
};

// One bit of sign, five of exponent, ten of fraction.
struct Half {
  uint16_t bits;

  Half() = default;
  explicit Half(float x) {
    const uint32_t wide = bits_of(x), sign = (wide >> 16) & 0x8000, size = wide & 0x7fffffff;
    // From 2^-14 on: the exponents begin 112 apart. What rounds to 2^16 or more comes out as the bits of infinity.
    const uint32_t capped = size < kOverflow ? size : kOverflow;
    const uint32_t normal = (capped - (112u << 23) + 0xfff + ((capped >> 13) & 1)) >> 13;
    // Below it: a multiple of 2^-24, which becomes an integer as the last bits of 2^23 and more.
    const uint32_t small = bits_of(float_of(size < kNormal ? size : 0) * 0x1p24f + 0x1p23f) - bits_of(0x1p23f);
    bits = static_cast<uint16_t>(sign | (size > kInfinity ? 0x7e00 : size < kNormal ? small : normal));
  }
  operator float() const {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16, size = bits & 0x7fff;
    const uint32_t small = bits_of(static_cast<float>(static_cast<int32_t>(size)) * 0x1p-24f);
    const uint32_t normal = (size << 13) + ((size < 0x7c00 ? 112u : 224u) << 23);
    return float_of(sign | (size < 0x400 ? small : normal));
  }

 private:
  static constexpr uint32_t kInfinity = 0x7f800000, kNormal = 0x38800000, kOverflow = 0x47800000;
};

enum Kind : int32_t { kFloat32, kFloat64, kBFloat16, kFloat16 };

template <class R>
constexpr Kind kind_of = sizeof(R) == 4 ? kFloat32 : kFloat64;

// A tensor (B, T, H) or (B, T, H, ·) with a contiguous last axis; strides in elements. No data: not there.
struct View {
  char* data;
  int64_t batch, time, head;
  int32_t kind;
  int32_t bytes;

  char* at(int64_t b, int64_t t, int64_t h) const { return data + (b * batch + t * time + h * head) * bytes; }
};

// Mirrored by `Call` in backend.py. States are contiguous (·, H, D, M); `bounds` has N + 1 entries. Every `group` heads
// share a head of q and k. Decays are one per key channel with `per_key`, and natural logarithms with `log`. With
// `pairs`, q, k and `before` are of bfloat16, and products of pairs.
struct Call {
  int64_t N, H, D, M, C;
  int64_t packed, group, per_key, log, pairs;
  const int64_t* bounds;
  View q, k, v, a, e, w, y;
  View dy, dq, dk, dv, da, de, dw;
  void *W, *W_end, *before;
  void *dW_end, *dW_start, *after;
};

// Whether memory ran out, and whether every y, or every gradient of q and k, is finite; as in backend.py.
enum Outcome : int { kNoMemory, kFinite, kNotFinite };

// Calls `use` with a pointer of the type that x holds.
template <class Use>
void typed(const View& x, char* data, const Use& use) {
  switch (x.kind) {
    case kFloat32: return use(reinterpret_cast<float*>(data));
    case kFloat64: return use(reinterpret_cast<double*>(data));
    case kBFloat16: return use(reinterpret_cast<BFloat16*>(data));
    case kFloat16: return use(reinterpret_cast<Half*>(data));
  }
}

#ifdef FASTWEIGHTS_PAIRS
template <>
constexpr Kind kind_of<Pair> = kBFloat16;

// Pairs of columns, of bfloat16 as they are.
inline void load_rows(const View& x, int64_t b, int64_t t, int64_t count, int64_t h, int64_t from, int64_t size,
                      Pair* out, int64_t stride) {
  const char* in = x.at(b, t, h) + from * x.bytes;
  for (int64_t i = 0; i < count; ++i, in += x.time * x.bytes, out += stride) std::memcpy(out, in, size * x.bytes);
}
#endif

// `count` tokens from t on, elements `from` to `from + size` of each, as rows that are `stride` apart.
template <class R>
void load_rows(const View& x, int64_t b, int64_t t, int64_t count, int64_t h, int64_t from, int64_t size, R* out,
               int64_t stride) {
  typed(x, x.at(b, t, h) + from * x.bytes, [&](auto* in) {
    for (int64_t i = 0; i < count; ++i, in += x.time, out += stride) {
      for (int64_t j = 0; j < size; ++j) out[j] = static_cast<R>(in[j]);
    }
  });
}

#ifdef FASTWEIGHTS_PAIRS
// As the processor converts, which takes subnormal numbers for 0, as its products do.
inline void narrow(int64_t size, const float* in, BFloat16* out) {
  constexpr int L = Simd<float>::lanes;
  for (int64_t i = 0; i < size; i += L) {
    const __mmask16 those = size - i < L ? (1 << (size - i)) - 1 : 0xffff;
    _mm256_mask_storeu_epi16(out + i, those, (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(those, in + i)));
  }
}
#endif

// A row in another type; `Paired` says that products are of pairs.
template <bool Paired, class R, class Stored>
void convert(int64_t size, const R* in, Stored* out) {
  if constexpr (Paired && std::is_same_v<Stored, BFloat16>) narrow(size, in, out);
  else for (int64_t j = 0; j < size; ++j) out[j] = static_cast<Stored>(in[j]);
}

// The other way; with `add`, to what is there.
template <bool Paired = false, class R>
void store_rows(const View& x, int64_t b, int64_t t, int64_t count, int64_t h, int64_t from, int64_t size, const R* in,
                int64_t stride, bool add = false) {
  typed(x, x.at(b, t, h) + from * x.bytes, [&](auto* out) {
    using Stored = std::decay_t<decltype(*out)>;
    for (int64_t i = 0; i < count; ++i, out += x.time, in += stride) {
      if (add) {
        for (int64_t j = 0; j < size; ++j) out[j] = static_cast<Stored>(static_cast<R>(out[j]) + in[j]);
      } else {
        convert<Paired>(size, in, out);
      }
    }
  });
}
