// The CPU kernels: one translation unit behind a plain C interface. Every exported name starts with ns_.
// Pointers are to tensors that Python has checked; sizes and strides count elements.
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "choose.h"
#include "gemm.h"
#include "integer.h"
#include "pool.h"

#define NS_EXPORT extern "C" __attribute__((visibility("default")))

using namespace nanoserve;

#include "attention_exports.h"
#include "experts_exports.h"
#include "ranks.h"
#include "stack.h"

// What build.py computed from the sources of this object.
NS_EXPORT int64_t ns_revision() { return NS_REVISION; }

// Asks the kernel for what this level needs; 0 when it may run. Called once, before any other thread uses the library.
NS_EXPORT int64_t ns_start() {
#ifdef __AMX_TILE__
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData);
#else
  return 0;
#endif
}

NS_EXPORT void ns_set_threads(int64_t threads) { Pool::get().resize((int)threads); }
NS_EXPORT int64_t ns_threads() { return Pool::get().threads(); }
NS_EXPORT void ns_set_spin(int64_t microseconds) { Pool::get().spin_for(microseconds); }

// Counts each of `items` once in `counts`: shows that the pool does every item exactly once.
NS_EXPORT void ns_count(int64_t* counts, int64_t items) {
  each(items, [&](int64_t i) { counts[i]++; });
}

// Reads `words` [count] as a product with one row would, and nothing else: what the memory gives is the floor of decoding.
NS_EXPORT int64_t ns_read(const int32_t* words, int64_t count) {
  constexpr int64_t kItem = 1 << 16;
  std::atomic<int64_t> seen{0};
  each(count / kItem, [&](int64_t item) {
    Ints sums[4] = {};
    const int32_t* from = words + item * kItem;
    for (int64_t i = 0; i < kItem; i += 4 * kLanes) {
      for (int line = 0; line < 4 * kLanes; line += 16) _mm_prefetch((const char*)(from + i + line + 1024), _MM_HINT_T0);
      for (int64_t j = 0; j < 4; j++) sums[j] = sub32(sums[j], load(from + i + j * kLanes));
    }
    int32_t lanes[kLanes];
    store(lanes, sub32(sub32(sums[0], sums[1]), sub32(sums[2], sums[3])));
    seen += lanes[0];
  });
  return seen;
}

// Bytes of a packed weight [n, k].
NS_EXPORT int64_t ns_bf16_bytes(int64_t n, int64_t k) { return ceil_div(n, kPanel) * kPanel * bf16_steps(k) * 4; }
NS_EXPORT int64_t ns_float_bytes(int64_t n, int64_t k) { return ceil_div(n, kPanel) * kPanel * k * 4; }

NS_EXPORT void ns_pack_bf16(const bf16* w, int64_t ldw, bf16* packed, int64_t n, int64_t k) {
  pack(w, ldw, packed, n, k, bf16_steps(k));
}
NS_EXPORT void ns_pack_float(const float* w, int64_t ldw, float* packed, int64_t n, int64_t k) {
  pack(w, ldw, packed, n, k, k);
}

// x [rows, k] with row stride ldx -> y [rows, n] with row stride ldy; bias [n] or null.
NS_EXPORT void ns_linear_bf16(const bf16* x, int64_t ldx, const uint32_t* packed, const bf16* bias, bf16* y, int64_t ldy,
                              int64_t rows, int64_t n, int64_t k) {
  linear_bf16(x, ldx, packed, bias, y, ldy, rows, n, k);
}
NS_EXPORT void ns_linear_float(const float* x, int64_t ldx, const uint32_t* packed, const float* bias, float* y,
                               int64_t ldy, int64_t rows, int64_t n, int64_t k) {
  linear_float(x, ldx, packed, bias, y, ldy, rows, n, k);
}

// Rows `ids` [count] of a packed weight -> y [count, k].
NS_EXPORT void ns_gather_bf16(const int64_t* ids, int64_t count, const bf16* packed, bf16* y, int64_t k) {
  gather(ids, count, packed, y, k, bf16_steps(k));
}
NS_EXPORT void ns_gather_float(const int64_t* ids, int64_t count, const float* packed, float* y, int64_t k) {
  gather(ids, count, packed, y, k, k);
}

// Quantized weights: `packed` of ns_int{8,4}_bytes, `scales` (float) and `sums` (int32) of ns_padded(n) entries. Inputs,
// outputs and biases are bfloat16 or float, as the name ends.
NS_EXPORT int64_t ns_padded(int64_t n) { return ceil_div(n, kPanel) * kPanel; }
NS_EXPORT int64_t ns_int8_bytes(int64_t n, int64_t k) { return ns_padded(n) * int_steps(k) * 4; }
NS_EXPORT int64_t ns_int4_bytes(int64_t n, int64_t k) { return ceil_div(n, kPanel) * ceil_div(k, kChunk) * kChunkBytes; }

#define NS_INTEGER(bits, suffix, type, packed_type)                                                                  \
  NS_EXPORT void ns_pack_int##bits##_##suffix(const type* w, int64_t ldw, packed_type* packed, float* scales,       \
                                              int32_t* sums, int64_t n, int64_t k) {                                \
    pack_int##bits(w, ldw, packed, scales, sums, n, k);                                                             \
  }                                                                                                                 \
  NS_EXPORT void ns_linear_int##bits##_##suffix(const type* x, int64_t ldx, const uint8_t* packed,                  \
                                                const float* scales, const int32_t* sums, const type* bias, type* y, \
                                                int64_t ldy, int64_t rows, int64_t n, int64_t k) {                  \
    linear_int##bits(x, ldx, IntWeight{packed, scales, sums}, bias, y, ldy, rows, n, k);                            \
  }                                                                                                                 \
  NS_EXPORT void ns_gather_int##bits##_##suffix(const int64_t* ids, int64_t count, const uint8_t* packed,           \
                                                const float* scales, type* y, int64_t k) {                          \
    gather_int##bits(ids, count, IntWeight{packed, scales, nullptr}, y, k);                                         \
  }
NS_INTEGER(8, bf16, bf16, int8_t)
NS_INTEGER(8, float, float, int8_t)
NS_INTEGER(4, bf16, bf16, uint8_t)
NS_INTEGER(4, float, float, uint8_t)

// One token for each row of logits [rows, vocab] with row stride `stride`, by the rule of model/choice.py. The settings
// have one entry a row.
#define NS_CHOOSE(suffix, type)                                                                                     \
  NS_EXPORT void ns_choose_##suffix(const type* logits, int64_t stride, int64_t rows, int64_t vocab,                \
                                    const double* temperature, const int64_t* top_k, const double* top_p,           \
                                    const double* log_min_p, const double* uniform, int64_t* tokens) {              \
    each_if(rows * vocab >= 1 << 16, rows, [&](int64_t r) {                                                         \
      tokens[r] = choose(logits + r * stride, vocab, {temperature[r], top_k[r], top_p[r], log_min_p[r], uniform[r]}); \
    });                                                                                                             \
  }
NS_CHOOSE(bf16, bf16)
NS_CHOOSE(float, float)
