// The small operations between two matrix products, each in one pass over its rows. They compute in float32 and round
// once; the meaning of each is in kernels/plain.py.
#pragma once
#include <cmath>

#include "kv.h"
#include "pool.h"

namespace nanoserve::attention {

// Rows that are worth a thread: below about 16 KiB waking one costs more than it saves.
inline int64_t rows_per_item(int64_t rows, int64_t row_bytes) {
  int64_t least = std::max<int64_t>(1, 16384 / row_bytes);
  return std::max(least, (rows + 4 * Pool::get().threads() - 1) / (4 * Pool::get().threads()));
}

// f(row) for every row, several rows an item.
template <class F>
inline void each_row(int64_t rows, int64_t row_bytes, F&& f) {
  int64_t step = rows_per_item(rows, row_bytes);
  each((rows + step - 1) / step, [&](int64_t item) {
    for (int64_t row = item * step; row < std::min(rows, (item + 1) * step); row++) f(row);
  });
}

inline float inverse_rms(Lanes squares, int64_t size, float eps) {
  return 1 / std::sqrt(sum(squares) / (float)size + eps);
}

// `size` is a multiple of 16 here and below. With `delta`, x becomes x + delta, rounded, before the norm.
template <class T>
inline void add_rms_norm(T* x, const T* delta, const T* weight, float eps, T* out, int64_t rows, int64_t size) {
  each_row(rows, size * (int64_t)sizeof(T), [=](int64_t row) {
    T* xs = x + row * size;
    Lanes squares = splat(0);
    for (int64_t i = 0; i < size; i += kLanes) {
      if (delta) store(xs + i, load(xs + i) + load(delta + row * size + i));
      Lanes v = load(xs + i);
      squares = fma(v, v, squares);
    }
    Lanes factor = splat(inverse_rms(squares, size, eps));
    for (int64_t i = 0; i < size; i += kLanes) store(out + row * size + i, load(xs + i) * factor * load(weight + i));
  });
}

template <class T>
inline void silu_and_mul(const T* gate_up, T* out, int64_t rows, int64_t size) {
  constexpr int kDegree = sizeof(T) == 2 ? 3 : 5;
  Lanes one = splat(1), minus_log2e = splat(-1.44269504f), highest_power = splat(126), lowest_power = splat(-126);  // no overflow
  each_row(rows, 3 * size * (int64_t)sizeof(T), [=](int64_t row) {
    const T *gate = gate_up + row * 2 * size, *up = gate + size;
    for (int64_t i = 0; i < size; i += kLanes) {
      Lanes x = load(gate + i), power = max(lowest_power, min(highest_power, x * minus_log2e));
      store(out + row * size + i, x / (one + exp2<kDegree>(power)) * load(up + i));
    }
  });
}

// RMSNorm of one head, then its halves rotated against each other. `cos` and `sin` [head_dim] are the token's; the
// first half of `sin` is negated.
template <class T>
inline void norm_and_rotate(float* to, const T* from, const T* weight, float eps, const T* cos, const T* sin,
                            int64_t head_dim) {
  alignas(64) float x[2 * kMaxHeadDim];  // twice, so that the rotated head is the one that starts in the middle
  Lanes squares = splat(0);
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    Lanes v = load(from + d);
    store(x + d, v);
    squares = fma(v, v, squares);
  }
  Lanes factor = splat(inverse_rms(squares, head_dim, eps));
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    Lanes v = load(x + d) * factor * load(weight + d);
    store(x + d, v), store(x + head_dim + d, v);
  }
  for (int64_t d = 0; d < head_dim; d += kLanes)
    store(to + d, fma(load(x + d), load(cos + d), load(x + head_dim / 2 + d) * load(sin + d)));
}

template <class T>
inline void widen_head(float* to, const T* from, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; d += kLanes) store(to + d, load(from + d));
}

// Marks each request's last token of the batch.
inline void mark_last(const AttentionBatch& batch, std::vector<char>& is_last) {
  is_last.assign(batch.num_tokens, 0);
  for (int64_t i = 0; i < batch.num_requests; i++) is_last[batch.query_starts[i] + batch.query_lens[i] - 1] = 1;
}

// Where a layer's query, key and value heads of the new tokens lie; strides from token to token count elements.
template <class T>
struct Heads {
  T* q;
  const T *k, *v;
  int64_t q_stride, k_stride, v_stride;
};

// How queries and keys are prepared: norms [head_dim] and the tokens' angles, [num_tokens][head_dim] each. All null:
// they are stored as they come.
template <class T>
struct Rotary {
  const T *q_norm, *k_norm;
  float eps;
  const T *cos, *sin;
};

// Stores keys and values of the new tokens; queries (in place) and keys are normed and rotated first.
template <class T, bool kInt8>
inline void store_heads(const AttentionShape& shape, const AttentionBatch& batch, const Heads<T>& heads,
                        const Rotary<T>& rotary, char* layer) {
  std::vector<char> is_last;
  mark_last(batch, is_last);
  int64_t head_dim = shape.head_dim, row_bytes = (shape.num_heads + 2 * shape.num_kv_heads) * head_dim * sizeof(T);
  each_row(batch.num_tokens, row_bytes, [&](int64_t token) {
    alignas(64) float k[kMaxHeadDim], v[kMaxHeadDim];
    const T *cos = rotary.cos + token * head_dim, *sin = rotary.sin + token * head_dim;
    for (int64_t h = 0; rotary.q_norm && h < shape.num_heads; h++) {
      T* q = heads.q + token * heads.q_stride + h * head_dim;
      norm_and_rotate(k, q, rotary.q_norm, rotary.eps, cos, sin, head_dim);
      narrow(q, k, head_dim);
    }
    int64_t block = batch.slot_blocks[token], offset = batch.slot_offsets[token];
    for (int64_t h = 0; h < shape.num_kv_heads; h++) {
      const T* from = heads.k + token * heads.k_stride + h * head_dim;
      if (rotary.k_norm) {
        norm_and_rotate(k, from, rotary.k_norm, rotary.eps, cos, sin, head_dim);
      } else {
        widen_head(k, from, head_dim);
      }
      widen_head(v, heads.v + token * heads.v_stride + h * head_dim, head_dim);
      char* sub_block = KvLayout<T, kInt8>::sub_block(shape, layer, block, h, offset / kSub);
      store_token<T, kInt8>(shape, sub_block, offset % kSub, k, v, is_last[token]);
    }
  });
}

}  // namespace nanoserve::attention
