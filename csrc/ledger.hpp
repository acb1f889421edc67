// What reads and writes came to: operations, bytes, errors, retries, how large they were and how long they took.
//
// Each thread counts on a page of its own (Tally), which only it writes: a count is an ordinary addition, and nobody
// waits for anybody. A ledger adds its pages up when somebody asks, and keeps them when their threads have ended.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace gdsstream {

// gds_stats' buckets: below 4 KiB, 4 to 8 KiB, and so on by powers of two; the last one is 64 MiB and more.
inline constexpr std::size_t kSizeBuckets = 16;
// Below 1 us, then eight steps for each power of two, then 69 s and more: a percentile is known to 6 % or better.
inline constexpr std::size_t kLatencyBuckets = 210;

std::size_t size_bucket(std::uint64_t bytes);
std::size_t latency_bucket(std::uint64_t ns);

inline std::uint64_t now_ns() {
    return static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
            .count());
}

// Sums. An operation that failed is an error, and nothing else.
struct Counts {
    std::uint64_t operations = 0;
    std::uint64_t bytes = 0;
    std::uint64_t errors = 0;
    std::uint64_t retries = 0;     // calls beyond the first that operations took
    std::uint64_t timed = 0;       // operations whose duration is known
    std::uint64_t latency_ns = 0;  // of those, together
    std::uint64_t longest_ns = 0;
    std::array<std::uint64_t, kSizeBuckets> sizes{};         // operations by bytes asked for
    std::array<std::uint64_t, kLatencyBuckets> latencies{};  // timed operations by duration
};

class alignas(64) Tally {
  public:
    explicit Tally(bool histograms) : histograms_(histograms) {}
    Tally(const Tally&) = delete;
    Tally& operator=(const Tally&) = delete;

    // By one thread only (or under one lock). `asked` is the operation's size, of which `bytes` arrived.
    void add(std::uint64_t asked, std::uint64_t bytes, std::uint64_t retries);
    void time(std::uint64_t ns);  // how long one that was added took, where it is known
    void fail(std::uint64_t retries);

    // By any thread.
    void add_to(Counts& sums) const;

  private:
    using Count = std::atomic<std::uint64_t>;

    // One writer: no other thread's addition can be lost, and a locked instruction is not needed.
    static void raise(Count& count, std::uint64_t by) {
        count.store(count.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
    }

    const bool histograms_;
    Count operations_{0};
    Count bytes_{0};
    Count errors_{0};
    Count retries_{0};
    Count timed_{0};
    Count latency_ns_{0};
    Count longest_ns_{0};
    std::array<Count, kSizeBuckets> sizes_{};
    std::array<Count, kLatencyBuckets> latencies_{};
};

class Ledger : public std::enable_shared_from_this<Ledger> {
  public:
    explicit Ledger(bool histograms) : histograms_(histograms), own_(histograms) {}
    Ledger(const Ledger&) = delete;
    Ledger& operator=(const Ledger&) = delete;

    // A page for the calling thread; it lives as long as the ledger.
    Tally& open();
    Counts total() const;

    // For whoever has no page: any thread, under the ledger's lock.
    void record(std::uint64_t bytes, std::uint64_t ns, std::uint64_t retries);
    void fail();

  private:
    const bool histograms_;
    mutable std::mutex mutex_;
    Tally own_;
    std::vector<std::unique_ptr<Tally>> pages_;
};

// The wall time in which something was queued or under way. Things that overlap count once.
class Activity : public std::enable_shared_from_this<Activity> {
  public:
    // While this is busy, so is `parent`.
    explicit Activity(std::shared_ptr<Activity> parent = nullptr) : parent_(std::move(parent)) {}
    Activity(const Activity&) = delete;
    Activity& operator=(const Activity&) = delete;

    void begin(std::size_t things);
    void end();
    bool busy() const;
    std::uint64_t microseconds() const;

  private:
    using Clock = std::chrono::steady_clock;

    const std::shared_ptr<Activity> parent_;
    mutable std::mutex mutex_;
    std::size_t things_ = 0;
    Clock::time_point since_;
    Clock::duration total_{};
};

}  // namespace gdsstream
