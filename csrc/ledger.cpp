#include "ledger.hpp"

#include <algorithm>
#include <bit>

namespace gdsstream {

namespace {

constexpr unsigned kFirstSizeBits = 12;     // 4 KiB
constexpr unsigned kFirstLatencyBits = 10;  // 1024 ns
constexpr unsigned kLatencyStepBits = 3;    // eight steps for each power of two
constexpr std::uint64_t kLatencySteps = 8;

}  // namespace

std::size_t size_bucket(std::uint64_t bytes) {
    return std::min<std::size_t>(static_cast<std::size_t>(std::bit_width(bytes >> kFirstSizeBits)), kSizeBuckets - 1);
}

std::size_t latency_bucket(std::uint64_t ns) {
    if (ns >> kFirstLatencyBits == 0) return 0;
    const auto power = static_cast<unsigned>(std::bit_width(ns)) - 1;
    const std::uint64_t step = (ns >> (power - kLatencyStepBits)) % kLatencySteps;
    const std::uint64_t bucket = 1 + (power - kFirstLatencyBits) * kLatencySteps + step;
    return std::min<std::size_t>(bucket, kLatencyBuckets - 1);
}

void Tally::add(std::uint64_t asked, std::uint64_t bytes, std::uint64_t retries) {
    raise(operations_, 1);
    raise(bytes_, bytes);
    if (retries > 0) raise(retries_, retries);
    if (histograms_) raise(sizes_[size_bucket(asked)], 1);
}

void Tally::time(std::uint64_t ns) {
    raise(timed_, 1);
    raise(latency_ns_, ns);
    if (ns > longest_ns_.load(std::memory_order_relaxed)) longest_ns_.store(ns, std::memory_order_relaxed);
    if (histograms_) raise(latencies_[latency_bucket(ns)], 1);
}

void Tally::fail(std::uint64_t retries) {
    raise(errors_, 1);
    if (retries > 0) raise(retries_, retries);
}

void Tally::add_to(Counts& sums) const {
    constexpr auto relaxed = std::memory_order_relaxed;
    sums.operations += operations_.load(relaxed);
    sums.bytes += bytes_.load(relaxed);
    sums.errors += errors_.load(relaxed);
    sums.retries += retries_.load(relaxed);
    sums.timed += timed_.load(relaxed);
    sums.latency_ns += latency_ns_.load(relaxed);
    sums.longest_ns = std::max(sums.longest_ns, longest_ns_.load(relaxed));
    for (std::size_t i = 0; i < kSizeBuckets; ++i) sums.sizes[i] += sizes_[i].load(relaxed);
    for (std::size_t i = 0; i < kLatencyBuckets; ++i) sums.latencies[i] += latencies_[i].load(relaxed);
}

Tally& Ledger::open() {
    auto page = std::make_unique<Tally>(histograms_);
    std::lock_guard lock(mutex_);
    pages_.push_back(std::move(page));
    return *pages_.back();
}

Counts Ledger::total() const {
    Counts sums;
    std::lock_guard lock(mutex_);
    own_.add_to(sums);
    for (const std::unique_ptr<Tally>& page : pages_) page->add_to(sums);
    return sums;
}

void Ledger::record(std::uint64_t bytes, std::uint64_t ns, std::uint64_t retries) {
    std::lock_guard lock(mutex_);
    own_.add(bytes, bytes, retries);
    own_.time(ns);
}

void Ledger::fail() {
    std::lock_guard lock(mutex_);
    own_.fail(0);
}

void Activity::begin(std::size_t things) {
    std::lock_guard lock(mutex_);
    if (things_ == 0) {
        since_ = Clock::now();
        if (parent_ != nullptr) parent_->begin(1);
    }
    things_ += things;
}

void Activity::end() {
    std::lock_guard lock(mutex_);
    if (--things_ > 0) return;
    total_ += Clock::now() - since_;
    if (parent_ != nullptr) parent_->end();
}

bool Activity::busy() const {
    std::lock_guard lock(mutex_);
    return things_ > 0;
}

std::uint64_t Activity::microseconds() const {
    std::lock_guard lock(mutex_);
    const Clock::duration total = things_ == 0 ? total_ : total_ + (Clock::now() - since_);
    return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(total).count());
}

}  // namespace gdsstream
