// The words of decode.h, tensor.h, product.h, wide.h and sample.h in CUDA. The tests' emulator has its own
// for most of them.
#pragma once
#ifndef EMULATED
#define FN __device__ __forceinline__
FN void barrier() { __syncthreads(); }
FN float shuffle_xor(float x, int reach) { return __shfl_xor_sync(0xffffffffu, x, reach); }
// What no launch writes while this one runs: may be read before what was written earlier.
template <typename T> FN T constant(const T* at) { return __ldg(at); }
FN float fetched(const float* at) { return __ldcg(at); }
FN void fetch_four(const float* at, float* into) {
  float4 r = __ldcg(reinterpret_cast<const float4*>(at));
  into[0] = r.x; into[1] = r.y; into[2] = r.z; into[3] = r.w;
}
FN uint4 load16(const void* at) {
  uint4 r;  // read once: past the first cache
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(at));
  return r;
}
FN uint4 load16_again(const void* at) { return *reinterpret_cast<const uint4*>(at); }
// Of any angle, to some 1e-6: without the tables that cosf and sinf keep for large ones.
FN float turns_off(float x) {
  float turns = rintf(x * 0.15915494f);
  return fmaf(turns, 1.7484556e-7f, fmaf(turns, -6.2831855f, x));
}
FN float cosine(float x) { return __cosf(turns_off(x)); }
FN float sine(float x) { return __sinf(turns_off(x)); }
FN float inverse_root(float x) { return rsqrtf(x); }
FN unsigned bits_of(float x) { return __float_as_uint(x); }
FN float float_of(unsigned x) { return __uint_as_float(x); }
// An 8 x 8 matrix of 16-bit numbers, row i in lanes 4i to 4i + 3, turned over.
FN unsigned turned(unsigned x) {
  unsigned r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}
FN void multiply(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                 unsigned b1, __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
FN void multiply(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                 unsigned b1, __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
FN unsigned packed(float low, float high, __nv_bfloat16) {
  unsigned r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
FN unsigned packed(float low, float high, __half) {
  unsigned r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
FN float low_of(unsigned x, __nv_bfloat16) { return __uint_as_float(x << 16); }
FN float high_of(unsigned x, __nv_bfloat16) { return __uint_as_float(x & 0xffff0000u); }
FN float low_of(unsigned x, __half) {
  return __half2float(__ushort_as_half((unsigned short)x));
}
FN float high_of(unsigned x, __half) {
  return __half2float(__ushort_as_half((unsigned short)(x >> 16)));
}
FN void store_four(float* at, const float* four) {
  *reinterpret_cast<float4*>(at) = make_float4(four[0], four[1], four[2], four[3]);
}
#endif
#define GLOBAL
#define GROUP
#define LOCAL
FN float power2(float x) { return exp2f(x); }
FN float larger(float a, float b) { return fmaxf(a, b); }
template <typename T> FN T narrow(float x) { return T(x); }
