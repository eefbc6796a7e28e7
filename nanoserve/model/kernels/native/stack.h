// All dense decoder layers of a step in one call. Between two calls from Python the pool's threads fall asleep, and what
// Python needs has been pushed out of the caches by the weights: at one row that cost a fifth of the step.
#pragma once
#include "attention.h"
#include "fused.h"
#include "gemm.h"
#include "integer.h"
#include "ranks.h"

namespace nanoserve {

// Python fills these; every field is 8 bytes. `kind`: 0 full precision, 8 or 4 bits; int weights have scales and sums.
struct LinearWeight {
  int64_t kind, n, k;
  const void *packed, *scales, *sums, *bias;
};

struct LayerWeights {
  LinearWeight qkv, o, gate_up, down;
  const void *input_norm, *post_norm, *q_norm, *k_norm;
};

// Memory for a step, [num_tokens] rows each: hidden_size twice, qkv, attention, gate and up, their product.
struct StackBuffers {
  void *normed, *delta, *qkv, *attended, *gate_up, *inner;
};

template <class T>
inline void linear(const LinearWeight& w, const void* input, void* output, int64_t rows) {
  typedef std::conditional_t<sizeof(T) == 2, bf16, float> X;
  const X *x = (const X*)input, *bias = (const X*)w.bias;
  X* y = (X*)output;
  IntWeight integers{(const uint8_t*)w.packed, (const float*)w.scales, (const int32_t*)w.sums};
  if (w.kind == 8) {
    linear_int8(x, w.k, integers, bias, y, w.n, rows, w.n, w.k);
  } else if (w.kind == 4) {
    linear_int4(x, w.k, integers, bias, y, w.n, rows, w.n, w.k);
  } else if constexpr (sizeof(T) == 2) {
    linear_bf16(x, w.k, (const uint32_t*)w.packed, bias, y, w.n, rows, w.n, w.k);
  } else {
    linear_float(x, w.k, (const uint32_t*)w.packed, bias, y, w.n, rows, w.n, w.k);
  }
}

// x [num_tokens, hidden_size] goes through layers `first` ... `last` - 1 of `num_layers` in place; what the last of them
// adds stays in `buffers` unless it is the network's last. Layer i's KV lies at `kv` + i * `kv_layer_bytes`. `ranks` sum
// what the two halves of a layer add where they hold shares of it; null: whole layers. False when the ranks have parted.
template <class T, bool kInt8>
inline bool run_stack(const attention::AttentionShape& shape, const attention::AttentionBatch& batch,
                      const LayerWeights* layers, int64_t first, int64_t last, int64_t num_layers, float eps, T* x,
                      const T* cos, const T* sin, char* kv, int64_t kv_layer_bytes, const StackBuffers& buffers,
                      Ranks* ranks) {
  using namespace attention;
  int64_t rows = batch.num_tokens, hidden = layers[0].o.n, inner = layers[0].down.k;
  int64_t q_size = shape.num_heads * shape.head_dim, kv_size = shape.num_kv_heads * shape.head_dim;
  int64_t stride = q_size + 2 * kv_size;
  T *normed = (T*)buffers.normed, *delta = (T*)buffers.delta, *q = (T*)buffers.qkv, *attended = (T*)buffers.attended;
  for (int64_t i = first; i < last; i++) {
    const LayerWeights& w = layers[i];
    char* layer_kv = kv + i * kv_layer_bytes;
    add_rms_norm(x, i ? (const T*)delta : nullptr, (const T*)w.input_norm, eps, normed, rows, hidden);
    linear<T>(w.qkv, normed, q, rows);
    Heads<T> heads{q, q + q_size, q + q_size + kv_size, stride, stride, stride};
    store_heads<T, kInt8>(shape, batch, heads, {(const T*)w.q_norm, (const T*)w.k_norm, eps, cos, sin}, layer_kv);
    Attention<T, kInt8>(shape, batch, q, stride, layer_kv, attended).run();
    linear<T>(w.o, attended, delta, rows);
    if (ranks && !ranks->sum(delta, rows * hidden)) return false;
    add_rms_norm(x, (const T*)delta, (const T*)w.post_norm, eps, normed, rows, hidden);
    linear<T>(w.gate_up, normed, buffers.gate_up, rows);
    silu_and_mul((const T*)buffers.gate_up, (T*)buffers.inner, rows, inner);
    linear<T>(w.down, buffers.inner, delta, rows);
    if (ranks && !ranks->sum(delta, rows * hidden)) return false;
  }
  if (last < num_layers) return true;
  each_row(rows, hidden * (int64_t)sizeof(T), [=](int64_t row) {
    for (int64_t j = row * hidden; j < (row + 1) * hidden; j += attention::kLanes)
      attention::store(x + j, attention::load(x + j) + attention::load(delta + j));
  });
  return true;
}

}  // namespace nanoserve

// 0, or 1 when the ranks have parted.
NS_EXPORT int64_t ns_run_stack(const attention::AttentionShape* shape, const attention::AttentionBatch* batch,
                               const LayerWeights* layers, int64_t first, int64_t last, int64_t num_layers, float eps,
                               void* x, const void* cos, const void* sin, char* kv, int64_t kv_layer_bytes,
                               const StackBuffers* buffers, Ranks* ranks) {
  bool together = true;
  with_types(*shape, [&](auto element, auto is_int8) {
    using T = decltype(element);
    together = run_stack<T, is_int8.value>(*shape, *batch, layers, first, last, num_layers, eps, (T*)x, (const T*)cos,
                                           (const T*)sin, kv, kv_layer_bytes, *buffers, ranks);
  });
  return !together;
}
