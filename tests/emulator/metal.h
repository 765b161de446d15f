// What kernel/paged_source takes from Metal, on emulator/warps.h.
#pragma once
#include "warps.h"

#define device
#define threadgroup
#define thread
typedef BFloat bfloat16_t;
typedef Half half;
typedef unsigned short ushort;
#define thread_position_in_threadgroup threadIdx
#define threadgroup_position_in_grid blockIdx
#define threads_per_threadgroup blockDim
template <typename To, typename From> inline To as_type(From from) {
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
namespace metal {
enum class mem_flags { mem_threadgroup };
inline float simd_shuffle_xor(float x, ushort reach) { return emulator::shuffle_xor(x, reach); }
inline float exp2(float x) { return std::exp2(x); }
inline float max(float a, float b) { return std::fmax(a, b); }
}  // namespace metal
inline void threadgroup_barrier(metal::mem_flags) { emulator::barrier(); }
