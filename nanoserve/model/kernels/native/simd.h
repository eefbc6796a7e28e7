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
#endif

inline uint32_t word(const void* p) {
  uint32_t x;
  memcpy(&x, p, 4);
  return x;
}

}  // namespace nanoserve
