// What Python calls of attention.h and fused.h; cpu.cpp includes it. `shape` and `batch` are kv.h's.
#pragma once
#include "attention.h"
#include "fused.h"

template <class F>
static void with_types(const attention::AttentionShape& shape, F&& f) {
  using attention::bf16;
  if (shape.is_bf16) {
    shape.is_int8 ? f(bf16{}, std::true_type()) : f(bf16{}, std::false_type());
  } else {
    shape.is_int8 ? f(float{}, std::true_type()) : f(float{}, std::false_type());
  }
}

// Stores k and v [num_tokens, num_kv_heads, head_dim] as they are; strides from token to token.
NS_EXPORT void ns_store_kv(const attention::AttentionShape* shape, const attention::AttentionBatch* batch,
                           const void* k, int64_t k_stride, const void* v, int64_t v_stride, char* layer) {
  with_types(*shape, [&](auto element, auto is_int8) {
    using T = decltype(element);
    attention::Heads<T> heads{nullptr, (const T*)k, (const T*)v, 0, k_stride, v_stride};
    attention::store_heads<T, is_int8.value>(*shape, *batch, heads, {}, layer);
  });
}

// q [num_tokens, num_heads, head_dim] -> out [num_tokens, num_heads * head_dim].
NS_EXPORT void ns_attention(const attention::AttentionShape* shape, const attention::AttentionBatch* batch,
                            const void* q, int64_t q_stride, char* layer, void* out) {
  with_types(*shape, [&](auto element, auto is_int8) {
    using T = decltype(element);
    attention::Attention<T, is_int8.value>(*shape, *batch, (const T*)q, q_stride, layer, (T*)out).run();
  });
}

// The merged projection qkv [num_tokens, (num_heads + 2 num_kv_heads) * head_dim] -> out as above: norms and rotates
// queries and keys (queries in place), stores keys and values, attends. `cos`, `sin` [num_tokens, head_dim].
NS_EXPORT void ns_attend_qkv(const attention::AttentionShape* shape, const attention::AttentionBatch* batch, void* qkv,
                             const void* q_norm, const void* k_norm, float eps, const void* cos, const void* sin,
                             char* layer, void* out) {
  with_types(*shape, [&](auto element, auto is_int8) {
    using T = decltype(element);
    int64_t q_size = shape->num_heads * shape->head_dim, kv_size = shape->num_kv_heads * shape->head_dim;
    int64_t stride = q_size + 2 * kv_size;
    T* q = (T*)qkv;
    attention::Heads<T> heads{q, q + q_size, q + q_size + kv_size, stride, stride, stride};
    attention::Rotary<T> rotary{(const T*)q_norm, (const T*)k_norm, eps, (const T*)cos, (const T*)sin};
    attention::store_heads<T, is_int8.value>(*shape, *batch, heads, rotary, layer);
    attention::Attention<T, is_int8.value>(*shape, *batch, q, stride, layer, (T*)out).run();
  });
}

// x [rows, size] += delta (none: a null pointer), then out = RMSNorm of it.
NS_EXPORT void ns_add_rms_norm(int64_t is_bf16, void* x, const void* delta, const void* weight, float eps, void* out,
                               int64_t rows, int64_t size) {
  using attention::bf16;
  if (is_bf16) {
    attention::add_rms_norm((bf16*)x, (const bf16*)delta, (const bf16*)weight, eps, (bf16*)out, rows, size);
  } else {
    attention::add_rms_norm((float*)x, (const float*)delta, (const float*)weight, eps, (float*)out, rows, size);
  }
}

// gate_up [rows, 2 * size] -> out [rows, size].
NS_EXPORT void ns_silu_and_mul(int64_t is_bf16, const void* gate_up, void* out, int64_t rows, int64_t size) {
  if (is_bf16) {
    attention::silu_and_mul((const attention::bf16*)gate_up, (attention::bf16*)out, rows, size);
  } else {
    attention::silu_and_mul((const float*)gate_up, (float*)out, rows, size);
  }
}
