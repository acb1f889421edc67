// Sinks: where bytes end up. GPU: copies on the device's copy stream, fenced by events. CPU: the destination itself.
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
    virtual void copy(const std::vector<CopySpan>& copies) = 0;
    // After a slot's last copy: gives it back to the ring now, or as soon as the copies are complete.
    virtual void finish_slot(StagingRing& ring, Slot* slot) = 0;
    // An event behind every copy issued so far; an invalid one where copies are complete when they return.
    virtual cuda::Event mark() = 0;
    virtual void give_back(cuda::Event event) = 0;
    // Later copies wait for what `stream` holds now (the destination's allocation, or its last use).
    virtual void order_after(std::uintptr_t stream) = 0;
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
