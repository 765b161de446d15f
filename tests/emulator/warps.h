// Blocks of warps on a CPU, one fiber a thread of the GPU: enough to run kernel/paged_source.
//
// Threads run in turn until they meet at a barrier of their block or exchange numbers with their
// warp. Blocks run one after the other. A load that is not aligned to its size ends the program.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

struct Index3 { int x, y, z; };
static Index3 threadIdx, blockIdx, gridDim, blockDim;

namespace emulator {
struct Meeting { int arrived = 0; long round = 0; };
struct Fiber {
  ucontext_t context;
  jmp_buf point;
  std::vector<char> stack;
  bool begun, done;
  int exchanges;
};

static std::vector<Fiber> fibers;
static jmp_buf scheduler;
static int current;
static long blocks;  // that were begun
static std::function<void()> body;
static Meeting warp_meetings[32], block_meeting;
static unsigned numbers[32][2][32][8];  // of a warp, this exchange's and the last one's, by lane

inline void fail(const char* what) { std::fprintf(stderr, "emulator: %s\n", what); std::abort(); }

// A context is used to begin a thread only: going on in one asks the system twice.
inline void go_on(Fiber& fiber) {
  if (_setjmp(scheduler)) return;
  if (fiber.begun) _longjmp(fiber.point, 1);
  fiber.begun = true;
  setcontext(&fiber.context);
}
inline void rest() {
  int me = current;
  if (!_setjmp(fibers[me].point)) _longjmp(scheduler, 1);
  current = me;
  threadIdx = {me, 0, 0};
}
inline void meet(Meeting& meeting, int expected) {
  long round = meeting.round;
  if (++meeting.arrived == expected) { meeting.arrived = 0; ++meeting.round; return; }
  while (meeting.round == round) rest();
}
// Every lane of a warp gives `count` numbers and sees those of all.
inline unsigned (*exchange(const unsigned* mine, int count))[8] {
  int warp = current / 32;
  auto& shared = numbers[warp][fibers[current].exchanges++ & 1];
  std::memcpy(shared[current % 32], mine, count * sizeof(unsigned));
  meet(warp_meetings[warp], 32);
  return shared;
}
inline void start() {
  body();
  fibers[current].done = true;
  _longjmp(scheduler, 1);
}
inline void run_block(int threads) {
  ++blocks;
  fibers.resize(threads);
  block_meeting = {};
  for (auto& meeting : warp_meetings) meeting = {};
  for (auto& fiber : fibers) {
    fiber.stack.resize(1 << 16);
    fiber.begun = fiber.done = false;
    fiber.exchanges = 0;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    makecontext(&fiber.context, start, 0);
  }
  for (int left = threads, turns = 0; left; ++turns) {
    if (turns > 10000000) fail("the threads of a block wait for each other for ever");
    left = 0;
    for (int i = 0; i < threads; ++i) {
      if (fibers[i].done) continue;
      current = i;
      threadIdx = {i, 0, 0};
      go_on(fibers[i]);
      left += !fibers[i].done;
    }
  }
}
// The last block first: no block may count on those before it.
inline void launch(int columns, int rows, int threads, std::function<void()> what) {
  body = what;
  gridDim = {columns, rows, 1};
  blockDim = {threads, 1, 1};
  for (int y = rows; y-- > 0;)
    for (int x = columns; x-- > 0;) {
      blockIdx = {x, y, 0};
      run_block(threads);
    }
}
inline void aligned(const void* at, int bytes) {
  if (reinterpret_cast<std::uintptr_t>(at) % bytes) fail("a load is not aligned");
}
inline float float_of(unsigned bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline unsigned bits_of(float x) { unsigned bits; std::memcpy(&bits, &x, 4); return bits; }
inline float shuffle_xor(float x, int reach) {
  unsigned bits = bits_of(x);
  return float_of(exchange(&bits, 1)[(current % 32) ^ reach][0]);
}
inline void barrier() { meet(block_meeting, fibers.size()); }
}  // namespace emulator

struct BFloat {
  unsigned short bits = 0;
  BFloat() = default;
  explicit BFloat(float x) {
    unsigned u = emulator::bits_of(x);
    bits = std::isnan(x) ? 0x7fc0 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  }
  operator float() const { return emulator::float_of(unsigned(bits) << 16); }
};
struct Half {
  unsigned short bits = 0;
  Half() = default;
  explicit Half(float x) {
    unsigned sign = emulator::bits_of(x) >> 16 & 0x8000;
    float size = std::fabs(x);
    if (std::isnan(x)) bits = 0x7e00;
    else if (size == 0.0f) bits = sign;
    else if (size >= 65520.0f) bits = sign | 0x7c00;
    else {
      int exponent;
      std::frexp(size, &exponent);
      int unit = exponent - 11 < -24 ? -24 : exponent - 11;
      unsigned steps = unsigned(std::nearbyint(std::ldexp(size, -unit)));
      bits = sign | (steps + (unsigned(unit + 24) << 10));
    }
  }
  operator float() const {
    int exponent = bits >> 10 & 31, steps = bits & 1023;
    float size = exponent == 31 ? (steps ? NAN : INFINITY)
        : exponent ? std::ldexp(float(1024 + steps), exponent - 25) : std::ldexp(float(steps), -24);
    return bits & 0x8000 ? -size : size;
  }
};
