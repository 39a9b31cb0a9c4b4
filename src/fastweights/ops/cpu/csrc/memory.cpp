// The family's recurrence W_t = a_t W_{t-1} - e_t (a_t W_{t-1} k_t) k_t^T + w_t v_t k_t^T, y_t = W_t q_t, on the CPU.
// The decay a_t is one number, or one for each row of the state, that is for each key channel.
//
// Time is cut into chunks of C steps, and the state before each of them is kept for the backward pass. A chunk is
// copied into padded rows of float or double first, whatever the strides and the dtype of the inputs, unless the
// forward pass can use the rows where they lie. Both passes take four tokens at a time, by the equations in quad.h. For
// large states the backward pass takes a whole chunk instead, as a few matrix products, by the equations of
// ops/chunked, which docs/maths.md derives; see products.h. Where `pairs` are asked for, large states are multiplied in
// bfloat16, both ways; see pairs.h.
//
// Work is shared out by sequence and head. Where these are fewer than the threads, the forward pass also splits the
// columns of the state, which do not know of each other. So does the backward pass for the gradients of the states;
// with these at hand, every chunk is on its own. All ways of sharing out give the same bits.
#include <atomic>
#include <memory>

#include "chunk.h"
#include "threads.h"

namespace {

// Calls work(chunk, i) for all i < count, on as many threads as PyTorch uses.
template <class R, class E, class Work>
Outcome share_out(const Call& call, bool backward, int64_t threads, int64_t count, const Work& work) {
  threads = std::min(threads, count);
  struct Shared {
    const Call& call;
    const Work& work;
    const bool backward;
    Shares shares;
    std::atomic<bool> failed{false}, finite{true};
  } shared{call, work, backward, Shares(threads, count)};
  const auto worker = [](int64_t thread, int64_t, void* context) {
    Shared& shared = *static_cast<Shared*>(context);
    Chunk<R, E> chunk(shared.call, shared.backward);
    if (!chunk.ready()) shared.failed = true;
    for (int64_t seen = 0, i; !shared.failed && (i = shared.shares.next(thread, seen)) >= 0;) shared.work(chunk, i);
    if (!chunk.finite) shared.finite = false;
  };
  if (parallel_for(0, threads, 1, worker, &shared) != 0 || shared.failed) return kNoMemory;
  return shared.finite ? kFinite : kNotFinite;
}

template <class R, class E>
Outcome run(const Call& call, bool backward) {
  const int64_t heads = call.N * call.H, threads = number_of_threads(), lanes = Simd<R>::lanes;
  auto first = std::make_unique<int64_t[]>(call.N + 1);
  for (int64_t i = 0; i < call.N; ++i) {
    const int64_t length = call.bounds[i + 1] - call.bounds[i];
    first[i + 1] = first[i] + (length + call.C - 1) / call.C;
  }
  const int64_t vectors = padded<R>(call.M) / lanes, wanted = std::min(vectors, (threads + heads - 1) / heads);
  const int64_t columns = (vectors + wanted - 1) / wanted * lanes, pieces = (call.M + columns - 1) / columns;
  const auto job = [&](int64_t i, int64_t column, int64_t columns) {
    const int64_t sequence = i / call.H, start = call.packed ? call.bounds[sequence] : 0;
    const int64_t end = start + call.bounds[sequence + 1] - call.bounds[sequence];
    return Job{sequence, call.packed ? 0 : sequence, i % call.H, start, end, first[sequence], column,
               std::min(columns, call.M - column)};
  };
  const auto piece = [&](int64_t i) { return job(i / pieces, i % pieces * columns, columns); };
  if (!backward) {
    return share_out<R, E>(call, false, threads, heads * pieces,
                        [&](Chunk<R, E>& chunk, int64_t i) { chunk.forward(piece(i)); });
  }
  if (!call.after) {
    return share_out<R, E>(call, true, threads, heads / call.group, [&](Chunk<R, E>& chunk, int64_t i) {
      for (int64_t j = 0; j < call.group; ++j) chunk.backward(job(i * call.group + j, 0, call.M), true);
    });
  }
  const Outcome walked = share_out<R, E>(call, true, threads, heads * pieces,
                                      [&](Chunk<R, E>& chunk, int64_t i) { chunk.backward(piece(i), false); });
  if (walked == kNoMemory) return walked;
  const int64_t groups = call.H / call.group;
  return share_out<R, E>(call, true, threads, first[call.N] * groups, [&](Chunk<R, E>& chunk, int64_t i) {
    const int64_t c = i / groups;
    const int64_t sequence = std::upper_bound(first.get(), first.get() + call.N, c) - first.get() - 1;
    for (int64_t j = 0; j < call.group; ++j) {
      const int64_t head = sequence * call.H + i % groups * call.group + j;
      chunk.backward_alone(job(head, 0, call.M), c - first[sequence]);
    }
  });
}

int run(const Call& call, bool wide, bool backward) {
  if (wide) return run<double, double>(call, backward);
  return kPairs && call.pairs ? run<float, Pair>(call, backward) : run<float, float>(call, backward);
}

}  // namespace

// Whether a call may ask for `pairs`.
extern "C" int fastweights_pairs() { return kPairs; }

// Both return an Outcome.
extern "C" int fastweights_forward(const Call* call, int wide) { return run(*call, wide, false); }

extern "C" int fastweights_backward(const Call* call, int wide) { return run(*call, wide, true); }
