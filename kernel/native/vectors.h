// Vectors: elementwise loops that the compiler makes vectors of.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace mlxtape {

inline float sum_of_squares(const float* x, long count) {
  float sums[16] = {};
  long i = 0;
  for (; i + 16 <= count; i += 16)
    for (long j = 0; j < 16; j++) sums[j] += x[i + j] * x[i + j];
  float sum = 0;
  for (long j = 0; j < 16; j++) sum += sums[j];
  for (; i < count; i++) sum += x[i] * x[i];
  return sum;
}

// 2^y for y in [-126, 126], relative error below 2.5e-7: a whole power, which is an exponent's
// bits, times a minimax polynomial of what is left.
inline float exp2_of(float y) {
  float whole = __builtin_rintf(y), f = y - whole;
  float p = 0.0013277938903218571f;
  p = p * f + 0.00967575764075293f;
  p = p * f + 0.05550709598138937f;
  p = p * f + 0.24022114337835304f;
  p = p * f + 0.6931469682296734f;
  p = p * f + 1.0000000733176138f;
  int32_t bits = (static_cast<int32_t>(whole) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return p * power;
}

// x / (1 + e^-x) * other.
inline void silu_times(const float* x, const float* other, long count, float* out) {
  constexpr float kLog2e = 1.4426950408889634f;
  for (long i = 0; i < count; i++) {
    float y = std::min(126.0f, std::max(-126.0f, x[i] * -kLog2e));
    out[i] = x[i] / (1.0f + exp2_of(y)) * other[i];
  }
}

inline void turn_head(const float* in, const float* sines, const float* cosines, long half,
                      bool traditional, float* out) {
  if (traditional) {
    for (long i = 0; i < half; i++) {
      float a = in[2 * i], b = in[2 * i + 1];
      out[2 * i] = a * cosines[i] - b * sines[i];
      out[2 * i + 1] = a * sines[i] + b * cosines[i];
    }
    return;
  }
  for (long i = 0; i < half; i++) {
    float a = in[i], b = in[half + i];
    out[i] = a * cosines[i] - b * sines[i];
    out[half + i] = a * sines[i] + b * cosines[i];
  }
}

}  // namespace mlxtape
