// Attention of a tile of query rows over a paged KV pool. Keys are taken in tiles of 128 at fixed absolute positions, in
// order; the softmax is carried from tile to tile. What a row gets depends on its own query, its position and the keys
// up to it: a tile that lies behind a row is never run for it, and a key behind a row weighs exactly zero.
#pragma once

#include <limits>

#include "products.h"

namespace kopir {

constexpr int KEY_TILE = 128;

// Where the keys and values of one KV head of one layer lie for one sequence.
struct PagedKeys {
    const uint16_t* pool;       // bf16
    const int32_t* table;       // Slots of the sequence's blocks.
    int block_tokens, head_size;
    size_t block_stride;        // Numbers from one slot to the next.
    size_t key_offset, value_offset;

    // Sets keys[i] and values[i] to the rows of position first + i, for count positions.
    void find(int first, int count, const uint16_t** keys, const uint16_t** values) const {
        for (int i = 0; i < count;) {
            const int position = first + i, offset = position % block_tokens;
            const uint16_t* const block = pool + size_t(table[position / block_tokens]) * block_stride;
            for (int token = offset; token < block_tokens && i < count; token++, i++) {
                keys[i] = block + key_offset + size_t(token) * head_size;
                values[i] = block + value_offset + size_t(token) * head_size;
            }
        }
    }
};

// Query rows in order of position, `group` rows for each: row r is position start + r / group.
template <class Rows>
struct QueryTile {
    const typename Rows::Word* queries;
    size_t stride;
    int num_rows, group, start;

    int position(int row) const { return start + row / group; }
};

// One thread's memory for a tile.
template <class Rows>
struct Scratch {
    int padded_head = 0;
    Array<uint32_t> keys, values;
    Array<float> scores, sums, highest, totals;
    Array<typename Rows::Word> weights;

    Scratch(int head_size, int max_rows) : padded_head((head_size + PANEL - 1) / PANEL * PANEL) {
        keys = make_zeros<uint32_t>(size_t(KEY_TILE) * head_size / 2);
        values = make_zeros<uint32_t>(size_t(KEY_TILE) / 2 * padded_head);
        scores = make_zeros<float>(size_t(max_rows) * KEY_TILE);
        sums = make_zeros<float>(size_t(max_rows) * padded_head);
        highest = make_zeros<float>(max_rows);
        totals = make_zeros<float>(size_t(max_rows) * LANES);
        weights = make_zeros<typename Rows::Word>(size_t(max_rows) * weight_stride());
    }
    static constexpr size_t weight_stride() { return KEY_TILE / 2 * Rows::WORDS_PER_PAIR; }
};

// Packs the keys and values of positions [first, first + count), with zeros up to a whole panel of keys.
template <class Rows>
void pack_keys(const PagedKeys& paged, int first, int count, Scratch<Rows>& scratch) {
    const uint16_t *keys[KEY_TILE] = {}, *values[KEY_TILE];
    paged.find(first, count, keys, values);
    const int num_pairs = paged.head_size / 2;
    for (int panel = 0; panel * PANEL < count; panel++) {
        const uint32_t* rows[PANEL];
        for (int i = 0; i < PANEL; i++) rows[i] = reinterpret_cast<const uint32_t*>(keys[panel * PANEL + i]);
        pack_panel(rows, num_pairs, scratch.keys.get() + size_t(panel) * num_pairs * PANEL);
    }
    // Values: pairs of neighbouring positions for each of 32 elements of the head.
    static const uint16_t zeros[LANES] = {};
    for (int pair = 0; 2 * pair < count; pair++) {
        const uint16_t *even = values[2 * pair], *odd = 2 * pair + 1 < count ? values[2 * pair + 1] : nullptr;
        for (int element = 0; element < paged.head_size; element += LANES) {
            uint32_t* out = scratch.values.get() + (size_t(element / PANEL) * (KEY_TILE / 2) + pair) * PANEL;
            store_zipped(out + element % PANEL, even + element, odd ? odd + element : zeros);
        }
    }
}

// Turns the first num_visible scores of a row into weights against the highest score so far, and the weights after them
// up to `count` into zeros; returns what the older sums shrink by. Modifies: highest, and the lanes of totals.
template <class Rows>
float weigh(float* scores, typename Rows::Word* weights, float scale, int num_visible, int count, float& highest,
            float* totals) {
    const float nothing = -std::numeric_limits<float>::infinity();
    const int num_parts = (num_visible + LANES - 1) / LANES;
    for (int key = num_visible; key < num_parts * LANES; key++) scores[key] = nothing;
    V parts[KEY_TILE / LANES];
    const V factor = fill(scale);
    V peak = fill(nothing);
    for (int i = 0; i < num_parts; i++) {
        parts[i] = mul(load(scores + i * LANES), factor);
        peak = max(peak, parts[i]);
    }
    const float before = highest, now = max_of(peak);
    highest = now > before ? now : before;
    const V base = fill(highest);
    V sum = fill(0.0f);
    for (int i = 0; i < num_parts; i++) {
        const V weight = exponential(sub(parts[i], base));
        Rows::put(weights, i * LANES, weight);
        sum = add(sum, weight);
    }
    for (int key = num_parts * LANES; key < count; key += LANES) Rows::put(weights, key, fill(0.0f));
    float shrink = 1.0f;
    if (highest != before) {
        float lanes[LANES];
        store(lanes, exponential(fill(before - highest)));
        shrink = lanes[0];
    }
    store(totals, add(mul(load(totals), fill(shrink)), sum));
    return shrink;
}

// Writes the outputs: put(row, element, values) with float32 values of 16 elements of one row.
template <class Rows, class Put>
void attend(const QueryTile<Rows>& tile, const PagedKeys& paged, float scale, Scratch<Rows>& scratch, const Put& put) {
    const int num_pairs = paged.head_size / 2, padded = scratch.padded_head;
    const int num_keys = tile.position(tile.num_rows - 1) + 1;
    float* const sums = scratch.sums.get();
    std::memset(sums, 0, size_t(tile.num_rows) * padded * sizeof(float));
    for (int r = 0; r < tile.num_rows; r++) {
        scratch.highest[r] = -std::numeric_limits<float>::infinity();
        store(scratch.totals.get() + r * LANES, fill(0.0f));
    }
    float* const scores = scratch.scores.get();
    for (int first = 0; first < num_keys; first += KEY_TILE) {
        const int count = num_keys - first < KEY_TILE ? num_keys - first : KEY_TILE;
        // Rows before a key see nothing of it.
        const auto first_row = [&](int key) { return key > tile.start ? (key - tile.start) * tile.group : 0; };
        pack_keys<Rows>(paged, first, count, scratch);
        for (int panel = 0; panel * PANEL < count; panel++)
            run_panel<Rows>(tile.queries, tile.stride, scratch.keys.get() + size_t(panel) * num_pairs * PANEL, num_pairs,
                            first_row(first + panel * PANEL), tile.num_rows, begin_at_zero, [&](int row, const V* acc) {
                                store(scores + size_t(row) * KEY_TILE + panel * PANEL, acc[0]);
                                store(scores + size_t(row) * KEY_TILE + panel * PANEL + LANES, acc[1]);
                            });
        const int from = first_row(first);
        for (int r = from; r < tile.num_rows; r++) {
            const int visible = tile.position(r) + 1 - first;
            const float shrink = weigh<Rows>(scores + size_t(r) * KEY_TILE,
                                             scratch.weights.get() + size_t(r) * scratch.weight_stride(), scale,
                                             visible < count ? visible : count, count, scratch.highest[r],
                                             scratch.totals.get() + r * LANES);
            if (shrink != 1.0f)
                for (int e = 0; e < padded; e += LANES)
                    store(sums + size_t(r) * padded + e, mul(load(sums + size_t(r) * padded + e), fill(shrink)));
        }
        for (int panel = 0; panel < padded / PANEL; panel++)
            run_panel<Rows>(
                scratch.weights.get(), scratch.weight_stride(),
                scratch.values.get() + size_t(panel) * (KEY_TILE / 2) * PANEL, (count + 1) / 2, from, tile.num_rows,
                [&](int row, V* acc) {
                    acc[0] = load(sums + size_t(row) * padded + panel * PANEL);
                    acc[1] = load(sums + size_t(row) * padded + panel * PANEL + LANES);
                },
                [&](int row, const V* acc) {
                    store(sums + size_t(row) * padded + panel * PANEL, acc[0]);
                    store(sums + size_t(row) * padded + panel * PANEL + LANES, acc[1]);
                });
    }
    for (int r = 0; r < tile.num_rows; r++) {
        const V total = fill(sum_of(load(scratch.totals.get() + r * LANES)));
        for (int e = 0; e < paged.head_size; e += LANES) put(r, e, div(load(sums + size_t(r) * padded + e), total));
    }
}

}  // namespace kopir
