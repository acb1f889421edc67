// How much a thread has under way at a disk: what the disk brings in the next millisecond, and little more.
//
// Whatever is under way beyond what keeps a disk busy waits in its queue, and the memory that it goes to is out of the
// processor's caches by the time it is written and read: on a virtual disk reads into 6 MiB, used again and again, came
// at 1.25 to 1.33 times the rate of reads into 64. The limit is the rate of arrivals times a millisecond, or twice the
// quickest read where storage takes longer for one. By Little's law (under way = rate x time) it grows while reads come
// back sooner than that, and ends where they take as long.
// Pure: the time is passed in.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace gdsstream {

class Pace {
  public:
    // More than this under way in one thread fills any disk's queue.
    static constexpr std::uint64_t kMostBytes = 16 << 20;

    // `least_bytes` of all threads together is where it begins, and what it never falls below; each of more than eight
    // has as much as one of eight.
    Pace(unsigned threads, std::uint64_t least_bytes)
        : least_(std::min(least_bytes / std::clamp(threads, 1U, 8U), kMostBytes)), limit_(least_) {}

    std::uint64_t limit_bytes() const { return limit_; }
    // The thread has reads under way from now on, and had none before.
    void begin(std::uint64_t now_ns);
    // `reads` came back by now, `bytes` together, the quickest after `quickest_ns`.
    void arrived(std::size_t reads, std::uint64_t bytes, std::uint64_t quickest_ns, std::uint64_t now_ns);

  private:
    static constexpr std::uint64_t kNever = ~std::uint64_t{0};

    const std::uint64_t least_;
    std::uint64_t limit_;
    std::uint64_t since_ns_ = 0;
    std::uint64_t bytes_ = 0;
    std::size_t reads_ = 0;
    std::uint64_t quickest_ns_ = kNever;  // of all reads: one that found the queue empty
    double rate_ = 0;                     // bytes a nanosecond
};

}  // namespace gdsstream
