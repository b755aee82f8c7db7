// One forward pass of a Llama-shaped decoder over a paged KV pool, as one call: what workers/model/native_decoder.py
// drives. Owns the packed weights, the buffers of a pass and the threads. It trusts its caller with every index.
//
// A pass is a list of phases; threads take the tasks of a phase from a counter and wait for each other after it. Which
// thread runs a task changes no bit: a task's results depend on its rows alone.

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <vector>

#include "attention.h"
#include "products.h"
#include "simd.h"
#include "team.h"

namespace kopir {

constexpr int ROWS_PER_TASK_MAX = 16;  // Of phases that go row by row.
constexpr int BLOCK_ROWS = 96;         // Of one task of a product: they and a panel stay in the second-level cache.
constexpr int QUERY_ROWS_MAX = 192;    // Of one task of attention, all heads of a group counted.

enum Kind { QKV, OUTPUT, GATE_UP, DOWN, NUM_KINDS };
enum NormKind { INPUT_NORM, MLP_NORM, Q_NORM, K_NORM, NUM_NORMS };

extern "C" {
struct KopirShape {
    int32_t vocab_size, hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_size, max_positions;
    float eps;
    int32_t uses_bf16;
};
// Rows [first_row, end_row) are positions [start, ...) of a sequence whose block table begins at `table`.
struct KopirSpan {
    int32_t first_row, end_row, start, table;
};
struct KopirBatch {
    int32_t num_rows, num_spans, num_logits, num_threads, block_tokens;
    const int32_t* tokens;
    const KopirSpan* spans;
    const int32_t* tables;
    const int32_t* logit_rows;
    uint16_t* pool;  // (slots, layers, 2, kv_heads, block_tokens, head_size), bf16
    float* logits;   // (num_logits, vocab_size)
};
}

struct Layer {
    Matrix matrices[NUM_KINDS];
    Array<float> norms[NUM_NORMS];
};

class Decoder {
  public:
    Decoder(const KopirShape& shape, const uint16_t* embedding, const float* cos, const float* sin)
        : shape_(shape), embedding_(embedding), cos_(cos), sin_(sin), layers_(shape.num_layers) {}
    virtual ~Decoder() = default;

    virtual void forward(const KopirBatch& batch) = 0;

    // weight: (columns, inputs) bf16. Of GATE_UP the gate's rows, then those of up.
    Matrix& matrix(int layer, int kind) { return layer < 0 ? head_ : layers_[layer].matrices[kind]; }
    Array<float>& norm(int layer, int kind) { return layer < 0 ? norm_ : layers_[layer].norms[kind]; }

    void pack(int layer, int kind, const uint16_t* weight, const float* bias, int columns, int inputs) {
        // Sixteen outputs of gate and the same of up share a panel, so that one task has both.
        const bool is_interleaved = layer >= 0 && kind == GATE_UP;
        const int half = columns / 2, pairs = inputs / 2;
        Matrix& out = matrix(layer, kind);
        out.num_columns = columns;
        out.num_pairs = pairs;
        out.num_panels = is_interleaved ? (half + LANES - 1) / LANES : (columns + PANEL - 1) / PANEL;
        out.packed = make_array<uint32_t>(size_t(out.num_panels) * pairs * PANEL);
        if (bias) out.bias = make_zeros<float>(size_t(out.num_panels) * PANEL);
        for (int panel = 0; panel < out.num_panels; panel++) {
            const uint32_t* rows[PANEL];
            for (int c = 0; c < PANEL; c++) {
                int column = panel * PANEL + c, limit = columns;
                if (is_interleaved) {
                    column = panel * LANES + c % LANES;
                    limit = half;
                    if (c >= LANES) column += half, limit += half;
                }
                const bool is_there = column < limit;
                rows[c] = is_there ? reinterpret_cast<const uint32_t*>(weight) + size_t(column) * pairs : nullptr;
                if (bias) out.bias[panel * PANEL + c] = is_there ? bias[column] : 0.0f;
            }
            pack_panel(rows, pairs, out.packed.get() + size_t(panel) * pairs * PANEL);
        }
    }

  protected:
    const KopirShape shape_;
    const uint16_t* embedding_;
    const float *cos_, *sin_;
    std::vector<Layer> layers_;
    Matrix head_;
    Array<float> norm_;
};

inline int ceil_to(int count, int step) { return (count + step - 1) / step * step; }

template <class Rows>
class DecoderOf : public Decoder {
    using Word = typename Rows::Word;

  public:
    using Decoder::Decoder;

    void forward(const KopirBatch& batch) override {
        prepare(batch);
        for (auto& counter : counters_) counter.store(0, std::memory_order_relaxed);
        batch_ = &batch;
        team_->run([this](int thread) { run_pass(thread); });
    }

  private:
    // --- buffers ------------------------------------------------------------------------------------------

    size_t words(int numbers) const { return size_t(ceil_to(numbers, LANES)) / 2 * Rows::WORDS_PER_PAIR; }
    int qkv_size() const { return (shape_.num_heads + 2 * shape_.num_kv_heads) * shape_.head_size; }
    int q_size() const { return shape_.num_heads * shape_.head_size; }
    int group() const { return shape_.num_heads / shape_.num_kv_heads; }
    int query_positions() const { return std::max(1, QUERY_ROWS_MAX / group()); }

    void prepare(const KopirBatch& batch) {
        if (!team_ || team_->size() != batch.num_threads) team_ = std::make_unique<Team>(batch.num_threads);
        while (int(scratch_.size()) < batch.num_threads)
            scratch_.push_back(std::make_unique<Scratch<Rows>>(shape_.head_size, query_positions() * group()));
        if (counters_.empty()) counters_ = std::vector<std::atomic<int>>(size_t(shape_.num_layers) * 8 + 4);
        if (batch.num_rows > capacity_) {
            capacity_ = 0;
            const size_t rows = ceil_to(batch.num_rows, LANES);
            hidden_ = make_zeros<float>(rows * ceil_to(shape_.hidden_size, PANEL));
            qkv_ = make_zeros<float>(rows * ceil_to(qkv_size(), PANEL));
            queries_ = make_zeros<Word>(rows * words(q_size()));
            normed_ = make_zeros<Word>(rows * words(shape_.hidden_size));
            attended_ = make_zeros<Word>(rows * words(q_size()));
            gated_ = make_zeros<Word>(rows * words(shape_.intermediate_size));
            capacity_ = int(rows);
        }
        row_span_.resize(batch.num_rows);
        tiles_.clear();
        for (int index = 0; index < batch.num_spans; index++) {
            const KopirSpan& span = batch.spans[index];
            std::fill(row_span_.begin() + span.first_row, row_span_.begin() + span.end_row, index);
            for (int row = span.first_row; row < span.end_row; row += query_positions())
                tiles_.push_back({index, row, std::min(row + query_positions(), span.end_row)});
        }
        // The longest work first, or one thread would end alone with it.
        std::stable_sort(tiles_.begin(), tiles_.end(), [&](const Tile& a, const Tile& b) { return cost(batch, a) > cost(batch, b); });
    }

    // --- a pass -------------------------------------------------------------------------------------------

    struct Tile {
        int span, first_row, end_row;
    };

    static int64_t cost(const KopirBatch& batch, const Tile& tile) {
        const KopirSpan& span = batch.spans[tile.span];
        return int64_t(tile.end_row - tile.first_row + 8) * (span.start + tile.end_row - span.first_row);
    }

    template <class Task>
    void phase(int index, int num_tasks, const Task& task) {
        std::atomic<int>& counter = counters_[index];
        for (int i; (i = counter.fetch_add(1, std::memory_order_relaxed)) < num_tasks;) task(i);
        team_->wait_for_all();
    }

    template <class Task>
    void rows_phase(int index, int num_rows, const Task& task) {
        const int size = std::min(ROWS_PER_TASK_MAX, (num_rows + team_->size() - 1) / team_->size());
        phase(index, (num_rows + size - 1) / size, [&](int i) {
            const int stop = std::min((i + 1) * size, num_rows);
            for (int row = i * size; row < stop; row++) task(row);
        });
    }

    // end(row, first column of the panel, sums without bias, bias of the panel or nullptr)
    template <class End>
    void product_phase(int index, const Matrix& matrix, const Word* rows, size_t stride, int num_rows, const End& end) {
        const int num_blocks = (num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        phase(index, matrix.num_panels * num_blocks, [&](int i) {
            const int panel = i / num_blocks, first = i % num_blocks * BLOCK_ROWS;
            const float* bias = matrix.bias ? matrix.bias.get() + size_t(panel) * PANEL : nullptr;
            run_panel<Rows>(rows, stride, matrix.panel(panel), matrix.num_pairs, first,
                            std::min(first + BLOCK_ROWS, num_rows), begin_at_zero, [&](int row, V* acc) {
                                if (bias) {
                                    acc[0] = add(acc[0], load(bias));
                                    acc[1] = add(acc[1], load(bias + LANES));
                                }
                                end(row, panel, acc);
                            });
        });
    }

    void run_pass(int thread) {
        const KopirBatch& batch = *batch_;
        const int num_rows = batch.num_rows, hidden_stride = ceil_to(shape_.hidden_size, PANEL);
        int index = 0;
        rows_phase(index++, num_rows, [&](int row) {
            const uint16_t* from = embedding_ + size_t(batch.tokens[row]) * shape_.hidden_size;
            for (int i = 0; i < shape_.hidden_size; i++) {
                const uint32_t bits = uint32_t(from[i]) << 16;
                std::memcpy(hidden_.get() + size_t(row) * hidden_stride + i, &bits, sizeof bits);
            }
        });
        for (int layer = 0; layer < shape_.num_layers; layer++) index = run_layer(layer, index, thread);
        if (!batch.num_logits) return;
        rows_phase(index++, batch.num_logits,
                   [&](int row) { normalise(batch.logit_rows[row], row, norm_.get()); });
        const int vocab = shape_.vocab_size;
        product_phase(index++, head_, normed_.get(), words(shape_.hidden_size), batch.num_logits,
                      [&](int row, int panel, const V* acc) {
                          float* out = batch.logits + size_t(row) * vocab;
                          const int column = panel * PANEL;
                          if (column + PANEL <= vocab) {
                              store(out + column, acc[0]);
                              store(out + column + LANES, acc[1]);
                          } else {
                              float rest[PANEL];
                              store(rest, acc[0]);
                              store(rest + LANES, acc[1]);
                              std::memcpy(out + column, rest, size_t(vocab - column) * sizeof(float));
                          }
                      });
    }

    int run_layer(int number, int index, int thread) {
        const KopirBatch& batch = *batch_;
        const Layer& layer = layers_[number];
        const int num_rows = batch.num_rows, hidden_stride = ceil_to(shape_.hidden_size, PANEL);
        const int qkv_stride = ceil_to(qkv_size(), PANEL);
        const auto add_to_hidden = [&](int row, int panel, const V* acc) {
            float* out = hidden_.get() + size_t(row) * hidden_stride + panel * PANEL;
            store(out, add(load(out), acc[0]));
            store(out + LANES, add(load(out + LANES), acc[1]));
        };
        rows_phase(index++, num_rows, [&](int row) { normalise(row, row, layer.norms[INPUT_NORM].get()); });
        product_phase(index++, layer.matrices[QKV], normed_.get(), words(shape_.hidden_size), num_rows,
                      [&](int row, int panel, const V* acc) {
                          float* out = qkv_.get() + size_t(row) * qkv_stride + panel * PANEL;
                          store(out, acc[0]);
                          store(out + LANES, acc[1]);
                      });
        // Keys and values go to the pool first: a row reads all it sees, its own included, as the pool rounded it.
        rows_phase(index++, num_rows, [&](int row) { rotate_and_keep(row, number, layer); });
        const int num_heads = shape_.num_kv_heads;
        phase(index++, int(tiles_.size()) * num_heads, [&](int i) {
            run_attention(tiles_[i / num_heads], i % num_heads, number, *scratch_[thread]);
        });
        product_phase(index++, layer.matrices[OUTPUT], attended_.get(), words(q_size()), num_rows, add_to_hidden);
        rows_phase(index++, num_rows, [&](int row) { normalise(row, row, layer.norms[MLP_NORM].get()); });
        const size_t gated_stride = words(shape_.intermediate_size);
        product_phase(index++, layer.matrices[GATE_UP], normed_.get(), words(shape_.hidden_size), num_rows,
                      [&](int row, int panel, const V* acc) {
                          const V gate = acc[0], shrink = add(fill(1.0f), exponential(sub(fill(0.0f), gate)));
                          Rows::put(gated_.get() + row * gated_stride, panel * LANES, mul(div(gate, shrink), acc[1]));
                      });
        product_phase(index++, layer.matrices[DOWN], gated_.get(), gated_stride, num_rows, add_to_hidden);
        return index;
    }

    // --- one row, one tile --------------------------------------------------------------------------------

    // Returns what a row is multiplied with so that its mean square is 1.
    float rms_scale(const float* row, int size) const {
        V sum = fill(0.0f);
        int i = 0;
        for (; i + LANES <= size; i += LANES) sum = fma(load(row + i), load(row + i), sum);
        float total = sum_of(sum);
        for (; i < size; i++) total += row[i] * row[i];
        return 1.0f / std::sqrt(total / float(size) + shape_.eps);
    }

    void normalise(int row, int out_row, const float* weight) {
        const int size = shape_.hidden_size;
        const float* from = hidden_.get() + size_t(row) * ceil_to(size, PANEL);
        const V scale = fill(rms_scale(from, size));
        Word* out = normed_.get() + out_row * words(size);
        // Weights and rows are padded to whole vectors.
        for (int i = 0; i < size; i += LANES) Rows::put(out, i, mul(mul(load(from + i), scale), load(weight + i)));
    }

    void normalise_head(float* head, const float* weight) const {
        const V scale = fill(rms_scale(head, shape_.head_size));
        for (int i = 0; i < shape_.head_size; i += LANES)
            store(head + i, mul(mul(load(head + i), scale), load(weight + i)));
    }

    void rotate_head(float* head, int position) const {
        const int size = shape_.head_size, half = size / 2;
        const float *cos = cos_ + size_t(position) * size, *sin = sin_ + size_t(position) * size;
        for (int i = 0; i < half; i++) {
            const float first = head[i], second = head[half + i];
            head[i] = first * cos[i] + second * sin[i];
            head[half + i] = second * cos[half + i] + first * sin[half + i];
        }
    }

    size_t block_stride() const {
        return size_t(shape_.num_layers) * 2 * shape_.num_kv_heads * batch_->block_tokens * shape_.head_size;
    }
    size_t head_offset(int layer, int is_value, int head) const {
        return ((size_t(layer) * 2 + is_value) * shape_.num_kv_heads + head) * batch_->block_tokens * shape_.head_size;
    }

    void rotate_and_keep(int row, int number, const Layer& layer) {
        const KopirBatch& batch = *batch_;
        const KopirSpan& span = batch.spans[row_span_[row]];
        const int position = span.start + row - span.first_row, size = shape_.head_size;
        const int num_q = shape_.num_heads, num_kv = shape_.num_kv_heads, groups = group();
        float* heads = qkv_.get() + size_t(row) * ceil_to(qkv_size(), PANEL);
        for (int head = 0; head < num_q + num_kv; head++) {
            const bool is_key = head >= num_q;
            if (const float* weight = layer.norms[is_key ? K_NORM : Q_NORM].get()) normalise_head(heads + head * size, weight);
            rotate_head(heads + head * size, position);
        }
        // Queries by KV head: (kv_heads, rows, group, head_size), so that the rows of a tile follow each other.
        for (int head = 0; head < num_q; head++) {
            const size_t place = (size_t(head / groups) * batch.num_rows + row) * groups + head % groups;
            Word* out = queries_.get() + place * words(size);
            for (int i = 0; i < size; i += LANES) Rows::put(out, i, load(heads + head * size + i));
        }
        const int slot = batch.tables[span.table + position / batch.block_tokens];
        for (int head = 0; head < 2 * num_kv; head++) {
            uint16_t* out = batch.pool + size_t(slot) * block_stride() + head_offset(number, head / num_kv, head % num_kv) +
                            size_t(position % batch.block_tokens) * size;
            for (int i = 0; i < size; i += LANES) store_bf16(out + i, load(heads + (num_q + head) * size + i));
        }
    }

    void run_attention(const Tile& part, int head, int number, Scratch<Rows>& scratch) {
        const KopirBatch& batch = *batch_;
        const KopirSpan& span = batch.spans[part.span];
        const int groups = group(), size = shape_.head_size;
        const size_t stride = words(size);
        const QueryTile<Rows> tile{
            queries_.get() + (size_t(head) * batch.num_rows + part.first_row) * groups * stride, stride,
            (part.end_row - part.first_row) * groups, groups, span.start + part.first_row - span.first_row};
        const PagedKeys paged{batch.pool, batch.tables + span.table, batch.block_tokens, size, block_stride(),
                              head_offset(number, 0, head), head_offset(number, 1, head)};
        const float scale = 1.0f / std::sqrt(float(size));
        attend<Rows>(tile, paged, scale, scratch, [&](int r, int element, V values) {
            Word* out = attended_.get() + size_t(part.first_row + r / groups) * words(q_size());
            Rows::put(out, (head * groups + r % groups) * size + element, values);
        });
    }

    std::unique_ptr<Team> team_;
    std::vector<std::unique_ptr<Scratch<Rows>>> scratch_;
    std::vector<std::atomic<int>> counters_;
    std::vector<int> row_span_;
    std::vector<Tile> tiles_;
    const KopirBatch* batch_ = nullptr;
    int capacity_ = 0;
    Array<float> hidden_, qkv_;
    Array<Word> queries_, normed_, attended_, gated_;
};

}  // namespace kopir

// --- what Python calls: 0 is success, 1 no memory or no threads -----------------------------------------------

extern "C" {

int kopir_has_bf16() {
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

// Returns nullptr when there is no memory or no such format. The three arrays stay the caller's and must outlive it.
void* kopir_new(const kopir::KopirShape* shape, const uint16_t* embedding, const float* cos, const float* sin) try {
#ifdef __AVX512BF16__
    if (shape->uses_bf16) return static_cast<kopir::Decoder*>(new kopir::DecoderOf<kopir::Bf16Rows>(*shape, embedding, cos, sin));
#endif
    if (shape->uses_bf16) return nullptr;
    return static_cast<kopir::Decoder*>(new kopir::DecoderOf<kopir::FloatRows>(*shape, embedding, cos, sin));
} catch (const std::exception&) {
    return nullptr;
}

void kopir_free(void* decoder) { delete static_cast<kopir::Decoder*>(decoder); }

int kopir_pack(void* decoder, int layer, int kind, const uint16_t* weight, const float* bias, int columns, int inputs) try {
    static_cast<kopir::Decoder*>(decoder)->pack(layer, kind, weight, bias, columns, inputs);
    return 0;
} catch (const std::exception&) {
    return 1;
}

int kopir_norm(void* decoder, int layer, int kind, const float* weight, int size) try {
    auto& out = static_cast<kopir::Decoder*>(decoder)->norm(layer, kind);
    const int padded = kopir::ceil_to(size, kopir::LANES);
    out = kopir::make_zeros<float>(padded);
    std::fill(std::copy(weight, weight + size, out.get()), out.get() + padded, 0.0f);
    return 0;
} catch (const std::exception&) {
    return 1;
}

int kopir_forward(void* decoder, const kopir::KopirBatch* batch) try {
    static_cast<kopir::Decoder*>(decoder)->forward(*batch);
    return 0;
} catch (const std::exception&) {
    return 1;
}
}
