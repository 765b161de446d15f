// What kernel/paged_source takes from CUDA, on emulator/warps.h.
#pragma once
#include "warps.h"

#define EMULATED
#define FN inline
#define __shared__ static
typedef BFloat __nv_bfloat16;
typedef Half __half;
struct uint4 { unsigned x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline unsigned atomicInc(unsigned* at, unsigned top) {
  unsigned was = *at;
  *at = was >= top ? 0 : was + 1;
  return was;
}
inline void barrier() { emulator::barrier(); }
inline void __syncthreads() { emulator::barrier(); }
inline void __threadfence() {}
inline unsigned atomicAdd(unsigned* at, unsigned x) { unsigned was = *at; *at += x; return was; }
inline float shuffle_xor(float x, int reach) { return emulator::shuffle_xor(x, reach); }
template <typename T> inline T constant(const T* at) { return *at; }
inline float fetched(const float* at) { return *at; }
inline void fetch_four(const float* at, float* into) {
  emulator::aligned(at, 16);
  std::memcpy(into, at, 16);
}
inline void store_four(float* at, const float* four) {
  emulator::aligned(at, 16);
  std::memcpy(at, four, 16);
}
inline uint4 load16(const void* at) {
  emulator::aligned(at, 16);
  uint4 x;
  std::memcpy(&x, at, 16);
  return x;
}
inline uint4 load16_again(const void* at) { return load16(at); }
inline float cosine(float x) { return std::cos(x); }
inline float sine(float x) { return std::sin(x); }
using emulator::bits_of;
using emulator::float_of;
inline float inverse_root(float x) { return 1.0f / std::sqrt(x); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned select) {
  std::uint64_t both = a | std::uint64_t(b) << 32;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= unsigned(both >> 8 * (select >> 4 * i & 7) & 255) << 8 * i;
  return out;
}
template <typename T> inline T half_of(unsigned x, bool high) {
  T t;
  t.bits = high ? x >> 16 : x & 0xffff;
  return t;
}
template <typename T> inline float low_of(unsigned x, T) { return half_of<T>(x, false); }
template <typename T> inline float high_of(unsigned x, T) { return half_of<T>(x, true); }
template <typename T> inline unsigned packed(float low, float high, T) {
  return T(low).bits | unsigned(T(high).bits) << 16;
}
inline unsigned turned(unsigned x) {
  auto all = emulator::exchange(&x, 1);
  int lane = emulator::current % 32, row = lane / 4, column = lane % 4 * 2;
  auto number = [&](int r, int c) { return all[r * 4 + c / 2][0] >> 16 * (c % 2) & 0xffff; };
  return number(column, row) | number(column + 1, row) << 16;
}
// PTX: mma.m16n8k16, the lanes' numbers as tensor.h says.
template <typename T>
inline void multiply(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                     unsigned b1, T) {
  unsigned mine[6] = {a0, a1, a2, a3, b0, b1};
  auto all = emulator::exchange(mine, 6);
  int lane = emulator::current % 32;
  for (int i = 0; i < 4; ++i) {
    int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      unsigned a = all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      unsigned b = all[column * 4 + k % 8 / 2][4 + k / 8];
      d[i] += float(half_of<T>(a, k % 2)) * float(half_of<T>(b, k % 2));
    }
  }
}
