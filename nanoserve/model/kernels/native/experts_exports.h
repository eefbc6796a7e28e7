// What Python calls of experts.h; cpu.cpp includes it.
#pragma once
#include "experts.h"

// Weights of many experts, each packed as above and one after the other; expert e takes the rows of x [rows, k] before
// ends[e] that e - 1 does not -> y [rows, n].
NS_EXPORT void ns_experts_bf16(const bf16* x, const uint32_t* packed, bf16* y, const int32_t* ends, int64_t experts,
                               int64_t n, int64_t k) {
  experts_bf16(x, packed, y, ends, experts, n, k);
}
NS_EXPORT void ns_experts_float(const float* x, const uint32_t* packed, float* y, const int32_t* ends, int64_t experts,
                                int64_t n, int64_t k) {
  experts_float(x, packed, y, ends, experts, n, k);
}
#define NS_EXPERTS(bits, suffix, type)                                                                                \
  NS_EXPORT void ns_experts_int##bits##_##suffix(const type* x, const uint8_t* packed, const float* scales,           \
                                                 const int32_t* sums, type* y, const int32_t* ends, int64_t experts,  \
                                                 int64_t n, int64_t k) {                                              \
    experts_int##bits(x, IntWeight{packed, scales, sums}, y, ends, experts, n, k);                                    \
  }
NS_EXPERTS(8, bf16, bf16)
NS_EXPERTS(8, float, float)
NS_EXPERTS(4, bf16, bf16)
NS_EXPERTS(4, float, float)

// rows [n, size], places and weights [tokens, chosen] -> y [tokens, size].
NS_EXPORT void ns_weighted_sum_bf16(const bf16* rows, const int64_t* places, const float* weights, int64_t tokens,
                                    int64_t chosen, int64_t size, bf16* y) {
  weighted_sum(rows, places, weights, tokens, chosen, size, y);
}
NS_EXPORT void ns_weighted_sum_float(const float* rows, const int64_t* places, const float* weights, int64_t tokens,
                                     int64_t chosen, int64_t size, float* y) {
  weighted_sum(rows, places, weights, tokens, chosen, size, y);
}
