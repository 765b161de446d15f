// Vectors: as wide as a register, powers of two, and loops over the numbers of a row.
#pragma once

#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace mlxtape {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vector __attribute__((vector_size(kLanes * 4)));
typedef int Ints __attribute__((vector_size(kLanes * 4)));

template <class V = Vector>
inline V load(const float* from) {
  V loaded;
  std::memcpy(&loaded, from, sizeof(V));
  return loaded;
}

template <class V>
inline void store(float* to, V vector) {
  std::memcpy(to, &vector, sizeof(V));
}

template <class V = Vector>
inline V spread(float number) {
  return number - V{};
}

// The larger of two; `b` where one is no number, so that it is not lost.
inline Vector larger(Vector a, Vector b) {
#if defined(__AVX512F__)
  return (Vector)_mm512_maskz_max_ps(0xFFFF, (__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}

// 2^x for x <= 0: exactly 1 at 0, and exactly 0 far below.
inline Vector power2(Vector x) {
  x = larger(spread(-150.0f), x);
#if defined(__AVX512F__)
  Vector whole = (Vector)_mm512_maskz_roundscale_ps(0xFFFF, (__m512)x, 0);
#else
  x = larger(spread(-127.0f), x);
  // A sum of this size has no room for a fraction, and its last bits are the whole number.
  const Vector shift = spread(12582912.0f);
  Vector shifted = x + shift;
  Vector whole = shifted - shift;
#endif
  Vector r = x - whole;  // in [-1/2, 1/2]; least squares of the relative error, 1e-8 at most
  Vector sum = spread(0.00015370705f);
  sum = sum * r + 0.0013399849f;
  sum = sum * r + 0.0096183736f;
  sum = sum * r + 0.05550329f;
  sum = sum * r + 0.24022648f;
  sum = sum * r + 0.69314718f;
  sum = sum * r + 1.0f;
#if defined(__AVX512F__)
  return (Vector)_mm512_maskz_scalef_ps(0xFFFF, (__m512)sum, (__m512)whole);
#else
  Ints exponent = ((Ints)shifted - 0x4B400000 + 127) << 23;
  return sum * (Vector)exponent;
#endif
}

inline float power2_of(float x) { return power2(spread(x))[0]; }

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

// x / (1 + e^-x) * other: SiLU (Elfwing et al., 2018), by a power that is at most 1.
inline Vector silu_times(Vector x, Vector other) {
  constexpr float kLog2e = 1.4426950408889634f;
  Vector power = power2((x < 0.0f ? x : -x) * kLog2e);
  return x * (x < 0.0f ? power : spread(1.0f)) / (1.0f + power) * other;
}

inline void silu_times(const float* x, const float* other, long count, float* out) {
  long i = 0;
  for (; i + kLanes <= count; i += kLanes) store(out + i, silu_times(load(x + i), load(other + i)));
  for (; i < count; i++) out[i] = silu_times(spread(x[i]), spread(other[i]))[0];
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
