#include "ring.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#include "error.hpp"

namespace gdsstream {

namespace {

constexpr std::size_t kSegmentBytes = std::size_t{32} << 20;

}  // namespace

StagingRing::StagingRing(std::shared_ptr<cuda::Device> device, std::size_t slot_bytes, std::size_t limit_bytes,
                         int numa_node, std::atomic<std::uint64_t>& wait_us)
    : device_(std::move(device)),
      slot_bytes_(slot_bytes),
      slots_per_segment_(std::clamp<std::size_t>(std::min(kSegmentBytes, limit_bytes) / slot_bytes, 1, 4096)),
      numa_node_(numa_node),
      wait_us_(wait_us),
      max_segments_(std::max<std::size_t>(1, limit_bytes / (slots_per_segment_ * slot_bytes))) {}

std::byte* StagingRing::segment_data(unsigned segment) const {
    std::lock_guard lock(mutex_);
    return segments_[segment]->memory.data();
}

Slot* StagingRing::take_free_or_copied() {
    try {
        while (!copying_.empty() && copying_.front()->copied.complete()) {
            free_.push_back(copying_.front());
            copying_.pop_front();
        }
    } catch (const Error&) {
        // It stays among those whose copies nobody knows about: no reason to fail while another one is free.
        if (free_.empty()) throw;
    }
    if (free_.empty()) return nullptr;
    Slot* slot = free_.back();
    free_.pop_back();
    return slot;
}

bool StagingRing::grow(bool always) {
    // One thread pins memory while the others go on with the slots there are.
    std::lock_guard growing(grow_mutex_);
    unsigned index = 0;
    {
        std::lock_guard lock(mutex_);
        if (!always && !free_.empty()) return true;
        if (segments_.size() >= max_segments_) return false;
        index = static_cast<unsigned>(segments_.size());
    }
    auto segment = std::make_unique<Segment>();
    try {
        segment->memory = Mapping::anonymous(segment_bytes(), numa_node_);
        if (device_ != nullptr) {
            segment->registration =
                cuda::HostRegistration(device_, segment->memory.data(), segment->memory.size(), false);
        }
        segment->slots.resize(slots_per_segment_);
        for (std::size_t i = 0; i < segment->slots.size(); ++i) {
            Slot& slot = segment->slots[i];
            slot.data = segment->memory.data() + i * slot_bytes_;
            slot.segment = index;
            if (device_ != nullptr) {
                const cuda::Device::Scope scope(*device_);
                slot.copied = cuda::Event(device_);
            }
        }
    } catch (const Error& error) {
        std::lock_guard lock(mutex_);
        if (segments_.empty()) throw;
        // Slower with fewer slots, but it works: remembered, and reported once.
        max_segments_ = segments_.size();
        shortfall_ = error.what();
        fell_short_ = true;
        return false;
    }
    std::lock_guard lock(mutex_);
    // Room for every slot there is: giving one back never needs memory.
    free_.reserve((segments_.size() + 1) * slots_per_segment_);
    segments_.push_back(std::move(segment));
    for (Slot& slot : segments_.back()->slots) free_.push_back(&slot);
    returned_.notify_all();
    return true;
}

void StagingRing::grow_to_limit() {
    while (grow(true)) {
    }
}

Slot* StagingRing::try_acquire() {
    for (;;) {
        {
            std::lock_guard lock(mutex_);
            if (Slot* slot = take_free_or_copied()) return slot;
            if (segments_.size() >= max_segments_) return nullptr;
        }
        if (!grow()) return nullptr;
    }
}

Slot* StagingRing::acquire() {
    for (;;) {
        try {
            if (Slot* slot = try_acquire()) return slot;
        } catch (...) {
            // What woke this thread was for whoever can use it.
            returned_.notify_one();
            throw;
        }
        Slot* oldest = nullptr;
        {
            std::unique_lock lock(mutex_);
            returned_.wait(lock, [&] { return !free_.empty() || !copying_.empty(); });
            if (!free_.empty()) continue;
            // Taken off the queue first, so that each waiter waits for a slot of its own.
            oldest = copying_.front();
            copying_.pop_front();
        }
        const auto began = std::chrono::steady_clock::now();
        try {
            oldest->copied.synchronize();
        } catch (...) {
            // Nobody knows whether its copies are complete: back to the slots that are asked before they are used.
            release_after_copies(oldest);
            throw;
        }
        const auto waited = std::chrono::steady_clock::now() - began;
        wait_us_ += static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(waited).count());
        return oldest;
    }
}

void StagingRing::release(Slot* slot) {
    {
        std::lock_guard lock(mutex_);
        free_.push_back(slot);
    }
    returned_.notify_one();
}

void StagingRing::release_after_copies(Slot* slot) {
    {
        std::lock_guard lock(mutex_);
        copying_.push_back(slot);
    }
    returned_.notify_one();
}

std::size_t StagingRing::bytes() const {
    std::lock_guard lock(mutex_);
    return segments_.size() * segment_bytes();
}

std::size_t StagingRing::slots_total() const {
    std::lock_guard lock(mutex_);
    return segments_.size() * slots_per_segment_;
}

std::size_t StagingRing::slots_not_held() const {
    std::lock_guard lock(mutex_);
    return free_.size() + copying_.size();
}

std::string StagingRing::shortfall() const {
    std::lock_guard lock(mutex_);
    return shortfall_;
}

}  // namespace gdsstream
