// Runs the kernels of scan.cu on a CPU: threads of a block become a loop between two barriers, blocks a loop around
// it. Only what scan.cu uses is here. A kernel that is right under this shim can still race on a GPU between two
// barriers; everything that several threads write goes through atomics, which is what keeps that out.
#pragma once

#include <cstring>

struct uint4 {
    unsigned int x, y, z, w;
};

struct KopirIndex {
    unsigned int x;
};

static KopirIndex blockIdx, blockDim;

#define KOPIR_KERNEL extern "C" void
#define KOPIR_DEVICE static inline
#define KOPIR_CONSTANT static const
#define KOPIR_SHARED
#define KOPIR_THREADS for (unsigned int tid = 0; tid < blockDim.x; ++tid) {
#define KOPIR_BARRIER }

static inline long long atomicMin(long long *at, long long value) {
    const long long old = *at;
    if (value < old) *at = value;
    return old;
}

static inline long long atomicMax(long long *at, long long value) {
    const long long old = *at;
    if (value > old) *at = value;
    return old;
}

static inline unsigned long long atomicAdd(unsigned long long *at, unsigned long long value) {
    const unsigned long long old = *at;
    *at = old + value;
    return old;
}

static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
