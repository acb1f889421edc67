// The staging ring: slots of pinned memory between the readers and the copy stream.
//
// A slot is free, being read into (a worker holds it) or being copied from (its event tells when it is free again).
// The ring grows by segments up to its limit, when no slot is free: a small load pins little and starts at once.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda.hpp"
#include "memory.hpp"

namespace gdsstream {

struct Slot {
    std::byte* data = nullptr;
    unsigned segment = 0;
    cuda::Event copied;  // recorded after the last copy out of the slot; invalid without a GPU
};

class StagingRing {
  public:
    // `device` may be null (a CPU engine): the memory is then not registered. `limit_bytes` bounds all segments.
    // `wait_us` counts the microseconds for which acquire() waited for copies.
    StagingRing(std::shared_ptr<cuda::Device> device, std::size_t slot_bytes, std::size_t limit_bytes, int numa_node,
                std::atomic<std::uint64_t>& wait_us);

    std::size_t slot_bytes() const { return slot_bytes_; }
    std::size_t segment_bytes() const { return slots_per_segment_ * slot_bytes_; }
    std::size_t max_segments() const { return max_segments_; }
    std::byte* segment_data(unsigned segment) const;

    // A free slot, or nullptr when there is none now. Throws Error(memory | cuda) when not even the first segment fits.
    Slot* try_acquire();
    // The same, waiting for the oldest copies to complete, or for another worker to give its slot back.
    Slot* acquire();
    void release(Slot* slot);
    // All segments now instead of one by one.
    void grow_to_limit();
    // The slot's event has been recorded behind its copies.
    void release_after_copies(Slot* slot);

    std::size_t bytes() const;
    std::size_t slots_total() const;
    // Free slots plus those whose copies are merely not reaped yet; equals slots_total() when no worker holds one.
    std::size_t slots_not_held() const;
    // Why the ring stayed smaller than its limit, or "".
    std::string shortfall() const;
    // Whether `shortfall` has anything to say; takes no lock.
    bool fell_short() const { return fell_short_; }

  private:
    struct Segment {
        Mapping memory;
        cuda::HostRegistration registration;  // after memory: it has to go first
        std::vector<Slot> slots;
    };

    Slot* take_free_or_copied();  // the lock is held
    // Adds a segment, unless another thread just did; with `always`, even then. false: at the limit.
    bool grow(bool always = false);

    const std::shared_ptr<cuda::Device> device_;
    const std::size_t slot_bytes_;
    const std::size_t slots_per_segment_;
    const int numa_node_;
    std::atomic<std::uint64_t>& wait_us_;

    mutable std::mutex mutex_;
    std::condition_variable returned_;
    std::mutex grow_mutex_;
    std::size_t max_segments_;
    std::string shortfall_;
    std::atomic<bool> fell_short_{false};
    std::vector<std::unique_ptr<Segment>> segments_;
    // Last in, first out: the slot used last is the one still in the caches, and no more of the ring is in use than has
    // to be.
    std::vector<Slot*> free_;
    std::deque<Slot*> copying_;  // in the order of their copies, on one stream
};

}  // namespace gdsstream
