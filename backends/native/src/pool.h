// A persistent pool of threads that run one task together. The caller is thread 0.
//
// A step of the engine is hundreds of short parallel loops; waking sleeping threads for each would cost more than the
// loops. One `run` covers many loops, and `Barrier` separates them: it spins, then yields, so a busy machine only slows.
#pragma once
#include <atomic>
#include <cstdint>

namespace pool {

// task(context, thread, threads) runs once per thread; returns when all have returned.
using Task = void (*)(void* context, int thread, int threads);
void run(Task task, void* context, int threads);

template <class F>
void run(int threads, F&& body) {  // body(thread, threads)
  run([](void* context, int thread, int n) { (*static_cast<F*>(context))(thread, n); }, &body, threads);
}

class Barrier {  // for exactly `threads` participants; reusable
 public:
  explicit Barrier(int threads) : threads_(threads) {}
  void wait();

 private:
  const int threads_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

// Tasks 0..n-1 handed out in order, one at a time, to whoever is free.
class Queue {
 public:
  void reset() { next_.store(0, std::memory_order_relaxed); }
  int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

 private:
  alignas(64) std::atomic<int64_t> next_{0};
};

}  // namespace pool
