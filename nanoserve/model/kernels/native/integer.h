// Weights of 8 and of 4 bits times activations of 8 bits. All sums are integers, so they are exact on every level.
//
// int8: w = q * scale[column], q in [-127, 127]. Activations: x = q * scale[row], found per row as the product runs.
// int4: groups of 32 k. w = (q - 8) * m[group, column] * scale[column], q in [0, 15], m an integer in [-15, 15] other
// than 0. (q - 8) * m is an int8, so one product serves both, and few rows can multiply the 4-bit values themselves and
// apply m to the sum of a group. (Two-level scales: VS-Quant, Dai et al. 2021; integer ones so that int8 products serve:
// QServe, Lin et al. 2024.)
#pragma once
#include <cmath>

#include "gemm.h"

namespace nanoserve {

constexpr int64_t kGroup = 32;                            // k that share a multiplier
constexpr int64_t kChunk = 2 * kGroup;                    // k that an AMX step takes: what int8 and int4 are padded to
constexpr int64_t kChunkBytes = kChunk * kPanel / 2 + 2 * kPanel;  // int4: two groups of nibbles, their multipliers

inline int64_t int_steps(int64_t k) { return ceil_div(k, kChunk) * (kChunk / 4); }

// ---- quantizing ----

// Nearest integer, ties to even, for |x| < 2^22; in plain C, so that loops become vectors.
inline int32_t nearest(float x, float factor) {
  float shifted = __builtin_fmaf(x, factor, 12582912.0f);
  int32_t bits;
  memcpy(&bits, &shifted, 4);
  return bits - 0x4b400000;
}

// The largest |x|; NaN where one of them is not finite.
template <class T>
inline float largest(const T* x, int64_t count) {
  uint32_t most = 0;
  for (int64_t i = 0; i < count; i++) {
    float value = widen(x[i]);
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;
  }
  if (most >= 0x7f800000) return NAN;
  float value;
  memcpy(&value, &most, 4);
  return value;
}

// Factors for values up to `most`: q = nearest(x * inverse), x = q * scale. NaN makes a row of NaN.
struct Scale {
  float scale, inverse;
  explicit Scale(float most) : scale(most / 127), inverse(most > 0 ? 127 / most : 0) {
    if (inverse > 3e38f) scale = inverse = 0;  // a row of denormals counts as zero
  }
};

// ---- one step: 4 k ----

#ifdef __AVX512F__
struct VnniDot {
  typedef uint8_t A;  // plus 128: the instruction wants one unsigned side; `sums` takes it out again
  typedef int32_t Acc;
  typedef Ints Sum;
  typedef Ints B;
  static constexpr int kAPerStep = 4;
  static constexpr int kOffset = 128;
  static B prepare(Ints b) { return b; }
  static Sum add(Sum sum, const A* a, B b) { return _mm512_dpbusd_epi32(sum, set(word(a)), b); }
};
typedef VnniDot IntDot;
#else
// |b| * (a with b's sign): pairs stay below 2 * 127 * 127 < 2^15, so the 16-bit sums cannot saturate.
struct MaddDot {
  typedef int8_t A;
  typedef int32_t Acc;
  typedef Ints Sum;
  static constexpr int kAPerStep = 4;
  static constexpr int kOffset = 0;
  struct B {
    Ints value, size;
  };
  static B prepare(Ints b) { return {b, _mm256_abs_epi8(b)}; }
  static Sum add(Sum sum, const A* a, B b) {
    Ints pairs = _mm256_maddubs_epi16(b.size, _mm256_sign_epi8(set(word(a)), b.value));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
};
typedef MaddDot IntDot;
#endif

#ifdef __AMX_TILE__
typedef Tiles<true> IntKernel;
constexpr int kIntOffset = 0;
#else
typedef Vectors<IntDot> IntKernel;
constexpr int kIntOffset = IntDot::kOffset;
#endif

// ---- activations ----

// x as int8 plus `offset`, padded to the packed K with zeros; and the scale of each row. `sums` [rows][K / 32] are -8
// times the sums of groups, for the product that reads nibbles; null where nobody wants them.
template <class X, class A>
inline void quantize_rows(const X* x, int64_t ldx, int64_t rows, int64_t k, int64_t width, int offset, A* a,
                          float* scales, int32_t* sums) {
  each_if(rows * k >= 1 << 16, rows, [&](int64_t r) {
    const X* from = x + r * ldx;
    A* to = a + r * width;
    Scale scale(largest(from, k));
    scales[r] = scale.scale;
    for (int64_t i = 0; i < k; i++) to[i] = (A)(nearest(widen(from[i]), scale.inverse) + offset);
    memset(to + k, offset, width - k);
    if (!sums) return;
    for (int64_t g = 0; g < width / kGroup; g++) {
      int32_t sum = 0;
      for (int64_t i = 0; i < kGroup; i++) sum += to[g * kGroup + i];
      sums[r * (width / kGroup) + g] = -8 * sum;
    }
  });
}

// Integer sums -> y: what the rows' and the columns' scales make of them. Scales and sums of columns are padded.
template <class Y>
struct IntOut {
  Y* y;
  int64_t ldy;
  const Y* bias;
  int64_t columns;
  const float* row_scales;
  const float* column_scales;
  const int32_t* column_sums;  // of the int8 weights
  int offset;

  void operator()(const int32_t* c, int64_t row, int64_t count, int64_t column, int64_t width) const {
    for (int64_t r = 0; r < count; r++, c += kPanel) {
      Floats row_scale = set(row_scales[row + r]);
      put_row(y + (row + r) * ldy + column, width, [&](int64_t n) {
        Ints sums = load(c + n);
        if (offset) sums = sub32(sums, mul32(load(column_sums + column + n), set((uint32_t)offset)));
        Floats value = mul(to_floats(sums), mul(row_scale, load(column_scales + column + n)));
        return bias ? add(value, bias_lanes(bias, column + n, columns)) : value;
      });
    }
  }
};

// ---- int8 weights ----

template <class T>
inline void pack_int8(const T* w, int64_t ldw, int8_t* packed, float* scales, int32_t* sums, int64_t n, int64_t k) {
  int64_t steps = int_steps(k);
  memset(scales, 0, ceil_div(n, kPanel) * kPanel * 4);
  memset(sums, 0, ceil_div(n, kPanel) * kPanel * 4);
  each(ceil_div(n, kPanel), [&](int64_t p) {
    int8_t* panel = packed + p * steps * kPanel * 4;
    memset(panel, 0, steps * kPanel * 4);
    for (int64_t column = p * kPanel; column < std::min(n, (p + 1) * kPanel); column++) {
      const T* from = w + column * ldw;
      Scale scale(largest(from, k));
      scales[column] = scale.scale;
      for (int64_t i = 0; i < k; i++) {
        int8_t q = (int8_t)nearest(widen(from[i]), scale.inverse);
        panel[(i / 4 * kPanel + column % kPanel) * 4 + i % 4] = q;
        sums[column] += q;
      }
    }
  });
}

// Scales, sums and packed values of one quantized weight.
struct IntWeight {
  const uint8_t* packed;
  const float* scales;
  const int32_t* sums;
};

template <class Kernel, class X>
inline void linear_int8_by(int offset, const X* x, int64_t ldx, const IntWeight& w, const X* bias, X* y, int64_t ldy,
                           const Shape& shape, int64_t k) {
  typedef typename Kernel::A A;
  int64_t width = shape.steps * 4;
  A* a = (A*)scratch<A[8]>(shape.rows * width);
  float* scales = (float*)scratch<float[8]>(shape.rows * sizeof(float));
  quantize_rows(x, ldx, shape.rows, k, width, offset, a, scales, nullptr);
  IntOut<X> out{y, ldy, bias, shape.columns, scales, w.scales, w.sums, offset};
  multiply<Kernel>(a, width, Packed{(const uint32_t*)w.packed, shape.steps * kPanel}, shape, out);
}

// Vectors read the weight of one to three rows faster than tiles do; integer sums are the same by either.
template <class X>
inline void linear_int8(const X* x, int64_t ldx, const IntWeight& w, const X* bias, X* y, int64_t ldy, int64_t rows,
                        int64_t n, int64_t k) {
  Shape shape{rows, n, int_steps(k)};
  if (rows <= 3) return linear_int8_by<Vectors<IntDot>>(IntDot::kOffset, x, ldx, w, bias, y, ldy, shape, k);
  linear_int8_by<IntKernel>(kIntOffset, x, ldx, w, bias, y, ldy, shape, k);
}

// ---- int4 weights ----

// The multiplier and values of one group of 32 columns: of the integers around each column's ideal one, the best.
inline void quantize_group(const float (*w)[kPanel], const float* unit, int8_t* m, uint8_t (*q)[kPanel]) {
  float ideal[kPanel], least[kPanel];
  for (int n = 0; n < kPanel; n++) {
    float most = 0;
    for (int i = 0; i < kGroup; i++) most = fabsf(w[i][n]) > fabsf(most) ? w[i][n] : most;
    ideal[n] = unit[n] > 0 ? most / (-8 * unit[n]) : 1;
    least[n] = INFINITY;
  }
  for (int change = -2; change <= 1; change++) {
    float inverse[kPanel], step[kPanel], error[kPanel] = {};
    int8_t candidate[kPanel];
    for (int n = 0; n < kPanel; n++) {
      int size = std::min(std::max((int)nearest(fabsf(ideal[n]), 1.0f) + change, 1), 15);
      candidate[n] = (int8_t)(ideal[n] < 0 ? -size : size);
      step[n] = candidate[n] * unit[n];
      inverse[n] = unit[n] > 0 ? 1 / step[n] : 0;
    }
    uint8_t values[kGroup][kPanel];
    for (int i = 0; i < kGroup; i++)
      for (int n = 0; n < kPanel; n++) {
        int32_t value = std::min(std::max(nearest(w[i][n], inverse[n]), -8), 7);
        float miss = w[i][n] - value * step[n];
        values[i][n] = (uint8_t)(value + 8);
        error[n] += miss * miss;
      }
    for (int n = 0; n < kPanel; n++) {
      if (!(error[n] < least[n])) continue;
      least[n] = error[n];
      m[n] = candidate[n];
      for (int i = 0; i < kGroup; i++) q[i][n] = values[i][n];
    }
  }
}

// Step j of a group lies in the low nibbles of row j (128 bytes), step j + 4 in the high ones.
inline void store_group(const uint8_t (*q)[kPanel], uint8_t* nibbles) {
  for (int j = 0; j < 4; j++)
    for (int n = 0; n < kPanel; n++)
      for (int i = 0; i < 4; i++) nibbles[(j * kPanel + n) * 4 + i] = q[j * 4 + i][n] | q[(j + 4) * 4 + i][n] << 4;
}

template <class T>
inline void pack_int4(const T* w, int64_t ldw, uint8_t* packed, float* scales, int32_t* sums, int64_t n, int64_t k) {
  int64_t chunks = ceil_div(k, kChunk);
  each(ceil_div(n, kPanel), [&](int64_t p) {
    int64_t columns = std::min(kPanel, n - p * kPanel);
    float* unit = scales + p * kPanel;
    for (int c = 0; c < kPanel; c++) {
      float most = c < columns ? largest(w + (p * kPanel + c) * ldw, k) / (8 * 15) : 0;
      unit[c] = most > 1e-36f || most != most ? most : 0;
      sums[p * kPanel + c] = 0;
    }
    for (int64_t g = 0; g < 2 * chunks; g++) {
      float group[kGroup][kPanel] = {};
      for (int64_t i = 0; i < std::min(kGroup, k - g * kGroup); i++)
        for (int64_t c = 0; c < columns; c++) group[i][c] = widen(w[(p * kPanel + c) * ldw + g * kGroup + i]);
      uint8_t q[kGroup][kPanel];
      int8_t m[kPanel] = {};
      memset(q, 8, sizeof(q));
      quantize_group(group, unit, m, q);
      uint8_t* chunk = packed + (p * chunks + g / 2) * kChunkBytes;
      store_group(q, chunk + g % 2 * (kGroup * kPanel / 2));
      memcpy(chunk + kChunk * kPanel / 2 + g % 2 * kPanel, m, kPanel);
      for (int64_t c = 0; c < kPanel; c++)
        for (int64_t i = 0; i < kGroup; i++) sums[p * kPanel + c] += (q[i][c] - 8) * m[c];
    }
  });
}

// (q - 8) * m for the even and the odd bytes of 16-bit lanes, whose q are `even` and `odd`; all of it modulo 256.
inline Ints scale_bytes(Ints even, Ints odd, Ints m, Ints eight_m) {
  Ints low = bit_and(mul16(even, m), set(0x00ff00ffu));
  return sub8(bit_or(low, left16<8>(mul16(odd, m))), eight_m);
}

// A group as int8: 8 steps of 128 bytes.
inline void expand_group(const uint8_t* nibbles, const int8_t* m, int8_t* out) {
  const Ints low = set(0x000f000fu);
  for (int n = 0; n < kPanel; n += kLanes) {
    Ints factor = widen_bytes(m + n);
    Ints eight_m = mul32(bit_and(mul32(factor, set(8u)), set(0xffu)), set(0x01010101u));
    factor = mul32(bit_and(factor, set(0xffffu)), set(0x00010001u));
    for (int j = 0; j < 4; j++) {
      Ints x = load((const uint32_t*)nibbles + j * kPanel + n);
      int8_t* to = out + (j * kPanel + n) * 4;
      store((int32_t*)to, scale_bytes(bit_and(x, low), bit_and(right16<8>(x), low), factor, eight_m));
      store((int32_t*)(to + 4 * kPanel * 4), scale_bytes(bit_and(right16<4>(x), low), right16<12>(x), factor, eight_m));
    }
  }
}

// Panels of an int4 weight, turned into int8 in this thread's scratch memory.
struct Expanded {
  const uint8_t* packed;
  int64_t chunks;

  Panels operator()(int64_t first, int count) const {
    int64_t bytes = chunks * kChunk * kPanel;
    int8_t* out = (int8_t*)scratch<Expanded>(bytes * count);
    for (int64_t chunk = 0; chunk < chunks * count; chunk++) {
      const uint8_t* from = packed + (first * chunks + chunk) * kChunkBytes;
      for (int half = 0; half < 2; half++)
        expand_group(from + half * kGroup * kPanel / 2, (const int8_t*)from + kChunk * kPanel / 2 + half * kPanel,
                     out + (chunk * 2 + half) * kGroup * kPanel);
    }
    return {(const uint32_t*)out, bytes / 4};
  }
};

#ifdef __AVX512F__
constexpr int64_t kDirectRows = 6;   // at once: their sums fill the registers
constexpr int64_t kDirectMost = 18;  // rows up to which three passes over a panel's nibbles beat turning them into int8

// R rows by one panel, straight from the nibbles.
template <int R>
inline void direct_panel(const int8_t* a, int64_t lda, const int32_t* sums, int64_t groups, const uint8_t* chunk,
                         int32_t* c) {
  const Ints low = _mm512_set1_epi8(15);
  Ints total[R][2];
  for (int r = 0; r < R; r++) total[r][0] = total[r][1] = _mm512_setzero_si512();
  for (int64_t g = 0; g < groups; g++) {
    const uint8_t* nibbles = chunk + g % 2 * (kGroup * kPanel / 2);
    const uint8_t* m = chunk + kChunk * kPanel / 2 + g % 2 * kPanel;
    for (int line = 0; line < 9; line++) _mm_prefetch((const char*)nibbles + 2 * kChunkBytes + line * 64, _MM_HINT_T0);
    Ints dots[R][2];
    for (int r = 0; r < R; r++) dots[r][0] = dots[r][1] = set((uint32_t)sums[r * groups + g]);
    for (int j = 0; j < 4; j++)
      for (int half = 0; half < 2; half++) {
        Ints both = _mm512_loadu_si512(nibbles + j * 128 + half * 64);
        Ints first = _mm512_and_si512(both, low), second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        for (int r = 0; r < R; r++) {
          const int8_t* at = a + r * lda + g * kGroup + j * 4;
          dots[r][half] = _mm512_dpbusd_epi32(dots[r][half], first, set(word(at)));
          dots[r][half] = _mm512_dpbusd_epi32(dots[r][half], second, set(word(at + 16)));
        }
      }
    // |dot| <= 8 * 127 * 32 < 2^15: its low half is all of it, so a 16-bit product applies the multiplier.
    for (int half = 0; half < 2; half++) {
      Ints factor = _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(m + half * 16)));
      factor = _mm512_and_si512(factor, set(0xffffu));
      for (int r = 0; r < R; r++) total[r][half] = _mm512_dpwssd_epi32(total[r][half], dots[r][half], factor);
    }
    if (g % 2) chunk += kChunkBytes;
  }
  for (int r = 0; r < R; r++) {
    store(c + r * kPanel, total[r][0]);
    store(c + r * kPanel + kLanes, total[r][1]);
  }
}

template <int R>
inline void direct_rows(int64_t count, const int8_t* a, int64_t lda, const int32_t* sums, int64_t groups,
                        const uint8_t* panel, int32_t* c) {
  if (count == R) return direct_panel<R>(a, lda, sums, groups, panel, c);
  if constexpr (R < kDirectRows) direct_rows<R + 1>(count, a, lda, sums, groups, panel, c);
}

#else
constexpr int64_t kDirectMost = 0;
#endif

// Activations in the forms that a product with int4 weights may want. Null are those that it does not.
struct Int4Input {
  const int8_t* plain = nullptr;  // as the nibbles' own product wants them, with the sums of groups
  const int32_t* sums = nullptr;
  const IntKernel::A* a = nullptr;
  float* scales;
  int64_t width;

  template <class X>
  Int4Input(const X* x, int64_t ldx, int64_t rows, int64_t k, bool has_few, bool has_many) : width(int_steps(k) * 4) {
    typedef IntKernel::A A;
    scales = (float*)scratch<Int4Input>(rows * sizeof(float));
    if (has_few) {
      int8_t* to = (int8_t*)scratch<Int4Input[1]>(rows * width);
      int32_t* group_sums = (int32_t*)scratch<Int4Input[2]>(rows * width / kGroup * sizeof(int32_t));
      quantize_rows(x, ldx, rows, k, width, 0, to, scales, group_sums);
      plain = to;
      sums = group_sums;
    }
    if (has_many) {
      A* to = (A*)scratch<Int4Input[3]>(rows * width);
      quantize_rows(x, ldx, rows, k, width, kIntOffset, to, scales, nullptr);
      a = to;
    }
  }
};

// A product with int4 weights: few rows multiply the nibbles themselves, more rows panels that are turned into int8.
template <class Out>
struct Int4Product {
  typedef Product<IntKernel, Expanded, Out> Many;
  static constexpr int64_t kRun = 4;  // panels
  Shape shape;
  Int4Input input;
  int64_t first;
  const uint8_t* packed;
  Out out;
  Many many;

  // Rows from `first` on of `input`; `out` counts from there.
  Int4Product(const Int4Input& input, int64_t first, const uint8_t* packed, const Shape& shape, Out out)
      : shape(shape), input(input), first(first), packed(packed), out(out),
        many(input.a + first * input.width, input.width, Expanded{packed, input.width / kChunk}, shape, out) {
    many.out.offset = kIntOffset;
    this->out.offset = 0;
  }
  bool is_direct() const { return shape.rows <= kDirectMost; }
  int64_t items() const { return !is_direct() ? many.items() : shape.rows ? ceil_div(shape.panels(), kRun) : 0; }

  void operator()(int64_t item) const {
    if (!is_direct()) return many(item);
#ifdef __AVX512F__
    int64_t groups = input.width / kGroup, panel_bytes = input.width / kChunk * kChunkBytes;
    int64_t at_once = ceil_div(shape.rows, ceil_div(shape.rows, kDirectRows));
    int32_t c[kDirectRows * kPanel];
    for (int64_t p = item * kRun; p < std::min(item * kRun + kRun, shape.panels()); p++)
      for (int64_t row = 0; row < shape.rows; row += at_once) {
        int64_t count = std::min(at_once, shape.rows - row);
        direct_rows<1>(count, input.plain + (first + row) * input.width, input.width,
                       input.sums + (first + row) * groups, groups, packed + p * panel_bytes, c);
        out(c, row, count, p * kPanel, std::min(kPanel, shape.columns - p * kPanel));
      }
#endif
  }
};

template <class X>
inline void linear_int4(const X* x, int64_t ldx, const IntWeight& w, const X* bias, X* y, int64_t ldy, int64_t rows,
                        int64_t n, int64_t k) {
  Int4Input input(x, ldx, rows, k, rows <= kDirectMost, rows > kDirectMost);
  IntOut<X> out{y, ldy, bias, n, input.scales, w.scales, w.sums, 0};
  Int4Product<IntOut<X>> product(input, 0, w.packed, Shape{rows, n, int_steps(k)}, out);
  each_if(product.many.is_worth_sharing(), product.items(), product);
}

// ---- rows of a quantized weight, for a tied embedding ----

template <class Y>
inline void gather_int8(const int64_t* ids, int64_t count, const IntWeight& w, Y* y, int64_t k) {
  int64_t steps = int_steps(k);
  each_if(count * k >= 1 << 16, count, [&](int64_t i) {
    const int8_t* from = (const int8_t*)w.packed + (ids[i] / kPanel * steps * kPanel + ids[i] % kPanel) * 4;
    for (int64_t j = 0; j < k; j++)
      put(y[i * k + j], from[j / 4 * kPanel * 4 + j % 4] * w.scales[ids[i]]);
  });
}

template <class Y>
inline void gather_int4(const int64_t* ids, int64_t count, const IntWeight& w, Y* y, int64_t k) {
  int64_t chunks = ceil_div(k, kChunk);
  each_if(count * k >= 1 << 16, count, [&](int64_t i) {
    int64_t column = ids[i] % kPanel;
    for (int64_t j = 0; j < k; j++) {
      const uint8_t* chunk = w.packed + (ids[i] / kPanel * chunks + j / kChunk) * kChunkBytes;
      int64_t half = j % kChunk / kGroup, step = j % kGroup / 4;
      uint8_t both = chunk[half * kGroup * kPanel / 2 + (step % 4 * kPanel + column) * 4 + j % 4];
      int value = (step < 4 ? both & 15 : both >> 4) - 8;
      int m = (int8_t)chunk[kChunk * kPanel / 2 + half * kPanel + column];
      put(y[i * k + j], value * m * w.scales[ids[i]]);
    }
  });
}

}  // namespace nanoserve
