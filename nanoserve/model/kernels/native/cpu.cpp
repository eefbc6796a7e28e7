// The CPU kernels: one translation unit behind a plain C interface. Every exported name starts with ns_.
// Pointers are to tensors that Python has checked; sizes and strides count elements.
#include "attention.h"
#include "fused.h"
#include "pool.h"

#define NS_EXPORT extern "C" __attribute__((visibility("default")))

NS_EXPORT void ns_set_threads(int64_t threads) { nanoserve::Pool::get().resize((int)threads); }
NS_EXPORT int64_t ns_threads() { return nanoserve::Pool::get().threads(); }
NS_EXPORT void ns_set_spin(int64_t microseconds) { nanoserve::Pool::get().spin_for(microseconds); }

// Counts each of `items` once in `counts`: shows that the pool does every item exactly once.
NS_EXPORT void ns_count(int64_t* counts, int64_t items) {
  nanoserve::each(items, [&](int64_t i) { counts[i]++; });
}

// ---- attention and the operations around it; `shape` and `batch` are kv.h's ----

template <class F>
static void with_types(const nanoserve::attention::AttentionShape& shape, F&& f) {
  using nanoserve::attention::bf16;
  if (shape.is_bf16) {
    shape.is_int8 ? f(bf16{}, std::true_type()) : f(bf16{}, std::false_type());
  } else {
    shape.is_int8 ? f(float{}, std::true_type()) : f(float{}, std::false_type());
  }
}

// Stores k and v [num_tokens, num_kv_heads, head_dim] as they are; strides from token to token.
NS_EXPORT void ns_store_kv(const nanoserve::attention::AttentionShape* shape, const nanoserve::attention::AttentionBatch* batch,
                           const void* k, int64_t k_stride, const void* v, int64_t v_stride, char* layer) {
  with_types(*shape, [&](auto element, auto is_int8) {
    using T = decltype(element);
    nanoserve::attention::Heads<T> heads{nullptr, (const T*)k, (const T*)v, 0, k_stride, v_stride};
    nanoserve::attention::store_heads<T, is_int8.value>(*shape, *batch, heads, {}, layer);
  });
}

// q [num_tokens, num_heads, head_dim] -> out [num_tokens, num_heads * head_dim].
NS_EXPORT void ns_attention(const nanoserve::attention::AttentionShape* shape, const nanoserve::attention::AttentionBatch* batch,
                            const void* q, int64_t q_stride, char* layer, void* out) {
  with_types(*shape, [&](auto element, auto is_int8) {
    using T = decltype(element);
    nanoserve::attention::Attention<T, is_int8.value>(*shape, *batch, (const T*)q, q_stride, layer, (T*)out).run();
  });
}

// The merged projection qkv [num_tokens, (num_heads + 2 num_kv_heads) * head_dim] -> out as above: norms and rotates
// queries and keys (queries in place), stores keys and values, attends. `cos`, `sin` [num_tokens, head_dim].
NS_EXPORT void ns_attend_qkv(const nanoserve::attention::AttentionShape* shape, const nanoserve::attention::AttentionBatch* batch, void* qkv,
                             const void* q_norm, const void* k_norm, float eps, const void* cos, const void* sin,
                             char* layer, void* out) {
  with_types(*shape, [&](auto element, auto is_int8) {
    using T = decltype(element);
    int64_t q_size = shape->num_heads * shape->head_dim, kv_size = shape->num_kv_heads * shape->head_dim;
    int64_t stride = q_size + 2 * kv_size;
    T* q = (T*)qkv;
    nanoserve::attention::Heads<T> heads{q, q + q_size, q + q_size + kv_size, stride, stride, stride};
    nanoserve::attention::Rotary<T> rotary{(const T*)q_norm, (const T*)k_norm, eps, (const T*)cos, (const T*)sin};
    nanoserve::attention::store_heads<T, is_int8.value>(*shape, *batch, heads, rotary, layer);
    nanoserve::attention::Attention<T, is_int8.value>(*shape, *batch, q, stride, layer, (T*)out).run();
  });
}

// x [rows, size] += delta (none: a null pointer), then out = RMSNorm of it.
NS_EXPORT void ns_add_rms_norm(int64_t is_bf16, void* x, const void* delta, const void* weight, float eps, void* out,
                               int64_t rows, int64_t size) {
  using nanoserve::attention::bf16;
  if (is_bf16) {
    nanoserve::attention::add_rms_norm((bf16*)x, (const bf16*)delta, (const bf16*)weight, eps, (bf16*)out, rows, size);
  } else {
    nanoserve::attention::add_rms_norm((float*)x, (const float*)delta, (const float*)weight, eps, (float*)out, rows, size);
  }
}

// gate_up [rows, 2 * size] -> out [rows, size].
NS_EXPORT void ns_silu_and_mul(int64_t is_bf16, const void* gate_up, void* out, int64_t rows, int64_t size) {
  if (is_bf16) {
    nanoserve::attention::silu_and_mul((const nanoserve::attention::bf16*)gate_up, (nanoserve::attention::bf16*)out, rows, size);
  } else {
    nanoserve::attention::silu_and_mul((const float*)gate_up, (float*)out, rows, size);
  }
}
