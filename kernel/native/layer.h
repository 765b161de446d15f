// Layer: what stands beside a product in a transformer's layer, over rows of float32.
#pragma once

#include <cmath>
#include <cstdint>

#include "threads.h"
#include "vectors.h"

namespace mlxtape {

inline constexpr long kRowsAtOnce = 16;  // of a thread; fewer rows than that are not worth a second

// work(row) for all rows, runs of them on a thread each.
template <class Work>
void by_rows(long rows, Work&& work) {
  parallel((rows + kRowsAtOnce - 1) / kRowsAtOnce, [&](long part) {
    long end = std::min(rows, (part + 1) * kRowsAtOnce);
    for (long row = part * kRowsAtOnce; row < end; row++) work(row);
  });
}

// out += x.
inline void add(const float* x, long count, float* out) {
  constexpr long kPart = 1 << 14;
  parallel((count + kPart - 1) / kPart, [&](long part) {
    long end = std::min(count, (part + 1) * kPart);
    for (long i = part * kPart; i < end; i++) out[i] += x[i];
  });
}

// x / sqrt(mean(x^2) + eps) * weights: RMSNorm (Zhang and Sennrich, 2019).
inline void rms_norm(const float* x, const float* weights, float eps, long rows, long width,
                     float* out) {
  by_rows(rows, [=](long row) {
    const float* in = x + row * width;
    float squares = sum_of_squares(in, width);
    float factor = 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
    for (long i = 0; i < width; i++) out[row * width + i] = in[i] * factor * weights[i];
  });
}

// both: gates and what they gate, [rows, 2 * features]; out = silu(gate) * other: SwiGLU
// (Shazeer, 2020).
inline void gate(const float* both, long rows, long features, float* out) {
  by_rows(rows, [=](long row) {
    const float* gates = both + row * 2 * features;
    silu_times(gates, gates + features, features, out + row * features);
  });
}

// How queries and keys are turned (Su et al., 2021): pairs side by side, or half a head apart.
struct Turn {
  long dim;
  bool traditional;
};

// A row of all heads into queries, keys and values; the first two turned by the row's position.
inline void split(const float* all, long rows, const long counts[3], const int32_t* positions,
                  const float* rates, Turn turn, float* const parts[3]) {
  long half = turn.dim / 2, width = (counts[0] + counts[1] + counts[2]) * turn.dim;
  by_rows(rows, [=](long row) {
    float sines[512], cosines[512];
    for (long i = 0; i < half; i++) {
      float angle = static_cast<float>(positions[row]) * rates[i];
      sincosf(angle, &sines[i], &cosines[i]);
    }
    const float* in = all + row * width;
    for (int part = 0; part < 3; part++) {
      float* out = parts[part] + row * counts[part] * turn.dim;
      for (long head = 0; head < counts[part]; head++, in += turn.dim, out += turn.dim) {
        if (part == 2) std::copy(in, in + turn.dim, out);
        else turn_head(in, sines, cosines, half, turn.traditional, out);
      }
    }
  });
}

}  // namespace mlxtape
