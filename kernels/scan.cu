// The layout checker's passes over a pool of blocks: one source for CUDA (nvcc, nvrtc) and for a CPU (shim.h).
//
// A thread owns no state across a barrier, so that "threads as a loop" means the same. Figures and their order are
// those of kernels/scan.py, the pattern is that of kernels/pattern.py; tests hold the three together.

#ifdef KOPIR_HOST_SHIM
#include "shim.h"
#else
#define KOPIR_KERNEL extern "C" __global__ void
#define KOPIR_DEVICE __device__ __forceinline__
#define KOPIR_CONSTANT __constant__
#define KOPIR_SHARED __shared__
#define KOPIR_THREADS { const unsigned int tid = threadIdx.x;
#define KOPIR_BARRIER } __syncthreads();
#endif

typedef unsigned char u8;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

// Columns of a scan: kernels/scan.py, Field.
enum {
    NON_FINITE = 0, CANARY = 2, TAIL = 4, PAD = 6, PROBE = 8, BAD_FIRST = 10, BAD_LAST = 11, NUM_FIELDS = 12
};

// Places in the parameter array: kernels/raw_scan.py, params().
enum {
    P_BLOCK_BYTES, P_ITEM_BYTES, P_ROW_BYTES, P_ROW_STRIDE, P_LAYERS, P_HEADS, P_TOKENS, P_IS_NHD, P_KV_TOGETHER,
    P_MODEL_HEADS, P_FIRST_HEAD, P_MASK, P_CANARY, P_CLEARED, P_FILL, P_HAS_PROBE, P_CHUNK_BYTES, P_NUM_CHUNKS
};

KOPIR_DEVICE void note(i64 *out, int field, i64 count, i64 place) {
    atomicAdd((u64 *)&out[field], (u64)count);
    atomicMin(&out[field + 1], place);
    atomicMin(&out[BAD_FIRST], place);
    atomicMax(&out[BAD_LAST], place);
}

KOPIR_DEVICE u32 pattern_word(u32 index, u32 low, u32 high) {
    u32 x = index * 0x9E3779B1u + low;
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    x ^= x >> 16;
    return x ^ high;
}

KOPIR_DEVICE u32 read_item(const u8 *at, int item_bytes) {
    if (item_bytes == 4) return *(const u32 *)at;
    if (item_bytes == 2) return *(const unsigned short *)at;
    return *at;
}

// Looks at one element, or at as many bytes of padding.
KOPIR_DEVICE void look(const u8 *block, i64 offset, const i64 *p, i64 num_tokens, const u32 *key, i64 *out) {
    const int item_bytes = (int)p[P_ITEM_BYTES];
    const u32 bits = read_item(block + offset, item_bytes);
    const u32 fill = (u32)p[P_FILL] * 0x01010101u >> (32 - 8 * item_bytes);
    const i64 row = offset / p[P_ROW_STRIDE], within = offset % p[P_ROW_STRIDE];
    if (within >= p[P_ROW_BYTES]) {
        if (bits == fill) return;
        for (int i = 0; i < item_bytes; ++i)
            if (block[offset + i] != (u8)p[P_FILL]) note(out, PAD, 1, offset + i);
        return;
    }
    const i64 heads = p[P_HEADS], tokens = p[P_TOKENS], layers = p[P_LAYERS];
    const i64 plane = row / (heads * tokens), rest = row % (heads * tokens);
    const i64 token = p[P_IS_NHD] ? rest / heads : rest % tokens;
    if (token >= num_tokens) {
        if (bits != fill) note(out, TAIL, 1, offset);
        return;
    }
    const u32 mask = (u32)p[P_MASK];
    if (bits == (u32)p[P_CANARY]) note(out, CANARY, 1, offset);
    else if ((bits & mask) == mask) note(out, NON_FINITE, 1, offset);
    if (!p[P_HAS_PROBE]) return;

    const i64 head = p[P_IS_NHD] ? rest % heads : rest / tokens;
    const i64 layer = p[P_KV_TOGETHER] ? plane / 2 : plane % layers;
    const i64 kv = p[P_KV_TOGETHER] ? plane % 2 : plane / layers;
    const i64 head_size = p[P_ROW_BYTES] / item_bytes;
    const i64 index = (((layer * 2 + kv) * p[P_MODEL_HEADS] + head + p[P_FIRST_HEAD]) * tokens + token) * head_size +
                      within / item_bytes;
    u32 wanted = pattern_word((u32)index, key[0], key[1]) >> (32 - 8 * item_bytes);
    if ((wanted & mask) == mask) wanted &= ~(u32)p[P_CLEARED];
    if (bits != wanted) note(out, PROBE, 1, offset);
}

// True when one of a word's elements has all bits of the mask.
KOPIR_DEVICE bool suspicious(u32 word, int item_bytes, u32 mask) {
    if (item_bytes == 4) return (word & mask) == mask;
    if (item_bytes == 2) return (word & mask) == mask || (word >> 16 & mask) == mask;
    return (word & mask) == mask || (word >> 8 & mask) == mask || (word >> 16 & mask) == mask ||
           (word >> 24 & mask) == mask;
}

// Grid: one CUDA block for each chunk of each looked-at pool block. ``out``: (n, NUM_FIELDS), prepared as
// scan.empty_result(); ``keys``: (n, 2), read only with P_HAS_PROBE.
KOPIR_KERNEL kopir_scan(const u8 *pool, const i64 *slots, const i64 *num_tokens, const u32 *keys, const i64 *p,
                        i64 *out) {
    const i64 row = blockIdx.x / p[P_NUM_CHUNKS], chunk = blockIdx.x % p[P_NUM_CHUNKS];
    const u8 *block = pool + slots[row] * p[P_BLOCK_BYTES];
    const i64 begin = chunk * p[P_CHUNK_BYTES];
    const i64 end = begin + p[P_CHUNK_BYTES] < p[P_BLOCK_BYTES] ? begin + p[P_CHUNK_BYTES] : p[P_BLOCK_BYTES];
    const int item_bytes = (int)p[P_ITEM_BYTES];
    const u32 mask = (u32)p[P_MASK];
    const bool by_vector = p[P_BLOCK_BYTES] % 16 == 0 && (u64)pool % 16 == 0;
    const bool is_plain = !p[P_HAS_PROBE] && num_tokens[row] == p[P_TOKENS] && p[P_ROW_BYTES] == p[P_ROW_STRIDE];

    KOPIR_THREADS
    if (by_vector && is_plain) {
#ifndef KOPIR_HOST_SHIM
#pragma unroll 4
#endif
        for (i64 at = begin + 16 * (i64)tid; at < end; at += 16 * (i64)blockDim.x) {
            const uint4 v = *(const uint4 *)(block + at);
            if (suspicious(v.x, item_bytes, mask) || suspicious(v.y, item_bytes, mask) ||
                suspicious(v.z, item_bytes, mask) || suspicious(v.w, item_bytes, mask))
                for (int i = 0; i < 16; i += item_bytes)
                    look(block, at + i, p, num_tokens[row], keys + 2 * row, out + row * NUM_FIELDS);
        }
    } else {
        for (i64 at = begin + item_bytes * (i64)tid; at < end; at += item_bytes * (i64)blockDim.x)
            look(block, at, p, num_tokens[row], keys + 2 * row, out + row * NUM_FIELDS);
    }
    KOPIR_BARRIER
}

// xxh3-128 with the default secret, for inputs longer than 240 bytes.
// Source: the specification in xxHash's repository, doc/xxhash_spec.md.
KOPIR_CONSTANT u64 SECRET[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull,
};

#define PRIME32_1 0x9E3779B1ull
#define PRIME32_2 0x85EBCA77ull
#define PRIME32_3 0xC2B2AE3Dull
#define PRIME64_1 0x9E3779B185EBCA87ull
#define PRIME64_2 0xC2B2AE3D27D4EB4Full
#define PRIME64_3 0x165667B19E3779F9ull
#define PRIME64_4 0x85EBCA77C2B2AE63ull
#define PRIME64_5 0x27D4EB2F165667C5ull

enum { LANES = 8, STRIPES = 16, STRIPE_BYTES = 64, ROUND_BYTES = 1024, ROUNDS = 4 };

KOPIR_DEVICE u64 read64(const u8 *at) {
    if ((u64)at % 8 == 0) return *(const u64 *)at;
    u64 value = 0;
    for (int i = 7; i >= 0; --i) value = value << 8 | at[i];
    return value;
}

// Eight bytes of the secret from any byte offset.
KOPIR_DEVICE u64 secret64(int offset) {
    const int word = offset / 8, shift = offset % 8 * 8;
    return shift ? SECRET[word] >> shift | SECRET[word + 1] << (64 - shift) : SECRET[word];
}

// What one lane adds to its accumulator for one stripe, its neighbour's data included.
KOPIR_DEVICE u64 lane_sum(const u8 *stripe, int lane, int secret_offset) {
    const u64 mixed = read64(stripe + 8 * lane) ^ secret64(secret_offset + 8 * lane);
    return (mixed & 0xFFFFFFFFull) * (mixed >> 32) + read64(stripe + 8 * (lane ^ 1));
}

KOPIR_DEVICE u64 merged(const u64 *acc, int secret_offset, u64 start) {
    for (int i = 0; i < 4; ++i) {
        const u64 a = acc[2 * i] ^ secret64(secret_offset + 16 * i);
        const u64 b = acc[2 * i + 1] ^ secret64(secret_offset + 16 * i + 8);
        start += a * b ^ __umul64hi(a, b);
    }
    start ^= start >> 37;
    start *= 0x165667919E3779F9ull;
    return start ^ start >> 32;
}

// Grid: one CUDA block of 128 threads (STRIPES * LANES) for each looked-at pool block. ``digests``: (n, 16), big endian.
// The stripes of a round are added in any order; only the scrambling between rounds is a chain.
KOPIR_KERNEL kopir_digest(const u8 *pool, const i64 *slots, i64 block_bytes, u8 *digests) {
    KOPIR_SHARED u64 parts[ROUNDS][STRIPES][LANES];
    KOPIR_SHARED u64 sums[ROUNDS][LANES];
    KOPIR_SHARED u64 acc[LANES];
    const u8 *block = pool + slots[blockIdx.x] * block_bytes;
    const i64 num_rounds = (block_bytes - 1) / ROUND_BYTES;
    const i64 num_left = (block_bytes - 1 - num_rounds * ROUND_BYTES) / STRIPE_BYTES;

    KOPIR_THREADS
    if (tid == 0) {
        acc[0] = PRIME32_3, acc[1] = PRIME64_1, acc[2] = PRIME64_2, acc[3] = PRIME64_3;
        acc[4] = PRIME64_4, acc[5] = PRIME32_2, acc[6] = PRIME64_5, acc[7] = PRIME32_1;
    }
    KOPIR_BARRIER

    for (i64 first = 0; first < num_rounds; first += ROUNDS) {
        const int count = num_rounds - first < ROUNDS ? (int)(num_rounds - first) : ROUNDS;
        KOPIR_THREADS
        const int stripe = tid / LANES, lane = tid % LANES;
        for (int r = 0; r < count; ++r)
            parts[r][stripe][lane] =
                lane_sum(block + (first + r) * ROUND_BYTES + stripe * STRIPE_BYTES, lane, 8 * stripe);
        KOPIR_BARRIER
        KOPIR_THREADS
        if (tid < ROUNDS * LANES && (int)(tid / LANES) < count) {
            u64 sum = 0;
            for (int stripe = 0; stripe < STRIPES; ++stripe) sum += parts[tid / LANES][stripe][tid % LANES];
            sums[tid / LANES][tid % LANES] = sum;
        }
        KOPIR_BARRIER
        KOPIR_THREADS
        if (tid < LANES)
            for (int r = 0; r < count; ++r) {
                u64 value = acc[tid] + sums[r][tid];
                value ^= value >> 47;
                acc[tid] = (value ^ secret64(128 + 8 * (int)tid)) * PRIME32_1;
            }
        KOPIR_BARRIER
    }

    KOPIR_THREADS
    if (tid < LANES) {
        const u8 *rest = block + num_rounds * ROUND_BYTES;
        u64 value = acc[tid];
        for (int stripe = 0; stripe < num_left; ++stripe)
            value += lane_sum(rest + stripe * STRIPE_BYTES, (int)tid, 8 * stripe);
        acc[tid] = value + lane_sum(block + block_bytes - STRIPE_BYTES, (int)tid, 121);
    }
    KOPIR_BARRIER

    KOPIR_THREADS
    if (tid < 2) {
        const u64 length = (u64)block_bytes;
        const u64 half = tid ? merged(acc, 11, length * PRIME64_1) : merged(acc, 117, ~(length * PRIME64_2));
        for (int i = 0; i < 8; ++i) digests[16 * (i64)blockIdx.x + 8 * tid + i] = (u8)(half >> (56 - 8 * i));
    }
    KOPIR_BARRIER
}

#ifdef KOPIR_HOST_SHIM
extern "C" void kopir_host_scan(u32 grid, u32 threads, const u8 *pool, const i64 *slots, const i64 *num_tokens,
                                const u32 *keys, const i64 *p, i64 *out) {
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) kopir_scan(pool, slots, num_tokens, keys, p, out);
}

extern "C" void kopir_host_digest(u32 grid, u32 threads, const u8 *pool, const i64 *slots, i64 block_bytes,
                                  u8 *digests) {
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) kopir_digest(pool, slots, block_bytes, digests);
}
#endif
