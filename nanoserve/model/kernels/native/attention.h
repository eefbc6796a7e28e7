// Paged causal attention with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022), for decode, chunked
// prefill and any mix of them.
//
// What a row computes depends on its query and its keys alone: keys are taken in tiles of 64 from the first one on, in
// runs of 1024 that are joined in order. How many rows share an item, which rows those are, how many threads there are
// and whether the runs of one request are done side by side changes nothing, to the last bit.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "kv.h"
#include "pool.h"

namespace nanoserve::attention {

constexpr int64_t kKeys = 64;  // of a tile
constexpr int64_t kTileSubs = kKeys / kSub;
constexpr int64_t kRun = 1024;  // keys
constexpr float kNothing = -1e30f;  // a score of no weight; finite, so that its exponential needs no special case

// ---- products of a few rows with a sub-block; one chain of additions per element, in the order of the inner axis ----

template <class T>
struct Dot {  // float32 and, where the CPU has no product of bfloat16 pairs, bfloat16 widened
  using Row = float;
  struct Columns {
    Lanes part[kPair<T>];
  };
  static Columns columns(const float* p) { return {{load(p)}}; }
  static Columns columns(const bf16* p) {
#ifdef __AVX512F__
    __m512i x = _mm512_loadu_si512(p);
    return {{{_mm512_castsi512_ps(_mm512_slli_epi32(x, 16))},
             {_mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xffff0000)))}}};
#else
    __m256i x = _mm256_loadu_si256((const __m256i*)p), y = _mm256_loadu_si256((const __m256i*)p + 1);
    __m256i odd = _mm256_set1_epi32((int)0xffff0000);
    return {{{_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(y, 16))},
             {_mm256_castsi256_ps(_mm256_and_si256(x, odd)), _mm256_castsi256_ps(_mm256_and_si256(y, odd))}}};
#endif
  }
  static void add(Lanes& to, const float* row, const Columns& c) {
    for (int64_t i = 0; i < kPair<T>; i++) to = fma(splat(row[i]), c.part[i], to);
  }
};

#ifdef __AVX512BF16__
template <>
struct Dot<bf16> {
  using Row = bf16;
  using Columns = __m512bh;
  static Columns columns(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static void add(Lanes& to, const bf16* row, Columns c) {
    int pair;
    std::memcpy(&pair, row, 4);
    to.v = _mm512_dpbf16_ps(to.v, (__m512bh)_mm512_set1_epi32(pair), c);
  }
};
#endif

#ifdef __AVX512F__
constexpr int kAccumulators = 16;
#else
constexpr int kAccumulators = 4;
#endif

// s [rows][64] at column 16 b = q [rows][head_dim] times the keys of sub-block b, for kB of them side by side.
template <class T, int kR, int kB>
inline void score_subs(const typename Dot<T>::Row* q, int64_t head_dim, const T* const* keys, float* s) {
  Lanes sums[kR][kB];
  for (int r = 0; r < kR; r++)
    for (int b = 0; b < kB; b++) sums[r][b] = splat(0);
  for (int64_t d = 0; d < head_dim; d += kPair<T>) {
    typename Dot<T>::Columns c[kB];
#pragma GCC unroll 4
    for (int b = 0; b < kB; b++) c[b] = Dot<T>::columns(keys[b] + d * kSub);
#pragma GCC unroll 16
    for (int r = 0; r < kR; r++)
#pragma GCC unroll 4
      for (int b = 0; b < kB; b++) Dot<T>::add(sums[r][b], q + r * head_dim + d, c[b]);
  }
  for (int r = 0; r < kR; r++)
    for (int b = 0; b < kB; b++) store(s + r * kKeys + b * kSub, sums[r][b]);
}

// o [rows][head_dim] += p [rows][64] times the values of `count` tokens, for kG groups of 16 dimensions side by side.
template <class T, int kR, int kG>
inline void add_values(const typename Dot<T>::Row* p, int64_t head_dim, const T* const* values, int64_t count,
                       float* o, int64_t d) {
  Lanes sums[kR][kG];
  for (int r = 0; r < kR; r++)
    for (int g = 0; g < kG; g++) sums[r][g] = load(o + r * head_dim + d + g * kLanes);
  for (int64_t b = 0; b * kSub < count; b++) {
    int64_t end = std::min(kSub, count - b * kSub);
    for (int64_t t = 0; t < end; t += kPair<T>) {
      typename Dot<T>::Columns c[kG];
#pragma GCC unroll 8
      for (int g = 0; g < kG; g++) c[g] = Dot<T>::columns(values[b] + t * head_dim + (d + g * kLanes) * kPair<T>);
#pragma GCC unroll 16
      for (int r = 0; r < kR; r++)
#pragma GCC unroll 8
        for (int g = 0; g < kG; g++) Dot<T>::add(sums[r][g], p + r * kKeys + b * kSub + t, c[g]);
    }
  }
  for (int r = 0; r < kR; r++)
    for (int g = 0; g < kG; g++) store(o + r * head_dim + d + g * kLanes, sums[r][g]);
}

template <class T, int kR>
inline void score_rows(const typename Dot<T>::Row* q, int64_t head_dim, const T* const* keys, int64_t subs, float* s) {
  constexpr int kB = std::clamp(kAccumulators / kR, 1, 4);
  int64_t b = 0;
  for (; b + kB <= subs; b += kB) score_subs<T, kR, kB>(q, head_dim, keys + b, s + b * kSub);
  for (; b < subs; b++) score_subs<T, kR, 1>(q, head_dim, keys + b, s + b * kSub);
}

template <class T, int kR>
inline void accumulate_rows(const typename Dot<T>::Row* p, int64_t head_dim, const T* const* values, int64_t count,
                            float* o) {
  constexpr int kG = std::clamp(kAccumulators / kR, 1, 8);
  int64_t d = 0;
  for (; d + kG * kLanes <= head_dim; d += kG * kLanes) add_values<T, kR, kG>(p, head_dim, values, count, o, d);
  for (; d < head_dim; d += kLanes) add_values<T, kR, 1>(p, head_dim, values, count, o, d);
}

// Calls f(R, first row) for groups of R rows, a power of two, so the last group may have padding.
template <class F>
inline void in_row_groups(int64_t rows, F&& f) {
  for (int64_t r = 0; r < rows;) {
    int64_t left = rows - r;
    if (kAccumulators >= 16 && left > 8) {
      f(std::integral_constant<int, 16>(), r), r += 16;
    } else if (kAccumulators >= 8 && left > 4) {
      f(std::integral_constant<int, 8>(), r), r += 8;
    } else if (left > 2) {
      f(std::integral_constant<int, 4>(), r), r += 4;
    } else if (left == 2) {
      f(std::integral_constant<int, 2>(), r), r += 2;
    } else {
      f(std::integral_constant<int, 1>(), r), r += 1;
    }
  }
}

// ---- the same products by AMX, 16 rows x 16 columns x 16 pairs an instruction ----

#ifdef __AMX_BF16__
constexpr bool kHasTiles = true;

// gcc's tile intrinsics do not tell the compiler that they read and write memory.
inline void settle_memory() { asm volatile("" ::: "memory"); }

// Every tile register is 16 rows of 64 bytes: 0-3 sums, 4-5 rows of the left operand, 6-7 of the right one.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

inline void configure_tiles() {
  static const TileConfig config;
  settle_memory();
  _tile_loadconfig(&config);
}

inline void release_tiles() { _tile_release(); }

// One or two tiles of rows by one or two tiles of columns; strides in bytes, `inner` steps of 16 pairs.
template <int kR, int kC>
inline void multiply_tiles(const char* left, int64_t left_stride, int64_t left_step, const char* const* right,
                           int64_t right_stride, int64_t right_step, int64_t inner, float* sums, int64_t sum_stride,
                           bool is_adding) {
  char *s0 = (char*)sums, *s1 = s0 + 16 * sum_stride;
  settle_memory();
  if (is_adding) {
    _tile_loadd(0, s0, sum_stride);
    if (kC > 1) _tile_loadd(1, s0 + 64, sum_stride);
    if (kR > 1) _tile_loadd(2, s1, sum_stride);
    if (kR > 1 && kC > 1) _tile_loadd(3, s1 + 64, sum_stride);
  } else {
    _tile_zero(0);
    if (kC > 1) _tile_zero(1);
    if (kR > 1) _tile_zero(2);
    if (kR > 1 && kC > 1) _tile_zero(3);
  }
  for (int64_t i = 0; i < inner; i++) {
    _tile_loadd(4, left + i * left_step, left_stride);
    _tile_loadd(6, right[0] + i * right_step, right_stride);
    _tile_dpbf16ps(0, 4, 6);
    if (kC > 1) _tile_loadd(7, right[1] + i * right_step, right_stride);
    if (kC > 1) _tile_dpbf16ps(1, 4, 7);
    if (kR > 1) _tile_loadd(5, left + i * left_step + 16 * left_stride, left_stride);
    if (kR > 1) _tile_dpbf16ps(2, 5, 6);
    if (kR > 1 && kC > 1) _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, s0, sum_stride);
  if (kC > 1) _tile_stored(1, s0 + 64, sum_stride);
  if (kR > 1) _tile_stored(2, s1, sum_stride);
  if (kR > 1 && kC > 1) _tile_stored(3, s1 + 64, sum_stride);
  settle_memory();
}

template <int kR>
inline void score_tiles(const bf16* q, int64_t head_dim, const bf16* const* keys, int64_t subs, float* s) {
  for (int64_t b = 0; b < subs; b += 2) {
    const char* right[2] = {(const char*)keys[b], (const char*)keys[b + 1 < subs ? b + 1 : b]};
    auto multiply = b + 1 < subs ? multiply_tiles<kR, 2> : multiply_tiles<kR, 1>;
    multiply((const char*)q, head_dim * 2, 64, right, 64, 1024, head_dim / 32, s + b * kSub, kKeys * 4, false);
  }
}

// `values` is one piece [32][head_dim][2], zero beyond the last token.
template <int kR>
inline void accumulate_tiles(const bf16* p, int64_t head_dim, const bf16* values, int64_t subs, float* o) {
  for (int64_t d = 0; d < head_dim; d += 32) {
    const char* right[2] = {(const char*)(values + d * 2), (const char*)(values + (d + 16) * 2)};
    multiply_tiles<kR, 2>((const char*)p, kKeys * 2, 64, right, head_dim * 4, head_dim * 64, (subs + 1) / 2, o + d,
                          head_dim * 4, true);
  }
}
#else
constexpr bool kHasTiles = false;
inline void configure_tiles() {}
inline void release_tiles() {}
#endif

// ---- one item: some rows of one request and one KV head ----

// Rows are (token, query head) pairs, token by token. `run` < 0: all keys; else only that run, kept for joining.
struct AttentionItem {
  int64_t request, kv_head, first_row, rows, run;
};

// Sums of a softmax that has seen some of the keys; scores are in powers of two. Padding rows are garbage.
template <int64_t kRows>
struct SoftmaxState {
  alignas(64) float top[kRows];
  alignas(64) float total[kRows][kLanes];  // the sum is spread over the lanes
  alignas(64) float out[kRows * kMaxHeadDim];

  void clear(int64_t rows, int64_t head_dim) {
    for (int64_t r = 0; r < rows; r++) {
      top[r] = kNothing;
      store(total[r], splat(0));
    }
    std::memset(out, 0, rows * head_dim * sizeof(float));
  }
};

// Joins what later keys gave to what earlier keys gave.
inline void join_row(float& top, float* total, float* out, float top2, const float* total2, const float* out2,
                     int64_t head_dim) {
  if (top2 == kNothing) return;
  float higher = std::max(top, top2);
  Lanes scale = exp2<5>(splat(top - higher)), scale2 = exp2<5>(splat(top2 - higher));
  top = higher;
  store(total, load(total) * scale + load(total2) * scale2);
  for (int64_t d = 0; d < head_dim; d += kLanes) store(out + d, load(out + d) * scale + load(out2 + d) * scale2);
}

template <class T, bool kInt8>
class Attention {
 public:
  using Row = typename Dot<T>::Row;
  static constexpr bool kTiles = kHasTiles && sizeof(T) == 2;
  static constexpr int64_t kRows = kTiles ? 32 : 16;

  // q [num_tokens][num_heads][head_dim] with rows `q_stride` apart; out has rows of num_heads * head_dim.
  Attention(const AttentionShape& shape, const AttentionBatch& batch, const T* q, int64_t q_stride, char* layer, T* out)
      : shape_(shape), batch_(batch), q_(q), q_stride_(q_stride), layer_(layer), out_(out),
        group_(shape.num_heads / shape.num_kv_heads), use_tiles_(kTiles && shape.head_dim % 32 == 0) {}

  void run() {
    plan();
    std::vector<std::atomic<int>> done(is_split_ ? items_.size() : 0);  // runs of the request and head that starts here
    for (auto& count : done) count.store(0);
    each((int64_t)items_.size(), [&](int64_t i) {
      Scratch& scratch = own_scratch();
      prepare(scratch, items_[i]);
      if (use_tiles_) configure_tiles();
      if (items_[i].run < 0) {
        attend_all(scratch);
      } else {
        attend_one_run(scratch, i, done.data());
      }
      if (use_tiles_) release_tiles();
    });
  }

 private:
  struct Scratch {
    alignas(64) Row q[kRows * kMaxHeadDim];
    alignas(64) float s[kRows * kKeys];
    alignas(64) Row p[kRows * kKeys];
    alignas(64) T keys[kKeys * kMaxHeadDim];
    alignas(64) T values[kKeys * kMaxHeadDim];
    SoftmaxState<kRows> all, part;
    int64_t lens[kRows];  // keys that a row sees
    T* to[kRows];
    int64_t rows, padded, longest, request, kv_head;
  };

  // A tile of keys and values in the element type of the products.
  struct Tile {
    const T *keys[kTileSubs], *values[kTileSubs];
    const float *key_scales[kTileSubs], *value_scales[kTileSubs];
    int64_t first, count, subs;
  };

  static Scratch& own_scratch() {
    static thread_local std::unique_ptr<Scratch> scratch(new Scratch());
    return *scratch;
  }

  // Items in order of request and head, the longest rows of a request first. Where there are few, the runs of a request
  // that computes one item's worth of rows become items of their own.
  void plan() {
    int64_t threads = Pool::get().threads(), num_whole = 0;
    for (int64_t i = 0; i < batch_.num_requests; i++)
      num_whole += (batch_.query_lens[i] * group_ + kRows - 1) / kRows * shape_.num_kv_heads;
    for (int64_t i = 0; i < batch_.num_requests; i++) {
      int64_t rows = batch_.query_lens[i] * group_, runs = (batch_.kv_lens[i] + kRun - 1) / kRun;
      bool is_split = rows <= kRows && runs > 1 && num_whole < 8 * threads && threads > 1;
      for (int64_t head = 0; head < shape_.num_kv_heads; head++) {
        if (is_split) {
          for (int64_t run = 0; run < runs; run++) items_.push_back({i, head, 0, rows, run});
          is_split_ = true;
        } else {
          for (int64_t first = (rows - 1) / kRows * kRows; first >= 0; first -= kRows)
            items_.push_back({i, head, first, std::min(kRows, rows - first), -1});
        }
      }
    }
    if (is_split_) partial_.resize(items_.size() * partial_size());
  }

  int64_t partial_size() const { return kRows * (1 + kLanes + shape_.head_dim); }

  void prepare(Scratch& s, const AttentionItem& item) const {
    int64_t head_dim = shape_.head_dim, i = item.request;
    s.request = i, s.kv_head = item.kv_head, s.rows = item.rows;
    s.padded = (item.rows + 15) / 16 * 16;
    for (int64_t r = 0; r < item.rows; r++) {
      int64_t token = (item.first_row + r) / group_, head = item.kv_head * group_ + (item.first_row + r) % group_;
      int64_t row = batch_.query_starts[i] + token;
      s.lens[r] = batch_.kv_lens[i] - batch_.query_lens[i] + token + 1;
      s.to[r] = out_ + (row * shape_.num_heads + head) * head_dim;
      const T* from = q_ + row * q_stride_ + head * head_dim;
      if constexpr (std::is_same_v<Row, T>) {
        std::memcpy(s.q + r * head_dim, from, head_dim * sizeof(T));
      } else {
        for (int64_t d = 0; d < head_dim; d += kLanes) store(s.q + r * head_dim + d, load(from + d));
      }
    }
    std::memset((void*)(s.q + item.rows * head_dim), 0, (s.padded - item.rows) * head_dim * sizeof(Row));
    std::memset((void*)(s.p + item.rows * kKeys), 0, (s.padded - item.rows) * kKeys * sizeof(Row));
    s.longest = s.lens[item.rows - 1];
  }

  // Run by run; the first one is `all` from the start, the others are joined to it.
  void attend_all(Scratch& s) const {
    int64_t head_dim = shape_.head_dim;
    add_run(s, s.all, 0);
    for (int64_t run = 1; run * kRun < s.longest; run++) {
      add_run(s, s.part, run);
      for (int64_t r = 0; r < s.rows; r++)
        join_row(s.all.top[r], s.all.total[r], s.all.out + r * head_dim, s.part.top[r], s.part.total[r],
                 s.part.out + r * head_dim, head_dim);
    }
    for (int64_t r = 0; r < s.rows; r++) write_row(s.to[r], s.all.total[r], s.all.out + r * head_dim);
  }

  void add_run(Scratch& s, SoftmaxState<kRows>& state, int64_t run) const {
    state.clear(s.padded, shape_.head_dim);
    int64_t end = std::min((run + 1) * kRun, s.longest);
    for (int64_t first = run * kRun; first < end; first += kKeys)
      add_tile(s, state, first, std::min(kKeys, end - first));
  }

  void write_row(T* to, const float* total, const float* out) const {
    Lanes factor = splat(1 / sum(load(total)));
    for (int64_t d = 0; d < shape_.head_dim; d += kLanes) store(to + d, load(out + d) * factor);
  }

  // Keeps what one run gives; the last of a request's and head's runs to be done joins all of them, in order.
  void attend_one_run(Scratch& s, int64_t index, std::atomic<int>* done) {
    const AttentionItem& item = items_[index];
    add_run(s, s.all, item.run);
    float* mine = partial_.data() + index * partial_size();
    std::memcpy(mine, s.all.top, s.rows * sizeof(float));
    std::memcpy(mine + kRows, s.all.total, s.rows * kLanes * sizeof(float));
    std::memcpy(mine + kRows * (1 + kLanes), s.all.out, s.rows * shape_.head_dim * sizeof(float));
    int64_t first = index - item.run, runs = (batch_.kv_lens[item.request] + kRun - 1) / kRun;
    if (done[first].fetch_add(1, std::memory_order_acq_rel) + 1 == runs) join_runs(s, first, runs);
  }

  void join_runs(Scratch& s, int64_t first, int64_t runs) {
    int64_t head_dim = shape_.head_dim;
    for (int64_t r = 0; r < s.rows; r++) {
      float* all = partial_.data() + first * partial_size();
      float *total = all + kRows + r * kLanes, *out = all + kRows * (1 + kLanes) + r * head_dim;
      for (int64_t run = 1; run < runs; run++) {
        const float* later = all + run * partial_size();
        join_row(all[r], total, out, later[r], later + kRows + r * kLanes, later + kRows * (1 + kLanes) + r * head_dim,
                 head_dim);
      }
      write_row(s.to[r], total, out);
    }
  }

  void add_tile(Scratch& s, SoftmaxState<kRows>& state, int64_t first, int64_t count) const {
    Tile tile = fetch(s, first, count);
    int64_t head_dim = shape_.head_dim;
#ifdef __AMX_BF16__
    if constexpr (kTiles) {
      if (use_tiles_) {
        for (int64_t r = 0; r < s.padded; r += 32) {
          auto score = s.padded - r > 16 ? score_tiles<2> : score_tiles<1>;
          score(s.q + r * head_dim, head_dim, tile.keys, tile.subs, s.s + r * kKeys);
        }
        weigh(s, state, tile);
        for (int64_t r = 0; r < s.padded; r += 32) {
          auto accumulate = s.padded - r > 16 ? accumulate_tiles<2> : accumulate_tiles<1>;
          accumulate(s.p + r * kKeys, head_dim, s.values, tile.subs, state.out + r * head_dim);
        }
        return;
      }
    }
#endif
    in_row_groups(s.rows, [&](auto size, int64_t r) {
      score_rows<T, decltype(size)::value>(s.q + r * head_dim, head_dim, tile.keys, tile.subs, s.s + r * kKeys);
    });
    weigh(s, state, tile);
    in_row_groups(s.rows, [&](auto size, int64_t r) {
      accumulate_rows<T, decltype(size)::value>(s.p + r * kKeys, head_dim, tile.values, tile.count,
                                                state.out + r * head_dim);
    });
  }

  Tile fetch(Scratch& s, int64_t first, int64_t count) const {
    using Layout = KvLayout<T, kInt8>;
    int64_t size = kSub * shape_.head_dim;
    Tile tile;
    tile.first = first, tile.count = count, tile.subs = (count + kSub - 1) / kSub;
    const int64_t* table = batch_.block_tables + s.request * batch_.table_stride;
    for (int64_t b = 0; b < tile.subs; b++) {
      int64_t token = first + b * kSub;
      char* at = Layout::sub_block(shape_, layer_, table[token / shape_.block_size], s.kv_head,
                                   token % shape_.block_size / kSub);
      auto *keys = Layout::keys(at), *values = Layout::values(shape_, at);
      T *own_keys = s.keys + b * size, *own_values = s.values + b * size;
      if constexpr (kInt8) {
        widen(own_keys, keys, size), widen(own_values, values, size);
        tile.key_scales[b] = Layout::key_scales(shape_, at), tile.value_scales[b] = Layout::value_scales(shape_, at);
        tile.keys[b] = own_keys, tile.values[b] = own_values;
        if (b % 2 == 0) tile.key_scales[b + 1] = tile.key_scales[b], tile.value_scales[b + 1] = tile.value_scales[b];
      } else {
        tile.keys[b] = keys, tile.values[b] = values;
        if (use_tiles_) copy_values(own_values, values, std::min(kSub, count - b * kSub));
      }
    }
    if (use_tiles_ && tile.subs % 2) std::memset((void*)(s.values + tile.subs * size), 0, size * sizeof(T));
    return tile;
  }

  static void widen(T* to, const int8_t* from, int64_t count) {
    for (int64_t i = 0; i < count; i += 2 * kLanes) store(to + i, load(from + i), load(from + i + kLanes));
  }

  // One piece of memory for AMX, which reads 32 tokens with one stride; what lies beyond `count` may be NaN.
  void copy_values(T* to, const T* from, int64_t count) const {
    int64_t used = (count + kPair<T> - 1) / kPair<T> * kPair<T> * shape_.head_dim;
    std::memcpy((void*)to, (const void*)from, used * sizeof(T));
    std::memset((void*)(to + used), 0, (kSub * shape_.head_dim - used) * sizeof(T));
  }

  // Scores to weights. Two passes over the rows: in one, the search for a row's highest score would keep its
  // exponentials waiting and the CPU could not look far enough ahead to work on other rows meanwhile.
  void weigh(Scratch& s, SoftmaxState<kRows>& state, const Tile& tile) const {
    const float scale = (float)(std::log2(std::exp(1.0)) / std::sqrt((double)shape_.head_dim));
    int64_t pairs = (tile.subs + 1) / 2;
    mask(s, tile, pairs * 2 * kSub);
    for (int64_t r = 0; r < s.rows; r++) {
      Lanes top = splat(kNothing);
      for (int64_t i = 0; i < pairs * 2; i++) top = max(top, load(s.s + r * kKeys + i * kSub));
      float highest_score = highest(top);
      if (highest_score != kNothing) raise(state, r, highest_score * scale);  // else the row sees nothing of the tile
    }
    for (int64_t r = 0; r < s.rows; r++) {
      if (pairs == kTileSubs / 2) {
        weigh_row<kTileSubs / 2>(s, state, tile, r, scale);
      } else {
        weigh_row<1>(s, state, tile, r, scale);
      }
    }
  }

  // Weights of a row for kPairs sub-block pairs, or (1) for as many as the tile has.
  template <int kPairs>
  void weigh_row(Scratch& s, SoftmaxState<kRows>& state, const Tile& tile, int64_t r, float scale) const {
    const float* scores = s.s + r * kKeys;
    Row* weights = s.p + r * kKeys;
    float top = state.top[r];
    Lanes factor = splat(scale), offset = splat(top == kNothing ? 0 : -top), total = load(state.total[r]);
    int64_t pairs = kPairs == 1 ? (tile.subs + 1) / 2 : kPairs;
#pragma GCC unroll 4
    for (int64_t i = 0; i < pairs; i++) {
      Lanes a = exp2<kDegree>(fma(load(scores + 2 * i * kSub), factor, offset));
      Lanes b = exp2<kDegree>(fma(load(scores + (2 * i + 1) * kSub), factor, offset));
      total = total + a + b;
      if constexpr (kInt8) {
        int64_t seen = s.lens[r] - tile.first - 2 * i * kSub;
        a = first(seen, a * load(tile.value_scales[2 * i]), 0);
        b = first(seen - kSub, b * load(tile.value_scales[2 * i + 1]), 0);
      }
      store(weights + 2 * i * kSub, a, b);
    }
    store(state.total[r], total);
  }

  // Scores of int8 keys get their scale; those of keys that a row does not see, up to `columns`, get no weight.
  void mask(Scratch& s, const Tile& tile, int64_t columns) const {
    for (int64_t r = 0; r < s.rows; r++) {
      int64_t seen = std::min(s.lens[r] - tile.first, tile.count);
      if (!kInt8 && seen >= columns) continue;
      for (int64_t i = 0; i < columns; i += kSub) {
        float* scores = s.s + r * kKeys + i;
        Lanes x = load(scores);
        if (kInt8) x = x * load(tile.key_scales[i / kSub]);
        store(scores, first(seen - i, x, kNothing));
      }
    }
  }

  // Lets the sums of a row refer to a higher score. Weights up to 2^8 are no harm, so a slightly higher one is no reason.
  void raise(SoftmaxState<kRows>& state, int64_t r, float higher) const {
    if (higher <= state.top[r] + 8) return;
    float before = state.top[r];
    state.top[r] = higher;
    if (before == kNothing) return;  // the sums are zero
    Lanes factor = exp2<kDegree>(splat(before - higher));
    store(state.total[r], load(state.total[r]) * factor);
    float* out = state.out + r * shape_.head_dim;
    for (int64_t d = 0; d < shape_.head_dim; d += kLanes) store(out + d, load(out + d) * factor);
  }

  static constexpr int kDegree = sizeof(T) == 2 ? 3 : 5;

  const AttentionShape& shape_;
  const AttentionBatch& batch_;
  const T* q_;
  int64_t q_stride_;
  char* layer_;
  T* out_;
  int64_t group_;
  bool use_tiles_;
  std::vector<AttentionItem> items_;
  std::vector<float> partial_;
  bool is_split_ = false;
};

}  // namespace nanoserve::attention
