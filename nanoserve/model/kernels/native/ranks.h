// Sums over the processes of one machine that hold shares of one network (tensor parallelism), through shared memory.
//
// Every rank has two slots there. A call copies a rank's values into one of them, meets the other ranks, and then each
// rank adds up all slots by itself, in the order of the ranks: the same bits everywhere. The next call uses the other
// slot, and whoever has met everybody in that call knows that nobody reads the first one any more: one meeting a call.
// Waits spin for a bounded time, then sleep on a futex, and look now and then whether the ranks were told to part.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>

#include "lanes.h"
#include "pool.h"

namespace nanoserve {

class Ranks {
 public:
  static constexpr int64_t kMost = 64;

  static int64_t bytes(int64_t size, int64_t slot_bytes) { return kHeadBytes + 2 * size * slot_bytes; }

  // `memory`: `bytes` zeroed bytes that all ranks map. `slot_bytes`: a multiple of 64.
  Ranks(void* memory, int64_t rank, int64_t size, int64_t slot_bytes, int64_t spin_us)
      : memory_((char*)memory), rank_(rank), size_(size), slot_bytes_(slot_bytes), spin_us_(spin_us) {}

  // x [count] becomes the sum over all ranks; false when they have parted.
  template <class T>
  bool sum(T* x, int64_t count) {
    int64_t at_once = slot_bytes_ / (int64_t)sizeof(T);
    for (int64_t first = 0; first < count; first += at_once) {
      int64_t part = std::min(at_once, count - first);
      copy(slot(round_ + 1, rank_), (const char*)(x + first), part * sizeof(T));
      if (!meet()) return false;
      add(x + first, part);
    }
    return true;
  }

  // The ranks' x [rows][row_bytes] side by side in `joined` [rows][size][row_bytes], which rank 0 alone has.
  bool join(const char* x, char* joined, int64_t rows, int64_t row_bytes) {
    for (int64_t first = 0; first < rows * row_bytes; first += slot_bytes_) {
      int64_t part = std::min(slot_bytes_, rows * row_bytes - first);
      copy(slot(round_ + 1, rank_), x + first, part);
      if (!meet()) return false;
      for (int64_t rank = 0; joined && rank < size_; rank++) spread(joined, rank, first, part, row_bytes);
    }
    return true;
  }

  // Ends every wait, here and in the other processes; for good.
  void abort() {
    head()->aborted.store(1, std::memory_order_seq_cst);
    for (int64_t rank = 0; rank < size_; rank++) wake(lines()[rank].round);
  }

 private:
  struct alignas(64) Line {
    std::atomic<uint32_t> round, sleepers;  // calls in which this rank has filled its slot; who sleeps until the next
  };
  struct alignas(64) Head {
    std::atomic<uint32_t> aborted;
  };
  static constexpr int64_t kHeadBytes = 8192;
  static_assert(sizeof(Head) + kMost * sizeof(Line) <= kHeadBytes, "");

  Head* head() { return (Head*)memory_; }
  Line* lines() { return (Line*)(memory_ + sizeof(Head)); }
  // Where a rank puts its values in call `round`; every other call has the same slots.
  char* slot(uint32_t round, int64_t rank) {
    return memory_ + kHeadBytes + ((round & 1) * size_ + rank) * slot_bytes_;
  }

  static void copy(char* to, const char* from, int64_t num_bytes) {
    constexpr int64_t kItem = 1 << 16;
    each_if(num_bytes > kItem, (num_bytes + kItem - 1) / kItem, [=](int64_t item) {
      std::memcpy(to + item * kItem, from + item * kItem, std::min(kItem, num_bytes - item * kItem));
    });
  }

  // After this the slots of the call may be read, and the ones of the next call written.
  bool meet() {
    Line& own = lines()[rank_];
    own.round.store(++round_, std::memory_order_seq_cst);
    if (own.sleepers.load(std::memory_order_seq_cst)) wake(own.round);
    for (int64_t i = 1; i < size_; i++)
      if (!wait_for(lines()[(rank_ + i) % size_])) return false;
    return !head()->aborted.load(std::memory_order_relaxed);
  }

  bool has_come(Line& other) { return (int32_t)(other.round.load(std::memory_order_acquire) - round_) >= 0; }

  bool wait_for(Line& other) {
    auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us_);
    do {
      for (int i = 0; i < 16; i++) {
        if (has_come(other)) return true;
        _mm_pause();
      }
    } while (std::chrono::steady_clock::now() < end);
    timespec look = {0, 20'000'000};
    other.sleepers.fetch_add(1, std::memory_order_seq_cst);
    bool aborted = false;
    for (;;) {
      uint32_t seen = other.round.load(std::memory_order_seq_cst);
      if ((int32_t)(seen - round_) >= 0) break;
      if ((aborted = head()->aborted.load(std::memory_order_seq_cst))) break;
      syscall(SYS_futex, &other.round, FUTEX_WAIT, seen, &look, nullptr, 0);  // not private: between processes
    }
    other.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return !aborted;
  }

  static void wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }

  template <class T>
  void add(T* x, int64_t count) {
    using attention::Lanes, attention::load, attention::store;
    constexpr int64_t kItem = (1 << 15) / sizeof(T), kLanes = attention::kLanes;
    each_if(count > kItem, (count + kItem - 1) / kItem, [=](int64_t item) {
      int64_t end = std::min(count, (item + 1) * kItem);
      for (int64_t i = item * kItem; i < end; i += kLanes) {
        Lanes total = load((const T*)slot(round_, 0) + i);  // slots are whole lines: reading beyond `count` is harmless
        for (int64_t rank = 1; rank < size_; rank++) total = total + load((const T*)slot(round_, rank) + i);
        if (i + kLanes <= end) {
          store(x + i, total);
        } else {
          T last[kLanes];
          store(last, total);
          std::memcpy(x + i, last, (end - i) * sizeof(T));
        }
      }
    });
  }

  // Bytes `first` ... of a rank's flat rows to where they stand in the joined ones.
  void spread(char* joined, int64_t rank, int64_t first, int64_t part, int64_t row_bytes) {
    for (int64_t done = 0; done < part;) {
      int64_t row = (first + done) / row_bytes, column = (first + done) % row_bytes;
      int64_t count = std::min(part - done, row_bytes - column);
      std::memcpy(joined + (row * size_ + rank) * row_bytes + column, slot(round_, rank) + done, count);
      done += count;
    }
  }

  char* memory_;
  int64_t rank_, size_, slot_bytes_, spin_us_;
  uint32_t round_ = 0;  // calls that have met
};

}  // namespace nanoserve

NS_EXPORT int64_t ns_ranks_bytes(int64_t size, int64_t slot_bytes) { return Ranks::bytes(size, slot_bytes); }

// Lives as long as the process: another thread may wait in it whenever its owner goes.
NS_EXPORT int64_t ns_ranks_open(void* memory, int64_t rank, int64_t size, int64_t slot_bytes, int64_t spin_us) {
  return (int64_t) new Ranks(memory, rank, size, slot_bytes, spin_us);
}

// These return 1 when the ranks have parted, else 0.
NS_EXPORT int64_t ns_ranks_sum_bf16(Ranks* ranks, attention::bf16* x, int64_t count) { return !ranks->sum(x, count); }
NS_EXPORT int64_t ns_ranks_sum_float(Ranks* ranks, float* x, int64_t count) { return !ranks->sum(x, count); }
NS_EXPORT int64_t ns_ranks_join(Ranks* ranks, const char* x, char* joined, int64_t rows, int64_t row_bytes) {
  return !ranks->join(x, joined, rows, row_bytes);
}
NS_EXPORT void ns_ranks_abort(Ranks* ranks) { ranks->abort(); }
