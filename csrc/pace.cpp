#include "pace.hpp"

#include <algorithm>

namespace gdsstream {

namespace {

// Several times what an NVMe drive takes for a read of 512 KiB.
constexpr std::uint64_t kQueuedNs = 1'000'000;
// Long enough for a rate, short enough that a fast disk's limit has grown before its first gigabyte is read.
constexpr std::uint64_t kWindowNs = 2'000'000;
constexpr std::size_t kWindowReads = 8;

}  // namespace

void Pace::begin(std::uint64_t now_ns) {
    since_ns_ = now_ns;
    bytes_ = 0;
    reads_ = 0;
}

void Pace::arrived(std::size_t reads, std::uint64_t bytes, std::uint64_t quickest_ns, std::uint64_t now_ns) {
    reads_ += reads;
    bytes_ += bytes;
    quickest_ns_ = std::min(quickest_ns_, quickest_ns);
    if (now_ns < since_ns_ + kWindowNs || reads_ < kWindowReads) return;
    const double rate = static_cast<double>(bytes_) / static_cast<double>(now_ns - since_ns_);
    rate_ = rate_ == 0 ? rate : (rate_ + rate) / 2;
    const auto queued = static_cast<double>(std::max(kQueuedNs, 2 * quickest_ns_));
    limit_ = std::clamp(static_cast<std::uint64_t>(rate_ * queued), least_, kMostBytes);
    since_ns_ = now_ns;
    bytes_ = 0;
    reads_ = 0;
}

}  // namespace gdsstream
