// A pool of threads that behaves beside other processes.
//
// Work is a number of items that threads claim one by one. The caller claims too, and waits only for items that somebody
// has claimed: a worker whose core is taken by another process delays nobody, its share is simply done by the others.
// (OpenMP's static shares and barriers cost a whole scheduler slice, 8 ms, in that case.) Waits spin for a bounded time,
// then sleep on a futex: long enough to bridge the Python between two calls. (Rows of 32 products of Qwen3-0.6B's sizes
// beside one busy process, median and 95th percentile in ms: no spin 34 and 39, 50 us 29 and 43, 200 us 27 and 36, 2 ms
// 28 and 37; alone 22, 19, 20 and 22 in the median.)
#pragma once
#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace nanoserve {

class Pool {
 public:
  static Pool& get() {
    static Pool* pool = new Pool;  // never destroyed: its threads may outlive static destructors
    return *pool;
  }

  int threads() const { return threads_.load(std::memory_order_relaxed); }

  // Threads that work on a job, the caller included. Only grows the number of real threads.
  void resize(int threads) {
    std::lock_guard<std::mutex> hold(busy_);
    while ((int)workers_.size() < threads - 1) {
      int rank = (int)workers_.size() + 1;
      workers_.emplace_back([this, rank] { work(rank); });
      workers_.back().detach();
    }
    threads_.store(threads < 1 ? 1 : threads);
  }

  void spin_for(int64_t microseconds) { spin_us_.store(microseconds); }

  // Calls f(item) for every item below `items`; returns when all are done. Items run in any order, on any thread. Two
  // callers at once: the second does its items alone. An item must not call each() itself.
  template <class F>
  void each(int64_t items, F&& f) {
    if (items <= 0) return;
    std::unique_lock<std::mutex> hold(busy_, std::defer_lock);
    if (items == 1 || items > kMaxItems || threads() == 1 || !hold.try_lock()) {
      for (int64_t i = 0; i < items; i++) f(i);
      return;
    }
    call_ = [](void* context, int64_t item) { (*static_cast<std::remove_reference_t<F>*>(context))(item); };
    context_ = (void*)&f;
    done_.store(0, std::memory_order_relaxed);
    generation_ = (generation_ + 1) & 0xffffff;
    ticket_.store(generation_ << 40 | (uint64_t)items << 20, std::memory_order_seq_cst);
    signal_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst)) wake(signal_, threads() - 1);
    drain();
    wait_until_done((uint32_t)items);
  }

 private:
  static constexpr int64_t kMaxItems = (1 << 20) - 1;

  static uint32_t next(uint64_t ticket) { return ticket & 0xfffff; }
  static uint32_t items(uint64_t ticket) { return ticket >> 20 & 0xfffff; }

  // Claims and runs items until none is left. The ticket holds generation, number of items and next item in one word,
  // so that a claim proves that its job is still running and `call_`, `context_` are this job's.
  void drain() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (next(ticket) < items(ticket)) {
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) continue;
      call_(context_, next(ticket));
      uint32_t done = done_.fetch_add(1, std::memory_order_seq_cst) + 1;
      if (done == items(ticket) && is_waiting_.load(std::memory_order_seq_cst)) wake(done_, 1);
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }

  void wait_until_done(uint32_t items) {
    if (spin([&] { return done_.load(std::memory_order_acquire) == items; })) return;
    is_waiting_.store(true, std::memory_order_seq_cst);
    for (uint32_t done; (done = done_.load(std::memory_order_seq_cst)) != items;) sleep(done_, done);
    is_waiting_.store(false, std::memory_order_relaxed);
  }

  void work(int rank) {
    for (;;) {
      uint32_t seen = signal_.load(std::memory_order_seq_cst);
      if (rank < threads()) drain();
      if (spin([&] { return signal_.load(std::memory_order_relaxed) != seen; })) continue;
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      sleep(signal_, seen);
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  template <class Condition>
  bool spin(Condition&& is_met) {
    int64_t limit = spin_us_.load(std::memory_order_relaxed);
    auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(limit);
    do {
      for (int i = 0; i < 16; i++) {
        if (is_met()) return true;
        _mm_pause();
      }
    } while (std::chrono::steady_clock::now() < end);
    return false;
  }

  static void sleep(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
  }
  static void wake(std::atomic<uint32_t>& word, int count) {
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
  }

  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
  std::atomic<bool> is_waiting_{false};
  alignas(64) std::atomic<uint32_t> signal_{0};
  std::atomic<int> sleepers_{0};
  alignas(64) void (*call_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  uint64_t generation_ = 0;
  std::atomic<int> threads_{1};
  std::atomic<int64_t> spin_us_{200};
  std::mutex busy_;
  std::vector<std::thread> workers_;
};

// f(item) for every item in [0, items), shared between the pool's threads.
template <class F>
inline void each(int64_t items, F&& f) {
  Pool::get().each(items, f);
}

// The same on this thread alone where sharing would cost more than it gives.
template <class F>
inline void each_if(bool is_worth_sharing, int64_t items, F&& f) {
  if (is_worth_sharing) return each(items, f);
  for (int64_t i = 0; i < items; i++) f(i);
}

}  // namespace nanoserve
