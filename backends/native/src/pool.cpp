#include "pool.h"

#include <condition_variable>
#include <mutex>
#include <pthread.h>
#include <sched.h>
#include <thread>
#include <unistd.h>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pool {
namespace {

constexpr int kSpins = 4000;    // about 100 us: longer than the gap between two calls of one step
constexpr int kPatience = 200;  // spins at a barrier before the first yield

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Where the calling thread runs; -1: unknown.
inline int processor() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

// Go to another processor. Kernels leave two threads of a process on one for seconds while the next idles, if both
// always have something to do.
void leave(int processor) {
#if defined(__linux__)
  cpu_set_t all, others;
  if (sched_getaffinity(0, sizeof all, &all) != 0) return;
  others = all;
  CPU_CLR(processor, &others);
  if (CPU_COUNT(&others) > 0 && sched_setaffinity(0, sizeof others, &others) == 0)
    sched_setaffinity(0, sizeof all, &all);
#else
  (void)processor;
#endif
}

class Pool {
 public:
  void run(Task task, void* context, int threads) {
    std::lock_guard<std::mutex> one(caller_);
    while (static_cast<int>(workers_.size()) < threads - 1) start();
    task_ = task;
    context_ = context;
    threads_ = threads;
    home_ = processor();
    left_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      generation_.fetch_add(1, std::memory_order_release);
    }
    if (asleep_.load() > 0) wake_.notify_all();
    task(context, 0, threads);
    for (int i = 0; left_.load(std::memory_order_acquire) > 0; ++i) i < kPatience ? relax() : (void)sched_yield();
  }

 private:
  void start() {
    const int number = static_cast<int>(workers_.size()) + 1;
    const uint64_t seen = generation_.load();
    workers_.push_back(std::thread([this, number, seen] { work(number, seen); }));
    workers_.back().detach();
  }

  void work(int number, uint64_t seen) {
    for (;;) {
      for (int i = 0; generation_.load(std::memory_order_acquire) == seen && i < kSpins; ++i) relax();
      if (generation_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        asleep_.fetch_add(1);
        wake_.wait(lock, [&] { return generation_.load() != seen; });
        asleep_.fetch_sub(1);
      }
      seen = generation_.load(std::memory_order_acquire);
      if (home_ >= 0 && processor() == home_) leave(home_);
      if (number < threads_) task_(context_, number, threads_);
      left_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::mutex caller_, mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> left_{0}, asleep_{0};
  Task task_ = nullptr;
  void* context_ = nullptr;
  int threads_ = 1, home_ = -1;
};

std::atomic<Pool*> current{nullptr};  // never destroyed: detached workers may outlive static destruction

Pool& shared() {
  static const bool made = [] {
    current.store(new Pool);
    pthread_atfork(nullptr, nullptr, [] { current.store(new Pool); });  // its workers did not follow the child
    return true;
  }();
  (void)made;
  return *current.load();
}

}  // namespace

void run(Task task, void* context, int threads) {
  if (threads <= 1) return task(context, 0, 1);
  shared().run(task, context, threads);
}

void Barrier::wait() {
  const uint32_t phase = phase_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    return;
  }
  for (int i = 0; phase_.load(std::memory_order_acquire) == phase; ++i) i < kPatience ? relax() : (void)sched_yield();
}

}  // namespace pool
