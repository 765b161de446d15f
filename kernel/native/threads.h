// Threads: the one pool that all of this extension's kernels share.
//
// A kernel is a few dozen microseconds, so a worker spins a little for the next one before it
// sleeps: to be woken up costs as much as the kernel.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace mlxtape {

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class Pool {
 public:
  static Pool& shared() {
    static Pool* pool = new Pool();  // never destroyed: workers outlive the interpreter
    return *pool;
  }

  int threads() const { return workers_ + 1; }

  // work(index) once for each index in [0, count), on any of the threads; returns when all are
  // done. Never called from inside of work. While the workers are another caller's, it works alone.
  template <class Work>
  void run(long count, Work& work) {
    std::unique_lock<std::mutex> mine(owner_, std::defer_lock);
    if (count <= 1 || workers_ == 0 || !mine.try_lock()) {
      for (long i = 0; i < count; i++) work(i);
      return;
    }
    call_ = [](void* it, long index) { (*static_cast<Work*>(it))(index); };
    work_ = &work;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    left_.store(0, std::memory_order_relaxed);
    uint64_t turn = (state_.load(std::memory_order_relaxed) >> kTurnBits) + 1;
    state_.store(turn << kTurnBits | kOpen, std::memory_order_release);
    state_.notify_all();
    take();
    // Whoever has not come by now has nothing to do, and may not even have a core.
    uint64_t joined = state_.fetch_and(~kOpen, std::memory_order_acq_rel) & kJoined;
    for (int spins = 0; left_.load(std::memory_order_acquire) != joined;) {
      if (++spins < kSpins) relax();
      else std::this_thread::yield();
    }
  }

 private:
  static constexpr int kSpins = 4000;
  static constexpr long kThreadsMax = 256;
  // Of the state: a turn's number, whether workers may join it, and how many have.
  static constexpr int kTurnBits = 32;
  static constexpr uint64_t kOpen = uint64_t{1} << 31, kJoined = kOpen - 1;

  Pool() {
    long cores = std::thread::hardware_concurrency();
    if (const char* asked = std::getenv("MLXTAPE_CPU_THREADS")) cores = std::atol(asked);
    for (cores = std::min(cores, kThreadsMax); workers_ < cores - 1; workers_++) {
      try {
        std::thread([this] { serve(); }).detach();
      } catch (const std::system_error&) {
        break;  // so many as the system lends
      }
    }
  }

  void serve() {
    for (uint64_t seen = 0;;) {
      uint64_t now = state_.load(std::memory_order_acquire);
      for (int spins = 0; now >> kTurnBits == seen;) {
        if (++spins < kSpins) relax();
        else state_.wait(now, std::memory_order_acquire);
        now = state_.load(std::memory_order_acquire);
      }
      seen = now >> kTurnBits;
      if (!join(now)) continue;
      take();
      left_.fetch_add(1, std::memory_order_release);
    }
  }

  bool join(uint64_t now) {
    uint64_t turn = now >> kTurnBits;
    while (now & kOpen && now >> kTurnBits == turn)
      if (state_.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) return true;
    return false;
  }

  void take() {
    for (long i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) call_(work_, i);
  }

  std::mutex owner_;
  int workers_ = 0;
  void (*call_)(void*, long) = nullptr;
  void* work_ = nullptr;
  long count_ = 0;
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<long> next_{0};
  alignas(64) std::atomic<uint64_t> left_{0};
};

// work(index) for each index in [0, count), spread over the threads.
template <class Work>
void parallel(long count, Work&& work) {
  Pool::shared().run(count, work);
}

}  // namespace mlxtape
