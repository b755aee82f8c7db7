// A few threads that compute one pass together. Between two passes they sleep; inside a pass they wait for each other by
// spinning for some microseconds, because a pass has hundreds of short phases, and sleep when that was not enough:
// another process may have their core.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <functional>
#include <immintrin.h>
#include <memory>
#include <thread>
#include <vector>

namespace kopir {

constexpr int SPINS_MAX = 1500;  // Some 20 to 60 microseconds of pause instructions.

class Team {
  public:
    explicit Team(int size) : size_(size) {
        for (int index = 1; index < size; index++) threads_.emplace_back([this, index] { serve(index); });
    }
    ~Team() {
        is_closing_ = true;
        start();
        for (auto& thread : threads_) thread.join();
    }
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return size_; }

    // Calls body(index) on every thread, the caller's as index 0, and returns when all are done.
    void run(const std::function<void(int)>& body) {
        body_ = &body;
        start();
        body(0);
        wait_for_all();
    }

    // Every thread of a pass calls it; none returns before all have.
    void wait_for_all() {
        const uint32_t round = round_.load(std::memory_order_acquire);
        if (num_here_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            num_here_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_seq_cst);
            wake(round_, round_sleepers_);
        } else {
            wait_until_not(round_, round, round_sleepers_);
        }
    }

  private:
    void start() {
        if (size_ == 1) return;
        passes_.fetch_add(1, std::memory_order_seq_cst);
        wake(passes_, pass_sleepers_);
    }
    void serve(int index) {
        uint32_t seen = 0;
        while (true) {
            wait_until_not(passes_, seen, pass_sleepers_);
            seen++;
            if (is_closing_) return;
            (*body_)(index);
            wait_for_all();
        }
    }
    static void wait_until_not(std::atomic<uint32_t>& word, uint32_t old, std::atomic<int>& sleepers) {
        for (int spin = 0; spin < SPINS_MAX; spin++) {
            if (word.load(std::memory_order_acquire) != old) return;
            _mm_pause();
        }
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        while (word.load(std::memory_order_seq_cst) == old)
            syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
        sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
    static void wake(std::atomic<uint32_t>& word, std::atomic<int>& sleepers) {
        if (sleepers.load(std::memory_order_seq_cst) > 0)
            syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }

    const int size_;
    std::vector<std::thread> threads_;
    const std::function<void(int)>* body_ = nullptr;
    std::atomic<bool> is_closing_{false};
    alignas(64) std::atomic<uint32_t> passes_{0};
    std::atomic<int> pass_sleepers_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
    std::atomic<int> round_sleepers_{0};
    alignas(64) std::atomic<int> num_here_{0};
};

}  // namespace kopir
