// What backend.py passes and gets back: tensors as addresses and strides, of any of four types.
#pragma once

#include <cstdint>
#include <type_traits>

#include "narrow.h"

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
// share a head of q and k. Decays are one per key channel with `per_key`, and natural logarithms with `log`.
struct Call {
  int64_t N, H, D, M, C;
  int64_t packed, group, per_key, log;
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

// The other way; with `add`, to what is there.
template <class R>
void store_rows(const View& x, int64_t b, int64_t t, int64_t count, int64_t h, int64_t from, int64_t size, const R* in,
                int64_t stride, bool add = false) {
  typed(x, x.at(b, t, h) + from * x.bytes, [&](auto* out) {
    using Stored = std::decay_t<decltype(*out)>;
    for (int64_t i = 0; i < count; ++i, out += x.time, in += stride) {
      if (add) {
        for (int64_t j = 0; j < size; ++j) out[j] = static_cast<Stored>(static_cast<R>(out[j]) + in[j]);
      } else {
        for (int64_t j = 0; j < size; ++j) out[j] = static_cast<Stored>(in[j]);
      }
    }
  });
}
