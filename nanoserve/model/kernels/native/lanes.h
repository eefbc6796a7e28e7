// Sixteen floats at a time, on AVX-512 or on AVX2, and the two element types that they are loaded from.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace nanoserve::attention {

struct bf16 {
  uint16_t bits;
};

constexpr int64_t kLanes = 16;

#ifdef __AVX512F__

struct Lanes {
  __m512 v;
};

inline Lanes splat(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
inline Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes operator/(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }  // b where either is NaN
inline Lanes min(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }  // b where either is NaN
inline float sum(Lanes a) { return _mm512_reduce_add_ps(a.v); }
inline float highest(Lanes a) { return _mm512_reduce_max_ps(a.v); }
inline Lanes round(Lanes a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a * 2^n for a whole n; 0 where that is too small
inline Lanes scale_by_power(Lanes a, Lanes n) { return {_mm512_scalef_ps(a.v, n.v)}; }
inline Lanes absolute(Lanes a) { return {_mm512_abs_ps(a.v)}; }

// The first `count` lanes of a; `other` in the rest.
inline Lanes first(int64_t count, Lanes a, float other) {
  __mmask16 kept = count >= kLanes ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
  return {_mm512_mask_blend_ps(kept, _mm512_set1_ps(other), a.v)};
}

inline Lanes load(const bf16* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}

inline __m256i to_bf16(Lanes a) {  // to nearest, ties to even
#ifdef __AVX512BF16__
  return (__m256i)_mm512_cvtneps_pbh(a.v);
#else
  __m512i x = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(x, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_blend_epi32(is_nan, rounded, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}

inline void store(bf16* p, Lanes a) { _mm256_storeu_si256((__m256i*)p, to_bf16(a)); }

inline Lanes load(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}

// Whole numbers in [-127, 127].
inline void store(int8_t* p, Lanes a) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}

#else

struct Lanes {
  __m256 low, high;
};

inline Lanes splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Lanes a) {
  _mm256_storeu_ps(p, a.low);
  _mm256_storeu_ps(p + 8, a.high);
}
inline Lanes operator+(Lanes a, Lanes b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Lanes operator/(Lanes a, Lanes b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Lanes max(Lanes a, Lanes b) {  // b where either is NaN
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
inline Lanes min(Lanes a, Lanes b) {  // b where either is NaN
  return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)};
}

inline float sum(Lanes a) {
  __m256 x = _mm256_add_ps(a.low, a.high);
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

inline float highest(Lanes a) {
  __m256 x = _mm256_max_ps(a.low, a.high);
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

inline __m256 round(__m256 a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Lanes round(Lanes a) { return {round(a.low), round(a.high)}; }

inline __m256 scale_by_power(__m256 a, __m256 n) {
  __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  __m256 scaled = _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
  return _mm256_andnot_ps(_mm256_cmp_ps(n, _mm256_set1_ps(-126), _CMP_LT_OQ), scaled);
}
// a * 2^n for a whole n below 128; 0 where that is too small
inline Lanes scale_by_power(Lanes a, Lanes n) {
  return {scale_by_power(a.low, n.low), scale_by_power(a.high, n.high)};
}

inline Lanes absolute(Lanes a) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}

inline __m256 first(int64_t count, __m256 a, float other) {
  __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  int limit = count > 8 ? 8 : count < 0 ? 0 : (int)count;
  __m256 kept = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(limit), lane));
  return _mm256_blendv_ps(_mm256_set1_ps(other), a, kept);
}
// The first `count` lanes of a; `other` in the rest.
inline Lanes first(int64_t count, Lanes a, float other) {
  return {first(count, a.low, other), first(count - 8, a.high, other)};
}

inline __m256 widen(__m128i a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16)); }
inline Lanes load(const bf16* p) {
  const __m128i* from = (const __m128i*)p;
  return {widen(_mm_loadu_si128(from)), widen(_mm_loadu_si128(from + 1))};
}

inline __m256i round_to_bf16(__m256 a) {  // to nearest, ties to even; the bits lie in the low halves
  __m256i x = _mm256_castps_si256(a);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(x, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256 is_nan = _mm256_cmp_ps(a, a, _CMP_UNORD_Q);
  __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
  rounded = _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), nan, is_nan));
  return _mm256_srli_epi32(rounded, 16);
}

inline __m256i to_bf16(Lanes a) {
  __m256i packed = _mm256_packus_epi32(round_to_bf16(a.low), round_to_bf16(a.high));
  return _mm256_permute4x64_epi64(packed, 0xd8);
}

inline void store(bf16* p, Lanes a) { _mm256_storeu_si256((__m256i*)p, to_bf16(a)); }

inline Lanes load(const int8_t* p) {
  __m128i x = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}

// Whole numbers in [-127, 127].
inline void store(int8_t* p, Lanes a) {
  __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high));
  words = _mm256_permute4x64_epi64(words, 0xd8);
  __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128((__m128i*)p, bytes);
}

#endif

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline void store(float* p, Lanes a, Lanes b) {
  store(p, a);
  store(p + kLanes, b);
}
inline void store(bf16* p, Lanes a, Lanes b) {
#ifdef __AVX512BF16__
  _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v));
#else
  store(p, a);
  store(p + kLanes, b);
#endif
}

// 2^x for finite x below 128, by a polynomial on [-1/2, 1/2] fitted for the relative error: 7.5e-8 at degree 5, 7.5e-5
// at degree 3. Below 2^-126 the result may be 0; NaN stays NaN.
template <int kDegree>
inline Lanes exp2(Lanes x) {
  Lanes whole = round(x), f = x - whole, y;
  if (kDegree == 5) {
    y = fma(splat(0x1.5c08e4p-10f), f, splat(0x1.3d0c52p-7f));
    y = fma(y, f, splat(0x1.c6b6e4p-5f));
    y = fma(y, f, splat(0x1.ebf918p-3f));
    y = fma(y, f, splat(0x1.62e428p-1f));
    y = fma(y, f, splat(0x1.000002p+0f));
  } else {
    y = fma(splat(0x1.c3f75ep-5f), f, splat(0x1.f0de1ap-3f));
    y = fma(y, f, splat(0x1.62f31ap-1f));
    y = fma(y, f, splat(0x1.fff692p-1f));
  }
  return scale_by_power(y, whole);
}

}  // namespace nanoserve::attention
