// Sixteen floats at a time, alike with AVX-512 and AVX2: every operation is one IEEE operation per lane, sums over lanes
// have one fixed order. Compiled with -ffp-contract=off: a multiplication and an addition are fused where `fma` says so
// and nowhere else, so that no inlining changes a bit.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define KOPIR_AVX512 1
#endif

namespace kopir {

constexpr int LANES = 16;

#ifdef KOPIR_AVX512

struct V {
    __m512 v;
};
inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
inline V fill(float x) { return {_mm512_set1_ps(x)}; }
inline V add(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
inline V sub(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline V mul(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline V div(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline V max(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
inline V min(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
inline V nearest(V a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// 2**n for whole n in [-126, 127].
inline V power_of_two(V n) {
    const __m512i bits = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23);
    return {_mm512_castsi512_ps(bits)};
}
// a where x >= limit, else 0.
inline V zero_below(V a, V x, float limit) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_NLT_UQ), a.v)};
}
inline V load_bf16(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
// Rounds to nearest, ties to even; not-a-number stays not-a-number.
inline void store_bf16(uint16_t* p, V a) {
#ifdef __AVX512BF16__
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a.v));
#else
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
    const __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
#endif
}
// Sixteen pairs of the numbers at `even` and `odd`.
inline void store_zipped(uint32_t* p, const uint16_t* even, const uint16_t* odd) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even)));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd)));
    _mm512_storeu_si512(p, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}
inline __m256 upper_half(V a) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)); }
inline __m256 folded_sum(V a) { return _mm256_add_ps(_mm512_castps512_ps256(a.v), upper_half(a)); }
inline __m256 folded_max(V a) { return _mm256_max_ps(_mm512_castps512_ps256(a.v), upper_half(a)); }
// Two bf16 numbers in each 32-bit lane: the first in the low half.
struct Pairs {
    __m512i v;
};
inline Pairs load_pairs(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
inline V low_half(Pairs w) { return {_mm512_castsi512_ps(_mm512_slli_epi32(w.v, 16))}; }
inline V high_half(Pairs w) {
    return {_mm512_castsi512_ps(_mm512_and_si512(w.v, _mm512_set1_epi32(int(0xffff0000u))))};
}

#else

struct V {
    __m256 a, b;
};
inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, V x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline V fill(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V add(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline V sub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline V mul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline V div(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline V max(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline V min(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline V nearest(V x) {
    constexpr int how = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, how), _mm256_round_ps(x.b, how)};
}
inline __m256 power_of_two(__m256 n) {
    const __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23));
}
inline V power_of_two(V n) { return {power_of_two(n.a), power_of_two(n.b)}; }
inline V zero_below(V a, V x, float limit) {
    const __m256 edge = _mm256_set1_ps(limit);
    return {_mm256_and_ps(a.a, _mm256_cmp_ps(x.a, edge, _CMP_NLT_UQ)),
            _mm256_and_ps(a.b, _mm256_cmp_ps(x.b, edge, _CMP_NLT_UQ))};
}
inline __m256 widen(__m128i half) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)); }
inline V load_bf16(const uint16_t* p) {
    return {widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline __m128i to_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    rounded = _mm256_blendv_epi8(rounded, _mm256_or_si256(bits, _mm256_set1_epi32(0x400000)), is_nan);
    rounded = _mm256_srli_epi32(rounded, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}
inline void store_bf16(uint16_t* p, V x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bf16(x.a));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), to_bf16(x.b));
}
inline void store_zipped(uint32_t* p, const uint16_t* even, const uint16_t* odd) {
    for (int i = 0; i < LANES; i += 8) {
        const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(even + i)));
        const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(odd + i)));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + i), _mm256_or_si256(low, _mm256_slli_epi32(high, 16)));
    }
}
inline __m256 folded_sum(V x) { return _mm256_add_ps(x.a, x.b); }
inline __m256 folded_max(V x) { return _mm256_max_ps(x.a, x.b); }
struct Pairs {
    __m256i a, b;
};
inline Pairs load_pairs(const uint32_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline V low_half(Pairs w) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(w.a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(w.b, 16))};
}
inline V high_half(Pairs w) {
    const __m256i mask = _mm256_set1_epi32(int(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(w.a, mask)), _mm256_castsi256_ps(_mm256_and_si256(w.b, mask))};
}

#endif

// Sums and maxima of the lanes, in one fixed order: halves onto halves.
inline float sum_of(V a) {
    const __m256 eight = folded_sum(a);
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
inline float max_of(V a) {
    const __m256 eight = folded_max(a);
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}

// e**x with a relative error below 2e-7; exactly 1 at 0, exactly 0 below -87. Cephes' polynomial.
inline V exponential(V x) {
    const V clamped = min(fill(88.0f), max(fill(-87.0f), x));  // In this order: not-a-number comes through.
    const V n = nearest(mul(clamped, fill(1.44269504088896341f)));
    V r = fma(n, fill(-0.693359375f), clamped);
    r = fma(n, fill(2.12194440e-4f), r);
    V p = fill(1.9875691500e-4f);
    p = fma(p, r, fill(1.3981999507e-3f));
    p = fma(p, r, fill(8.3334519073e-3f));
    p = fma(p, r, fill(4.1665795894e-2f));
    p = fma(p, r, fill(1.6666665459e-1f));
    p = fma(p, r, fill(5.0000001201e-1f));
    p = add(fma(mul(r, r), p, r), fill(1.0f));
    return zero_below(mul(p, power_of_two(n)), x, -87.0f);
}

}  // namespace kopir
