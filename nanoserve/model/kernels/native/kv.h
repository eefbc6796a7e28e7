// Where keys and values lie. A sub-block holds 16 tokens of one KV head in the order that a product reads:
//
//   keys   [head_dim / pair][16][pair]    values [16 / pair][head_dim][pair]
//
// with pair = 2 for bfloat16 (the operand order of dpbf16 and AMX) and 1 for float32. A block of one layer is
// [num_kv_heads][block_size / 16] sub-blocks, keys then values; quantized, both are int8 in the same order, followed by
// 16 float32 scales of the keys and 16 of the values.
#pragma once
#include "lanes.h"

namespace nanoserve::attention {

constexpr int64_t kSub = 16;
constexpr int64_t kMaxHeadDim = 512;

// Python fills these two; every field is 8 bytes.
struct AttentionShape {
  int64_t num_heads, num_kv_heads, head_dim, block_size;
  int64_t is_bf16, is_int8;
  int64_t block_stride;  // bytes from a block to the next one of the same layer
};

// As ForwardBatch; query_starts are rows of the flat batch.
struct AttentionBatch {
  int64_t num_requests, num_tokens;
  const int64_t *query_starts, *query_lens, *kv_lens;
  const int64_t* block_tables;
  int64_t table_stride;
  const int64_t *slot_blocks, *slot_offsets;
};

template <class T>
constexpr int64_t kPair = sizeof(T) == 2 ? 2 : 1;

template <class T, bool kInt8>
struct KvLayout {
  using Stored = std::conditional_t<kInt8, int8_t, T>;

  static int64_t sub_block_bytes(const AttentionShape& shape) {
    return 2 * kSub * (shape.head_dim * (int64_t)sizeof(Stored) + (kInt8 ? (int64_t)sizeof(float) : 0));
  }

  static char* sub_block(const AttentionShape& shape, char* layer, int64_t block, int64_t head, int64_t index) {
    int64_t subs = shape.block_size / kSub;
    return layer + block * shape.block_stride + (head * subs + index) * sub_block_bytes(shape);
  }

  static Stored* keys(char* sub_block) { return (Stored*)sub_block; }
  static Stored* values(const AttentionShape& shape, char* sub_block) {
    return (Stored*)sub_block + kSub * shape.head_dim;
  }
  static float* key_scales(const AttentionShape& shape, char* sub_block) {
    return (float*)((Stored*)sub_block + 2 * kSub * shape.head_dim);
  }
  static float* value_scales(const AttentionShape& shape, char* sub_block) {
    return key_scales(shape, sub_block) + kSub;
  }
};

inline void narrow(float* to, const float* from, int64_t count) { std::memcpy(to, from, count * sizeof(float)); }
inline void narrow(bf16* to, const float* from, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(from + i));
}

// Rounds to whole multiples of the returned scale.
inline float quantize(int8_t* to, const float* from, int64_t count) {
  Lanes top = splat(0);
  for (int64_t i = 0; i < count; i += kLanes) top = max(top, absolute(load(from + i)));
  float highest_value = highest(top);
  Lanes factor = splat(highest_value > 0 ? 127 / highest_value : 0);
  for (int64_t i = 0; i < count; i += kLanes) store(to + i, load(from + i) * factor);
  return highest_value / 127;
}

template <int64_t kPairSize, class Stored>
inline void scatter_keys(Stored* keys, int64_t token, const Stored* k, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; d += kPairSize)
    std::memcpy(keys + d * kSub + token * kPairSize, k + d, kPairSize * sizeof(Stored));
}

template <int64_t kPairSize, class Stored>
inline void scatter_values(Stored* values, int64_t token, const Stored* v, int64_t head_dim) {
  Stored* to = values + token / kPairSize * head_dim * kPairSize + token % kPairSize;
  for (int64_t d = 0; d < head_dim; d++) to[d * kPairSize] = v[d];
}

// Stores one token's key and value of one head, given in float32. `is_last`: no token of the request follows yet; then
// the other half of the last pair is cleared, for what an earlier owner left there could be NaN, and 0 x NaN is NaN.
template <class T, bool kInt8>
inline void store_token(const AttentionShape& shape, char* sub_block, int64_t token, const float* k, const float* v,
                        bool is_last) {
  using Layout = KvLayout<T, kInt8>;
  using Stored = typename Layout::Stored;
  alignas(64) Stored narrowed[kMaxHeadDim];
  int64_t head_dim = shape.head_dim;
  Stored *keys = Layout::keys(sub_block), *values = Layout::values(shape, sub_block);
  if constexpr (kInt8) {
    Layout::key_scales(shape, sub_block)[token] = quantize(narrowed, k, head_dim);
    scatter_keys<kPair<T>>(keys, token, narrowed, head_dim);
    Layout::value_scales(shape, sub_block)[token] = quantize(narrowed, v, head_dim);
  } else {
    narrow(narrowed, k, head_dim);
    scatter_keys<kPair<T>>(keys, token, narrowed, head_dim);
    narrow(narrowed, v, head_dim);
  }
  scatter_values<kPair<T>>(values, token, narrowed, head_dim);
  if (kPair<T> == 2 && is_last && token % 2 == 0)
    for (int64_t d = 0; d < head_dim; d++) values[(token / 2 * head_dim + d) * 2 + 1] = Stored{};
}

}  // namespace nanoserve::attention
