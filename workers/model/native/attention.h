// Attention of a tile of query rows over a paged KV pool. Keys are taken in tiles of 64 at fixed absolute positions, in
// order; the softmax is carried from tile to tile. What a row gets depends on its own query, its position and the keys
// up to it: a tile that lies behind a row is never run for it, and a key behind a row weighs exactly zero.
#pragma once

#include <limits>

#include "products.h"

namespace kopir {

constexpr int KEY_TILE = 64;

// Where the keys and values of one KV head of one layer lie for one sequence.
struct PagedKeys {
    const uint16_t* pool;       // bf16
    const int32_t* table;       // Slots of the sequence's blocks.
    int block_tokens, head_size;
    size_t block_stride;        // Numbers from one slot to the next.
    size_t key_offset, value_offset;

    const uint16_t* key(int position) const { return at(position, key_offset); }
    const uint16_t* value(int position) const { return at(position, value_offset); }

  private:
    const uint16_t* at(int position, size_t offset) const {
        return pool + size_t(table[position / block_tokens]) * block_stride + offset +
               size_t(position % block_tokens) * head_size;
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
        keys = make_array<uint32_t>(size_t(KEY_TILE) * head_size / 2);
        values = make_array<uint32_t>(size_t(KEY_TILE) / 2 * padded_head);
        scores = make_array<float>(size_t(max_rows) * KEY_TILE);
        sums = make_array<float>(size_t(max_rows) * padded_head);
        highest = make_array<float>(max_rows);
        totals = make_array<float>(max_rows);
        weights = make_array<typename Rows::Word>(size_t(max_rows) * weight_stride());
    }
    static constexpr size_t weight_stride() { return KEY_TILE / 2 * Rows::WORDS_PER_PAIR; }
};

template <class Rows>
void pack_keys(const PagedKeys& paged, int first, int stop, Scratch<Rows>& scratch) {
    const uint32_t* rows[KEY_TILE];
    for (int i = 0; i < KEY_TILE; i++)
        rows[i] = first + i < stop ? reinterpret_cast<const uint32_t*>(paged.key(first + i)) : nullptr;
    const int num_pairs = paged.head_size / 2;
    for (int panel = 0; panel < KEY_TILE / PANEL; panel++)
        pack_panel(rows + panel * PANEL, num_pairs, scratch.keys.get() + size_t(panel) * num_pairs * PANEL);
    // Values: pairs of neighbouring positions for each of 32 elements of the head.
    for (int pair = 0; pair < KEY_TILE / 2; pair++) {
        const int position = first + 2 * pair;
        const uint16_t* even = position < stop ? paged.value(position) : nullptr;
        const uint16_t* odd = position + 1 < stop ? paged.value(position + 1) : nullptr;
        for (int element = 0; element < scratch.padded_head; element += LANES) {
            uint32_t* out = scratch.values.get() +
                            (size_t(element / PANEL) * (KEY_TILE / 2) + pair) * PANEL + element % PANEL;
            if (!even || element >= paged.head_size) {
                std::memset(out, 0, LANES * sizeof(uint32_t));
            } else if (!odd) {
                for (int i = 0; i < LANES; i++) out[i] = even[element + i];
            } else {
                for (int i = 0; i < LANES; i++) out[i] = even[element + i] | uint32_t(odd[element + i]) << 16;
            }
        }
    }
}

// Turns one row of scores into weights against the highest score so far; returns what the older sums shrink by.
template <class Rows>
float weigh(float* scores, typename Rows::Word* weights, float scale, int num_visible, float& highest, float& total) {
    V parts[KEY_TILE / LANES];
    const V factor = fill(scale);
    for (int key = num_visible; key < KEY_TILE; key++) scores[key] = -std::numeric_limits<float>::infinity();
    V peak = fill(-std::numeric_limits<float>::infinity());
    for (int i = 0; i < KEY_TILE / LANES; i++) {
        parts[i] = mul(load(scores + i * LANES), factor);
        peak = max(peak, parts[i]);
    }
    const float before = highest, now = max_of(peak);
    highest = now > before ? now : before;
    const V base = fill(highest);
    V sum = fill(0.0f);
    for (int i = 0; i < KEY_TILE / LANES; i++) {
        parts[i] = exponential(sub(parts[i], base));
        Rows::put(weights, i * LANES, parts[i]);
        sum = add(sum, parts[i]);
    }
    float shrink[LANES];
    store(shrink, exponential(fill(before - highest)));
    total = total * shrink[0] + sum_of(sum);
    return shrink[0];
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
        scratch.totals[r] = 0.0f;
    }
    float* const scores = scratch.scores.get();
    for (int first = 0; first < num_keys; first += KEY_TILE) {
        const int stop = first + KEY_TILE < num_keys ? first + KEY_TILE : num_keys;
        // Rows before the tile's first key see nothing of it.
        const int from = first > tile.start ? (first - tile.start) * tile.group : 0;
        pack_keys<Rows>(paged, first, stop, scratch);
        for (int panel = 0; panel < KEY_TILE / PANEL; panel++)
            run_panel<Rows>(tile.queries, tile.stride, scratch.keys.get() + size_t(panel) * num_pairs * PANEL, num_pairs,
                            from, tile.num_rows, begin_at_zero, [&](int row, const V* acc) {
                                store(scores + size_t(row) * KEY_TILE + panel * PANEL, acc[0]);
                                store(scores + size_t(row) * KEY_TILE + panel * PANEL + LANES, acc[1]);
                            });
        for (int r = from; r < tile.num_rows; r++) {
            const int visible = tile.position(r) + 1 - first;
            const float shrink = weigh<Rows>(scores + size_t(r) * KEY_TILE,
                                             scratch.weights.get() + size_t(r) * scratch.weight_stride(), scale,
                                             visible < KEY_TILE ? visible : KEY_TILE, scratch.highest[r],
                                             scratch.totals[r]);
            if (shrink != 1.0f)
                for (int e = 0; e < padded; e += LANES)
                    store(sums + size_t(r) * padded + e, mul(load(sums + size_t(r) * padded + e), fill(shrink)));
        }
        for (int panel = 0; panel < padded / PANEL; panel++)
            run_panel<Rows>(
                scratch.weights.get(), scratch.weight_stride(),
                scratch.values.get() + size_t(panel) * (KEY_TILE / 2) * PANEL, KEY_TILE / 2, from, tile.num_rows,
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
        const V total = fill(scratch.totals[r]);
        for (int e = 0; e < paged.head_size; e += LANES) put(r, e, div(load(sums + size_t(r) * padded + e), total));
    }
}

}  // namespace kopir
