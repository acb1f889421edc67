// Fences between a consumer's streams and the reuse of its memory, for whoever keeps device buffers above the engine.
#pragma once

#include <cstdint>
#include <memory>

#include "cuda.hpp"

namespace gdsstream {

// A stream of our own, on which nothing is ever computed: it collects fences, and what is submitted to an engine
// "behind" it is ordered after them and after nothing else.
class FenceStream {
  public:
    // Throws as cuda::Device::open.
    explicit FenceStream(int ordinal) : device_(cuda::Device::open(ordinal)) {}

    std::uintptr_t handle() const { return reinterpret_cast<std::uintptr_t>(device_->copy_stream()); }
    const std::shared_ptr<cuda::Device>& device() const { return device_; }

  private:
    std::shared_ptr<cuda::Device> device_;
};

// A point in a stream. Any thread may call; one at a time.
class Fence {
  public:
    explicit Fence(const FenceStream& stream, bool timing = false);

    // Moves the fence to what `stream` has queued by now.
    void record(std::uintptr_t stream);
    // `stream` goes no further until the recorded point is reached. Nothing to wait for before the first record.
    void order(std::uintptr_t stream) const;
    bool done() const;
    // Between two recorded fences with timing that are done; NaN where the driver does not say.
    float elapsed_ms(const Fence& earlier) const;

  private:
    std::shared_ptr<cuda::Device> device_;
    cuda::Event event_;
};

}  // namespace gdsstream
