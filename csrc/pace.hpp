// How much a thread has under way at a disk: what the disk brings in the next few milliseconds, and no more.
//
// A disk is busy once its reads come back no faster one by one than together. Whatever is under way beyond that waits
// in its queue, and the memory it goes to is written and read again out of the processor's caches: on a virtual disk
// reads into 8 MiB, used again and again, came at 1.25 to 1.3 times the rate of reads into 64 and more. By Little's law
// (under way = rate x time) reads that come back within `kQueued` and keep to a limit of rate x kQueued let the limit
// grow; those that take longer shrink it. Storage that takes long for a single read gets twice that long instead.
// Pure: the time is passed in.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gdsstream {

class Pace {
  public:
    // Of all threads of a lane together at least, and of each at most: no disk needs less, none more than this.
    static constexpr std::uint64_t kLeastBytes = 8 << 20;
    static constexpr std::uint64_t kMostBytes = 16 << 20;

    explicit Pace(unsigned threads) : least_(kLeastBytes / (threads < 8 ? threads : 8)), limit_(least_) {}

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
    std::uint64_t quickest_ns_ = kNever;  // read since it began, into a queue that was empty
    double rate_ = 0;                     // bytes a nanosecond
};

}  // namespace gdsstream
