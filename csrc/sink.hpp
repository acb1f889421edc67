// Sinks: where bytes end up. GPU: copies on the device's copy streams, fenced by events. CPU: the destination itself.
//
// Copies go by a channel, which is a copy stream of the device; all of a transfer's go by one. A transfer whose
// destination is still in use begins the next channel: its copies stand behind that use, and those of the transfers
// before it, which are still being read, must not.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda.hpp"
#include "ring.hpp"
#include "task.hpp"

namespace gdsstream {

class Sink {
  public:
    virtual ~Sink() = default;
    // Whether reads may land at their targets without a slot between.
    virtual bool takes_reads_in_place() const = 0;
    // Called once by each worker thread.
    virtual void attach_thread() = 0;
    // Sources are addresses.
    virtual void copy(const std::vector<CopySpan>& copies, unsigned channel) = 0;
    // After a slot's last copy: gives it back to the ring now, or as soon as the copies are complete.
    virtual void finish_slot(StagingRing& ring, Slot* slot, unsigned channel) = 0;
    // An event behind every copy of a channel issued so far; an invalid one where copies are complete when they return.
    virtual cuda::Event mark(unsigned channel) = 0;
    virtual void give_back(cuda::Event event) = 0;
    // The channel for a transfer whose copies have to wait for what `stream` holds now (the destination's allocation,
    // or its last use).
    virtual unsigned order_after(std::uintptr_t stream) = 0;
    // `stream` waits for `event`.
    virtual void order_before(std::uintptr_t stream, const cuda::Event& event) = 0;
    virtual bool complete(const cuda::Event& event) = 0;
    // Whether no copy is under way: for where no event could be recorded. Never throws; a broken context is idle, since
    // its copies have ended with it.
    virtual bool idle() = 0;
};

std::unique_ptr<Sink> make_cuda_sink(std::shared_ptr<cuda::Device> device);
std::unique_ptr<Sink> make_cpu_sink();

}  // namespace gdsstream
