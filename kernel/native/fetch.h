// Fetch: the K and V that one piece reads, made dense, as paged_plan.py's plan_fetch says.
#pragma once

#include <algorithm>
#include <cstdint>

#include "threads.h"

namespace mlxtape {

// plan: rows read, sink, low, start, fresh, then the piece's table. Pages are [num_blocks,
// block_size, kv_heads, dim]; rows: the step's own, [T, kv_heads, dim]; out: [kv_heads, read, dim].
struct Fetch {
  const int32_t* plan;
  float* pages;
  const float* rows;
  float* out;
  long block_size, kv_heads, dim;
};

// Rows of this step are put into the pages as well.
inline void fetch(const Fetch& it) {
  const long read = it.plan[0], sink = it.plan[1], low = it.plan[2], start = it.plan[3];
  const long fresh = it.plan[4], width = it.kv_heads * it.dim;
  const int32_t* table = it.plan + 5;
  for (long index = 0; index < read; index++) {
    long position = index < sink ? index : low + index - sink;
    long slot = table[position / it.block_size] * it.block_size + position % it.block_size;
    float* page = it.pages + slot * width;
    if (position >= start) {
      const float* row = it.rows + (fresh + position) * width;
      std::copy(row, row + width, page);
    }
    for (long head = 0; head < it.kv_heads; head++)
      std::copy_n(page + head * it.dim, it.dim, it.out + (head * read + index) * it.dim);
  }
}

}  // namespace mlxtape
