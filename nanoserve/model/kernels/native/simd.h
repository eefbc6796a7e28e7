// Vectors of 32-bit lanes, as wide as the level has them, and conversions between bfloat16 and float.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace nanoserve {

typedef uint16_t bf16;

inline float widen(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
inline float widen(float x) { return x; }

// Round to nearest, ties to even; NaN stays NaN.
inline bf16 narrow(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (bf16)(bits >> 16 | 0x40);
  return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#ifdef __AVX512F__
constexpr int kLanes = 16;
typedef __m512 Floats;
typedef __m512i Ints;
inline Ints load(const uint32_t* p) { return _mm512_loadu_si512(p); }
inline Ints set(uint32_t x) { return _mm512_set1_epi32((int)x); }
inline Floats set(float x) { return _mm512_set1_ps(x); }
inline Floats zero(Floats) { return _mm512_setzero_ps(); }
inline Ints zero(Ints) { return _mm512_setzero_si512(); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline Ints load(const int32_t* p) { return _mm512_loadu_si512(p); }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline void store(int32_t* p, Ints x) { _mm512_storeu_si512(p, x); }
inline Floats as_floats(Ints x) { return _mm512_castsi512_ps(x); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Ints low_halves(Ints x) { return _mm512_slli_epi32(x, 16); }
inline Ints high_halves(Ints x) { return _mm512_and_si512(x, set(0xffff0000u)); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats to_floats(Ints x) { return _mm512_cvtepi32_ps(x); }
inline Floats load(const bf16* p) {
  return as_floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline Ints widen_bytes(const int8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline Ints bit_and(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Ints bit_or(Ints a, Ints b) { return _mm512_or_si512(a, b); }
inline Ints sub32(Ints a, Ints b) { return _mm512_sub_epi32(a, b); }
inline Ints sub8(Ints a, Ints b) { return _mm512_sub_epi8(a, b); }
inline Ints mul32(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
inline Ints mul16(Ints a, Ints b) { return _mm512_mullo_epi16(a, b); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline float largest(Floats x) { return _mm512_reduce_max_ps(x); }
inline bool has_nan(Floats x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
template <int N> inline Ints right16(Ints x) { return _mm512_srli_epi16(x, N); }
template <int N> inline Ints left16(Ints x) { return _mm512_slli_epi16(x, N); }
#else
constexpr int kLanes = 8;
typedef __m256 Floats;
typedef __m256i Ints;
inline Ints load(const uint32_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Ints set(uint32_t x) { return _mm256_set1_epi32((int)x); }
inline Floats set(float x) { return _mm256_set1_ps(x); }
inline Floats zero(Floats) { return _mm256_setzero_ps(); }
inline Ints zero(Ints) { return _mm256_setzero_si256(); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline Ints load(const int32_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
inline void store(int32_t* p, Ints x) { _mm256_storeu_si256((__m256i*)p, x); }
inline Floats as_floats(Ints x) { return _mm256_castsi256_ps(x); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Ints low_halves(Ints x) { return _mm256_slli_epi32(x, 16); }
inline Ints high_halves(Ints x) { return _mm256_and_si256(x, set(0xffff0000u)); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats to_floats(Ints x) { return _mm256_cvtepi32_ps(x); }
inline Floats load(const bf16* p) {
  return as_floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline Ints widen_bytes(const int8_t* p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline Ints bit_and(Ints a, Ints b) { return _mm256_and_si256(a, b); }
inline Ints bit_or(Ints a, Ints b) { return _mm256_or_si256(a, b); }
inline Ints sub32(Ints a, Ints b) { return _mm256_sub_epi32(a, b); }
inline Ints sub8(Ints a, Ints b) { return _mm256_sub_epi8(a, b); }
inline Ints mul32(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
inline Ints mul16(Ints a, Ints b) { return _mm256_mullo_epi16(a, b); }
inline Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline float largest(Floats x) {
  float lanes[8], most;
  _mm256_storeu_ps(lanes, x);
  most = lanes[0];
  for (int i = 1; i < 8; i++) most = lanes[i] > most ? lanes[i] : most;
  return most;
}
inline bool has_nan(Floats x) { return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)); }
template <int N> inline Ints right16(Ints x) { return _mm256_srli_epi16(x, N); }
template <int N> inline Ints left16(Ints x) { return _mm256_slli_epi16(x, N); }
#endif

// Rounds as narrow() does.
inline void store(bf16* p, Floats x) {
#ifdef __AVX512BF16__
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x));
#else
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < kLanes; i++) p[i] = narrow(lanes[i]);
#endif
}

inline uint32_t word(const void* p) {
  uint32_t x;
  memcpy(&x, p, 4);
  return x;
}

}  // namespace nanoserve
