// Runs calls of the C++ backend in a process of its own: one under a sanitizer, or of another processor.
//
// `Driver` in cpu_driver.py sends a call as it stands in its memory, and everything that the call points at. Every such
// piece gets memory of exactly its size here, the call's pointer to it is set, and after the call all pieces go back.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "threads.h"

extern "C" int fastweights_forward(const void* call, int wide);
extern "C" int fastweights_backward(const void* call, int wide);
extern "C" void fastweights_features(const void* call);
extern "C" void fastweights_gated_norm(const void* call);
extern "C" void fastweights_linear_attention(const void* call);
extern "C" int fastweights_pairs();
extern "C" void fastweights_short_convolution(const void* call);
extern "C" void fastweights_softmax(const void* call);
extern "C" void fastweights_step(const void* plan, const void* call);
extern "C" void fastweights_threads(int32_t (*parallel)(int64_t, int64_t, int64_t, ParallelFunc, void*),
                                    int32_t (*number)(uint32_t*));

namespace {

uint32_t threads = 1;

int32_t number(uint32_t* out) {
  *out = threads;
  return 0;
}

// What PyTorch does with a grain of 1, with new threads in place of a pool.
int32_t parallel(int64_t begin, int64_t end, int64_t, ParallelFunc work, void* context) {
  std::vector<std::thread> others;
  for (int64_t i = begin + 1; i < end; ++i) others.emplace_back(work, i, i + 1, context);
  if (begin < end) work(begin, begin + 1, context);
  for (auto& other : others) other.join();
  return 0;
}

void read(void* into, size_t size) {
  if (size && std::fread(into, size, 1, stdin) != 1) std::exit(1);
}

int run(const char* name, const void* plan, const void* call, int wide) {
  if (!std::strcmp(name, "fastweights_forward")) return fastweights_forward(call, wide);
  if (!std::strcmp(name, "fastweights_backward")) return fastweights_backward(call, wide);
  if (!std::strcmp(name, "fastweights_features")) return fastweights_features(call), 0;
  if (!std::strcmp(name, "fastweights_gated_norm")) return fastweights_gated_norm(call), 0;
  if (!std::strcmp(name, "fastweights_linear_attention")) return fastweights_linear_attention(call), 0;
  if (!std::strcmp(name, "fastweights_pairs")) return fastweights_pairs();
  if (!std::strcmp(name, "fastweights_short_convolution")) return fastweights_short_convolution(call), 0;
  if (!std::strcmp(name, "fastweights_softmax")) return fastweights_softmax(call), 0;
  if (!std::strcmp(name, "fastweights_step")) return fastweights_step(plan, call), 0;
  std::fprintf(stderr, "cpu_driver.cpp does not know %s\n", name);
  std::exit(1);
}

struct Piece {
  int64_t offset, size;  // of the pointer in the call; of what it points at
  int64_t first;         // piece that stands in the same memory
};

}  // namespace

int main() {
  fastweights_threads(parallel, number);
  for (char name[64]; std::fread(name, sizeof(name), 1, stdin) == 1;) {
    int64_t header[5];
    read(header, sizeof(header));
    const auto [wide, wanted, plan_size, size, count] = header;
    threads = static_cast<uint32_t>(wanted);
    auto plan = std::make_unique<char[]>(plan_size);
    read(plan.get(), plan_size);
    auto call = std::make_unique<char[]>(size);
    read(call.get(), size);
    std::vector<Piece> pieces(count);
    read(pieces.data(), count * sizeof(Piece));
    std::vector<std::unique_ptr<char[]>> memory;
    for (int64_t i = 0; i < count; ++i) {
      const Piece& piece = pieces[i];
      const bool own = piece.first == i;
      memory.push_back(own ? std::make_unique<char[]>(piece.size) : nullptr);
      if (own) read(memory.back().get(), piece.size);
      const char* data = memory[piece.first].get();
      std::memcpy(call.get() + piece.offset, &data, sizeof(data));
    }
    const int64_t outcome = run(name, plan.get(), call.get(), static_cast<int>(wide));
    std::fwrite(&outcome, sizeof(outcome), 1, stdout);
    for (int64_t i = 0; i < count; ++i) {
      if (memory[i] && pieces[i].size) std::fwrite(memory[i].get(), pieces[i].size, 1, stdout);
    }
    std::fflush(stdout);
  }
  return 0;
}
