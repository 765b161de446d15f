// The words of wide.h that only Hopper (sm_90a) has. The tests' emulator has its own.
#pragma once
#ifndef EMULATED
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
#define WGMMA(kind, n, sums, a, b)                                                          \
  "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                                \
  "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." kind "." kind " {" sums "}, " a ", " b   \
  ", p, 1, 1, 0, 0;\n}"
#define MULTIPLY64(T, kind)                                                                 \
  FN void multiply64(float (&d)[4], const T* a, const T* b) {                               \
    asm volatile(WGMMA(kind, "8", "%0,%1,%2,%3", "%4", "%5")                                \
                 : FOUR(d, 0) : "l"(matrix_at(a)), "l"(matrix_at(b)));                      \
  }                                                                                         \
  FN void multiply64(float (&d)[8], const T* a, const T* b) {                               \
    asm volatile(WGMMA(kind, "16", "%0,%1,%2,%3,%4,%5,%6,%7", "%8", "%9")                   \
                 : FOUR(d, 0), FOUR(d, 4) : "l"(matrix_at(a)), "l"(matrix_at(b)));          \
  }                                                                                         \
  FN void multiply64(float (&d)[16], const T* a, const T* b) {                              \
    asm volatile(WGMMA(kind, "32", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", \
                       "%16", "%17")                                                        \
                 : SIXTEEN(d, 0) : "l"(matrix_at(a)), "l"(matrix_at(b)));                   \
  }                                                                                         \
  FN void multiply64(float (&d)[32], const T* a, const T* b) {                              \
    asm volatile(WGMMA(kind, "64", "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
                       "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31",   \
                       "%32", "%33")                                                        \
                 : SIXTEEN(d, 0), SIXTEEN(d, 16) : "l"(matrix_at(a)), "l"(matrix_at(b)));   \
  }
MULTIPLY64(__nv_bfloat16, "bf16")
MULTIPLY64(__half, "f16")
#endif
