// Asks the memory for rows before they are needed, a few at a time: of many requests at once it takes the first and
// forgets the others.
#pragma once

#include <algorithm>
#include <cstdint>

class Ahead {
 public:
  // Forgets what was not asked for yet.
  void clear() { rows_ = next_ = 0; }

  // `count` rows of `size` bytes that are `stride` bytes apart, to be read or written.
  void add(const char* data, int64_t stride, int64_t count, int64_t size, bool write) {
    if (rows_ < kMost && count > 0) waiting_[rows_++] = {data, stride, count, size, write};
  }

  // To be called between other things, many times for what was added: asks for that many rows.
  void ask(int64_t most = kAtOnce) {
    while (most > 0 && next_ < rows_) {
      Rows& rows = waiting_[next_];
      const int64_t count = std::min(most, rows.count);
      const char* data = rows.data;
      for (int64_t i = 0; i < count; ++i, data += rows.stride) {
        for (int64_t j = 0; j < rows.size; j += kLine) {
          rows.write ? __builtin_prefetch(data + j, 1, 2) : __builtin_prefetch(data + j, 0, 3);
        }
      }
      rows.data = data, rows.count -= count, most -= count;
      if (!rows.count) ++next_;
    }
  }

 private:
  struct Rows {
    const char* data;
    int64_t stride, count, size;
    bool write;
  };
  // A product of a chunk's tokens has about as many parts as a sixth of them, and there are six or more products.
  static constexpr int kMost = 8, kAtOnce = 6;
  static constexpr int64_t kLine = 64;
  Rows waiting_[kMost];
  int rows_ = 0, next_ = 0;
};
