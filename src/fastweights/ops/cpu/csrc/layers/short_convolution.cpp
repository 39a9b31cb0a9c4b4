// A short causal convolution of each channel by itself, with SiLU, forwards and backwards.
//
// A job is `kChannels` channels of one sequence, or in the backward pass of some sequences. It walks through time once
// with the inputs that the next output sees in a ring. Padding does not enter the ring, and where a text starts the ring
// is emptied, so that nothing is ever multiplied by zero to be left out. The backward pass keeps a gradient beside each
// input of the ring, which is complete when the input leaves it.
#include "call.h"
#include "simd.h"
#include "threads.h"

namespace {

constexpr int64_t kChannels = 64, kMostTaps = 16, kNowhere = INT64_MIN;

// Mirrored by `Convolution` in short_convolution.py. Bounds are there for packed sequences, `parts` of the gradients of
// weight and bias, (parts, C, taps + 1), in the backward pass.
struct Convolution {
  int64_t B, T, N, C, taps, silu, parts;
  const int64_t* bounds;
  const bool *mask, *starts;
  View x, weight, bias, recent, y, recent_end;
  View dy, drecent_end, dx, drecent;
  double* dweight;
};

template <class R>
class Walk {
 public:
  Walk(const Convolution& call, int64_t block) : call(call), taps(call.taps), channel(block * kChannels) {
    width = std::min(kChannels, call.C - channel);
    for (int64_t i = 0; i < width; ++i) {
      R row[kMostTaps];
      load_rows(call.weight, channel + i, 0, 1, 0, 0, taps, row, 0);
      for (int64_t j = 0; j < taps; ++j) weight[j][i] = row[j];
    }
    if (call.bias.data) load_rows(call.bias, 0, 0, 1, 0, channel, width, bias, 0);
  }

  void forward(int64_t n) {
    walk(n, [&](int64_t b, int64_t t) {
      convolve();
      if (call.silu) {
        open();
        each([&](int64_t i) { vector(out + i) *= vector(gate + i); });
      }
      store(call.y, b, t, out);
    });
    for (int64_t i = 0; i < taps - 1; ++i) store(call.recent_end, n, i, inputs[slot(taps - 2 - i)]);
  }

  void backward(int64_t n) {
    walk(n, [&](int64_t b, int64_t t) {
      load(call.dy, b, t, slope);
      if (call.silu) {
        convolve();
        open();
        // d silu(x) = s (1 + x (1 - s))
        each([&](int64_t i) {
          const auto s = vector(gate + i);
          vector(slope + i) *= s * (R(1) + vector(out + i) * (R(1) - s));
        });
      }
      for (int64_t j = 0; j < taps; ++j) {
        R *input = inputs[slot(j)], *gradient = gradients[slot(j)];
        each([&](int64_t i) {
          vector(gradient + i) += vector(weight[j] + i) * vector(slope + i);
          vector(dweight[j] + i) += vector(input + i) * vector(slope + i);
        });
      }
      each([&](int64_t i) { vector(dweight[taps] + i) += vector(slope + i); });
      if (++summed == kTogether) add_up();
    });
    for (int64_t i = 0; i < taps - 1; ++i) {
      if (!call.drecent_end.data) break;
      R* gradient = gradients[slot(taps - 2 - i)];
      load(call.drecent_end, n, i, out);
      each([&](int64_t c) { vector(gradient + c) += vector(out + c); });
    }
    for (int64_t j = 0; j < taps; ++j) leave(slot(j));
  }

  void store_weight_gradient(int64_t part) {
    add_up();
    for (int64_t i = 0; i < width; ++i) {
      double* row = call.dweight + (part * call.C + channel + i) * (taps + 1);
      for (int64_t j = 0; j <= taps; ++j) row[j] = totals[j][i];
    }
  }

 private:
  // Terms that are added in the precision of the inputs before they go into a sum of doubles.
  static constexpr int64_t kTogether = 128;

  const Convolution& call;
  const int64_t taps, channel;
  int64_t width, head = 0, batch = 0, sequence = 0, summed = 0;
  int64_t places[kMostTaps];  // of the inputs in the ring: a time, ~i for i-th that was carried in, or kNowhere
  alignas(kVectorBytes) R inputs[kMostTaps][kChannels] = {}, gradients[kMostTaps][kChannels] = {};
  alignas(kVectorBytes) R weight[kMostTaps][kChannels] = {}, dweight[kMostTaps + 1][kChannels] = {};
  alignas(kVectorBytes) R bias[kChannels] = {}, out[kChannels] = {}, gate[kChannels] = {}, slope[kChannels] = {};
  double totals[kMostTaps + 1][kChannels] = {};

  template <class Use>
  static void each(const Use& use) {
#pragma GCC unroll 8
    for (int64_t i = 0; i < kChannels; i += Simd<R>::lanes) use(i);
  }

  void load(const View& x, int64_t b, int64_t t, R* to) const { load_rows(x, b, t, 1, 0, channel, width, to, 0); }
  void store(const View& x, int64_t b, int64_t t, const R* from) const { store_rows(x, b, t, 1, 0, channel, width, from, 0); }

  // Where the ring has the input that came j before the last.
  int64_t slot(int64_t j) const { return head >= j ? head - j : head - j + taps; }

  // What a slot of the ring holds is not seen any more.
  void leave(int64_t i) {
    if (!call.dx.data || places[i] == kNowhere) return;
    if (places[i] >= 0) store(call.dx, batch, places[i], gradients[i]);
    else if (call.drecent.data) store(call.drecent, sequence, ~places[i], gradients[i]);
    places[i] = kNowhere;
  }

  void enter(int64_t place) {
    head = head + 1 == taps ? 0 : head + 1;
    leave(head);
    places[head] = place;
    std::fill_n(gradients[head], kChannels, R(0));
  }

  // Calls `step(b, t)` for every token that counts, with its input at the head of the ring.
  template <class Step>
  void walk(int64_t n, const Step& step) {
    batch = call.bounds ? 0 : n, sequence = n;
    const int64_t start = call.bounds ? call.bounds[n] : 0, end = call.bounds ? call.bounds[n + 1] : call.T;
    std::fill_n(places, taps, kNowhere);
    for (int64_t i = 0; i < taps - 1; ++i) {
      enter(~i);
      if (call.recent.data) load(call.recent, n, i, inputs[head]);
      else std::fill_n(inputs[head], kChannels, R(0));
    }
    for (int64_t t = start; t < end; ++t) {
      const int64_t token = batch * call.T + t;
      if (call.starts && call.starts[token]) {
        for (int64_t j = 0; j < taps; ++j) {
          leave(j);
          std::fill_n(inputs[j], kChannels, R(0));
        }
      }
      if (call.mask && !call.mask[token]) {
        std::fill_n(out, kChannels, R(0));
        store(call.dx.data ? call.dx : call.y, batch, t, out);
        continue;
      }
      enter(t);
      load(call.x, batch, t, inputs[head]);
      step(batch, t);
    }
  }

  void convolve() {
    constexpr int64_t vectors = kChannels / Simd<R>::lanes;
    typename Simd<R>::Vector sums[vectors];
    each([&](int64_t i) { sums[i / Simd<R>::lanes] = vector(bias + i); });
    for (int64_t j = 0; j < taps; ++j) {
      const R* input = inputs[slot(j)];
      each([&](int64_t i) { sums[i / Simd<R>::lanes] += vector(weight[j] + i) * vector(input + i); });
    }
    each([&](int64_t i) { vector(out + i) = sums[i / Simd<R>::lanes]; });
  }

  // gate = sigmoid(out).
  void open() {
    each([&](int64_t i) { vector(gate + i) = -vector(out + i); });
    exponential(kChannels, gate, gate);
    each([&](int64_t i) { vector(gate + i) = R(1) / (R(1) + vector(gate + i)); });
  }

  void add_up() {
    for (int64_t j = 0; j <= taps; ++j) {
      for (int64_t i = 0; i < kChannels; ++i) totals[j][i] += dweight[j][i], dweight[j][i] = 0;
    }
    summed = 0;
  }
};

template <class R>
void run(const Convolution& call) {
  const int64_t blocks = (call.C + kChannels - 1) / kChannels, size = call.B * call.T * call.C * (2 + call.silu);
  if (!call.dx.data) {
    return for_each_job(call.N * blocks, size, [&](int64_t i) { Walk<R>(call, i % blocks).forward(i / blocks); });
  }
  for_each_job(call.parts * blocks, 2 * size, [&](int64_t i) {
    const int64_t part = i / blocks;
    Walk<R> walk(call, i % blocks);
    for (int64_t n = part * call.N / call.parts; n < (part + 1) * call.N / call.parts; ++n) walk.backward(n);
    walk.store_weight_gradient(part);
  });
}

}  // namespace

extern "C" void fastweights_short_convolution(const Convolution* call) {
  call->x.kind == kFloat64 ? run<double>(*call) : run<float>(*call);
}
