// Matrix products of rows with packed bf16 matrices, in which a row's bits depend on that row alone: every element is the
// sum of its terms in the order of the inner dimension, whatever the number of rows, columns or threads.
//
// Two formats of the rows. Bf16Rows: pairs of bf16, summed by the processor's own bf16 instruction into float32.
// FloatRows: float32, against weights widened on the fly. Both read the same packed matrix.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <sys/mman.h>

#include "simd.h"

namespace kopir {

constexpr int PANEL = 2 * LANES;  // Columns of one panel.

struct Free {
    void operator()(void* p) const { std::free(p); }
};
template <class T>
using Array = std::unique_ptr<T[], Free>;

// Memory of its own, not set to anything.
template <class T>
Array<T> make_array(size_t count) {
    constexpr size_t huge = size_t(2) << 20;
    const size_t step = count * sizeof(T) >= huge ? huge : 64;
    const size_t bytes = (count * sizeof(T) + step - 1) / step * step + (count == 0) * step;
    void* memory = std::aligned_alloc(step, bytes);
    if (!memory) throw std::bad_alloc();
    if (step == huge) madvise(memory, bytes, MADV_HUGEPAGE);
    return Array<T>(static_cast<T*>(memory));
}

template <class T>
Array<T> make_zeros(size_t count) {
    Array<T> array = make_array<T>(count);
    std::memset(array.get(), 0, count * sizeof(T));
    return array;
}

// A matrix (num_columns outputs, 2 * num_pairs inputs): panels of 32 outputs, each [num_pairs][32] pairs of inputs.
struct Matrix {
    int num_columns = 0, num_pairs = 0, num_panels = 0;
    Array<uint32_t> packed;
    Array<float> bias;  // Of num_panels * PANEL, or none.

    const uint32_t* panel(int index) const { return packed.get() + size_t(index) * num_pairs * PANEL; }
};

#ifdef KOPIR_AVX512
// Writes sixteen rows of sixteen 32-bit words as columns.
inline void transpose_16(const uint32_t* const* rows, int first, uint32_t* out, int stride) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i] + first);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(out + size_t(i) * stride, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
        _mm512_storeu_si512(out + size_t(i + 8) * stride, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
        _mm512_storeu_si512(out + size_t(i + 4) * stride, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88));
        _mm512_storeu_si512(out + size_t(i + 12) * stride, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd));
    }
}
#endif

// Packs one panel. rows[c]: num_pairs words of output c, or nullptr for an output of zeros.
inline void pack_panel(const uint32_t* const* rows, int num_pairs, uint32_t* out) {
    int done = 0;
#ifdef KOPIR_AVX512
    static const uint32_t zeros[LANES] = {};
    for (; done + LANES <= num_pairs; done += LANES)
        for (int half = 0; half < PANEL; half += LANES) {
            const uint32_t* sixteen[LANES];
            for (int i = 0; i < LANES; i++) sixteen[i] = rows[half + i] ? rows[half + i] + done : zeros;
            transpose_16(sixteen, 0, out + size_t(done) * PANEL + half, PANEL);
        }
#endif
    for (int pair = done; pair < num_pairs; pair++)
        for (int c = 0; c < PANEL; c++) out[size_t(pair) * PANEL + c] = rows[c] ? rows[c][pair] : 0;
}

struct FloatRows {
    using Word = float;
    static constexpr int WORDS_PER_PAIR = 2;
#ifdef KOPIR_AVX512
    static constexpr int TILE = 12;
#else
    static constexpr int TILE = 3;
#endif
    static void put(Word* row, int column, V values) { store(row + column, values); }

    template <int ROWS>
    static inline void accumulate(const Word* rows, size_t stride, const uint32_t* panel, int num_pairs, V acc[][2]) {
        for (int pair = 0; pair < num_pairs; pair++, panel += PANEL) {
            const Pairs w0 = load_pairs(panel), w1 = load_pairs(panel + LANES);
            const V low0 = low_half(w0), low1 = low_half(w1), high0 = high_half(w0), high1 = high_half(w1);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                const V first = fill(rows[r * stride + 2 * pair]), second = fill(rows[r * stride + 2 * pair + 1]);
                acc[r][0] = fma(second, high0, fma(first, low0, acc[r][0]));
                acc[r][1] = fma(second, high1, fma(first, low1, acc[r][1]));
            }
        }
    }
};

#ifdef __AVX512BF16__
struct Bf16Rows {
    using Word = uint32_t;
    static constexpr int WORDS_PER_PAIR = 1;
    static constexpr int TILE = 12;
    static void put(Word* row, int column, V values) { store_bf16(reinterpret_cast<uint16_t*>(row) + column, values); }

    template <int ROWS>
    static inline void accumulate(const Word* rows, size_t stride, const uint32_t* panel, int num_pairs, V acc[][2]) {
        for (int pair = 0; pair < num_pairs; pair++, panel += PANEL) {
            const __m512bh w0 = (__m512bh)_mm512_loadu_si512(panel), w1 = (__m512bh)_mm512_loadu_si512(panel + LANES);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                const __m512bh x = (__m512bh)_mm512_set1_epi32(int(rows[r * stride + pair]));
                acc[r][0].v = _mm512_dpbf16_ps(acc[r][0].v, x, w0);
                acc[r][1].v = _mm512_dpbf16_ps(acc[r][1].v, x, w1);
            }
        }
    }
};
#endif

// One tile of ROWS rows against one panel. begin(r, acc) sets the sums' start, end(r, acc) takes them.
template <class Rows, int ROWS, class Begin, class End>
inline void run_tile(const typename Rows::Word* rows, size_t stride, const uint32_t* panel, int num_pairs, int first,
                     const Begin& begin, const End& end) {
    V acc[ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) begin(first + r, acc[r]);
    Rows::template accumulate<ROWS>(rows + size_t(first) * stride, stride, panel, num_pairs, acc);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) end(first + r, acc[r]);
}

template <class Rows, int ROWS, class Begin, class End>
inline void run_rest(int count, const typename Rows::Word* rows, size_t stride, const uint32_t* panel, int num_pairs,
                     int first, const Begin& begin, const End& end) {
    if constexpr (ROWS > 0) {
        if (count == ROWS)
            run_tile<Rows, ROWS>(rows, stride, panel, num_pairs, first, begin, end);
        else
            run_rest<Rows, ROWS - 1>(count, rows, stride, panel, num_pairs, first, begin, end);
    }
}

// Rows [first, stop) against one panel.
template <class Rows, class Begin, class End>
inline void run_panel(const typename Rows::Word* rows, size_t stride, const uint32_t* panel, int num_pairs, int first,
                      int stop, const Begin& begin, const End& end) {
    for (; first + Rows::TILE <= stop; first += Rows::TILE)
        run_tile<Rows, Rows::TILE>(rows, stride, panel, num_pairs, first, begin, end);
    run_rest<Rows, Rows::TILE - 1>(stop - first, rows, stride, panel, num_pairs, first, begin, end);
}

inline void begin_at_zero(int, V* acc) { acc[0] = acc[1] = fill(0.0f); }

}  // namespace kopir
