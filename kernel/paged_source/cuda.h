// The words of decode.h, tensor.h, product.h and sample.h in CUDA. The tests' emulator has its own
// for most of them.
#pragma once
#ifndef EMULATED
#define FN __device__ __forceinline__
FN void barrier() { __syncthreads(); }
FN float shuffle_xor(float x, int reach) { return __shfl_xor_sync(0xffffffffu, x, reach); }
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
FN float cosine(float x) { return cosf(x); }
FN float sine(float x) { return sinf(x); }
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
// Memory that the threads of a block share, as much as the launch asked for.
FN void* shared_room() {
  extern __shared__ __align__(1024) unsigned char room[];
  return room;
}
FN unsigned shared_at(const void* at) { return (unsigned)__cvta_generic_to_shared(at); }
// 16 bytes into shared memory, zeros unless there; they are there once their group was waited for.
FN void copy16(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :: "r"(shared_at(to)), "l"(from), "r"(there ? 16 : 0) : "memory");
}
FN void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> FN void wait_copies() {
  asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
}
// What this thread wrote into shared memory, to the matrix instructions behind the next barrier.
FN void show_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Products of a warpgroup (PTX: wgmma): D[64, N] += A[64, 16] B[16, N], both in shared memory, rows of
// 128 bytes, of whose pieces of 16 the one for place p of row r stands at p ^ r % 8.
FN void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FN void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
FN void wait_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
FN unsigned long long matrix_at(const void* at) {
  return (shared_at(at) & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(d, i) FOUR(d, i), FOUR(d, i + 4), FOUR(d, i + 8), FOUR(d, i + 12)
#define WGMMA(n, sums, a, b)                                                \
  "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                \
  "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" sums "}, " a ", " b \
  ", p, 1, 1, 0, 0;\n}"
FN void multiply64(float (&d)[8], const __nv_bfloat16* a, const __nv_bfloat16* b) {
  asm volatile(WGMMA("16", "%0,%1,%2,%3,%4,%5,%6,%7", "%8", "%9")
               : FOUR(d, 0), FOUR(d, 4) : "l"(matrix_at(a)), "l"(matrix_at(b)));
}
FN void multiply64(float (&d)[16], const __nv_bfloat16* a, const __nv_bfloat16* b) {
  asm volatile(WGMMA("32", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", "%16", "%17")
               : SIXTEEN(d, 0) : "l"(matrix_at(a)), "l"(matrix_at(b)));
}
FN void multiply64(float (&d)[32], const __nv_bfloat16* a, const __nv_bfloat16* b) {
  asm volatile(WGMMA("64", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"
                     "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31", "%32", "%33")
               : SIXTEEN(d, 0), SIXTEEN(d, 16) : "l"(matrix_at(a)), "l"(matrix_at(b)));
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
