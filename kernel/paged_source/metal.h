// The words of decode.h in Metal. Nothing here was run on Metal: kernels are checked at load,
// against the gather, and left alone if they disagree.
#pragma once
#define FN inline
#define GLOBAL device
#define GROUP threadgroup
#define LOCAL thread
FN void barrier() { threadgroup_barrier(metal::mem_flags::mem_threadgroup); }
FN float shuffle_xor(float x, int reach) { return metal::simd_shuffle_xor(x, ushort(reach)); }
FN float float_of(unsigned x) { return as_type<float>(x); }
FN float power2(float x) { return metal::exp2(x); }
FN float larger(float a, float b) { return metal::max(a, b); }
template <typename T> FN T narrow(float x) { return T(x); }
FN float fetched(GLOBAL const float* at) { return *at; }
FN void fetch_four(GLOBAL const float* at, LOCAL float* into) {
  for (int i = 0; i < 4; ++i) into[i] = at[i];
}
