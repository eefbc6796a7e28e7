// Products of many weights at once: rows sorted by expert, each with the weight of its expert.
//
// The items of all products lie in one row, so that threads share experts with many rows and with few alike, and an
// expert without rows is never read. A row's result is what a product of that row alone would give (see gemm.h).
#pragma once
#include <vector>

#include "gemm.h"
#include "integer.h"

namespace nanoserve {

// `product(expert, first, count)` makes the product of the `count` rows from `first` on; expert e's rows end before
// ends[e].
template <class Make>
inline void each_expert(const int32_t* ends, int64_t experts, Make&& product) {
  std::vector<decltype(product(0, 0, 0))> products;
  std::vector<int64_t> item_ends;
  int64_t items = 0;
  for (int64_t e = 0, first = 0; e < experts; first = ends[e++]) {
    if (ends[e] == first) continue;
    products.push_back(product(e, first, ends[e] - first));
    item_ends.push_back(items += products.back().items());
  }
  each(items, [&](int64_t item) {
    int64_t i = std::upper_bound(item_ends.begin(), item_ends.end(), item) - item_ends.begin();
    products[i](i ? item - item_ends[i - 1] : item);
  });
}

// x [rows, k] -> y [rows, n]; `packed` holds the weights of all experts, each as pack() leaves it.
inline void experts_bf16(const bf16* x, const uint32_t* packed, bf16* y, const int32_t* ends, int64_t experts,
                         int64_t n, int64_t k) {
  Shape all{ends[experts - 1], n, bf16_steps(k)};
  int64_t lda, stride = all.steps * kPanel;
  auto a = prepare<Bf16Kernel>(x, k, all, k, &lda);
  each_expert(ends, experts, [&](int64_t e, int64_t first, int64_t count) {
    Packed panels{packed + e * all.panels() * stride, stride};
    FloatOut<bf16> out{y + first * n, n, nullptr, n};
    return Product<Bf16Kernel, Packed, FloatOut<bf16>>(a + first * lda, lda, panels, Shape{count, n, all.steps}, out);
  });
}

inline void experts_float(const float* x, const uint32_t* packed, float* y, const int32_t* ends, int64_t experts,
                          int64_t n, int64_t k) {
  int64_t stride = k * kPanel;
  each_expert(ends, experts, [&](int64_t e, int64_t first, int64_t count) {
    Shape shape{count, n, k};
    Packed panels{packed + e * shape.panels() * stride, stride};
    FloatOut<float> out{y + first * n, n, nullptr, n};
    return Product<FloatKernel, Packed, FloatOut<float>>(x + first * k, k, panels, shape, out);
  });
}

// The same for quantized weights: `w` holds packed values, scales and sums of one expert after the other. `panels` makes
// the panels of a kernel from an expert's packed values.
template <class X, class Panel>
inline void experts_integer(const X* x, const IntWeight& w, X* y, const int32_t* ends, int64_t experts, int64_t n,
                            int64_t k, Panel&& panels) {
  typedef IntKernel::A A;
  Shape all{ends[experts - 1], n, int_steps(k)};
  int64_t width = all.steps * 4, padded = all.panels() * kPanel;
  A* a = (A*)scratch<A[6]>(all.rows * width);
  float* scales = (float*)scratch<float[6]>(all.rows * sizeof(float));
  quantize_rows(x, k, all.rows, k, width, kIntOffset, a, scales, nullptr);
  each_expert(ends, experts, [&](int64_t e, int64_t first, int64_t count) {
    IntOut<X> out{y + first * n, n, nullptr, n, scales + first, w.scales + e * padded, w.sums + e * padded,
                  kIntOffset};
    return Product<IntKernel, decltype(panels(e)), IntOut<X>>(a + first * width, width, panels(e),
                                                              Shape{count, n, all.steps}, out);
  });
}

template <class X>
inline void experts_int8(const X* x, const IntWeight& w, X* y, const int32_t* ends, int64_t experts, int64_t n,
                         int64_t k) {
  int64_t stride = int_steps(k) * kPanel;
  experts_integer(x, w, y, ends, experts, n, k, [&](int64_t e) {
    return Packed{(const uint32_t*)w.packed + e * ceil_div(n, kPanel) * stride, stride};
  });
}

template <class X>
inline void experts_int4(const X* x, const IntWeight& w, X* y, const int32_t* ends, int64_t experts, int64_t n,
                         int64_t k) {
  int64_t chunks = ceil_div(k, kChunk);
  experts_integer(x, w, y, ends, experts, n, k, [&](int64_t e) {
    return Expanded{w.packed + e * ceil_div(n, kPanel) * chunks * kChunkBytes, chunks};
  });
}

// y[t] = the sum over j of weights[t][j] * rows[places[t][j]], in order of j.
template <class T>
inline void weighted_sum(const T* rows, const int64_t* places, const float* weights, int64_t tokens, int64_t chosen,
                         int64_t size, T* y) {
  each_if(tokens * chosen * size >= 1 << 16, tokens, [&](int64_t t) {
    float* sum = (float*)scratch<float[7]>(size * sizeof(float));
    memset(sum, 0, size * sizeof(float));
    for (int64_t j = 0; j < chosen; j++) {
      const T* row = rows + places[t * chosen + j] * size;
      float weight = weights[t * chosen + j];
      for (int64_t i = 0; i < size; i++) sum[i] += weight * widen(row[i]);
    }
    for (int64_t i = 0; i < size; i++) put(y[t * size + i], sum[i]);
  });
}

}  // namespace nanoserve
