// The two types of 16 bits: converted from and to float, rounded to the nearest and to even, in steps that a compiler
// can take for a whole vector at once.
#pragma once

#include <cstdint>
#include <cstring>

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
