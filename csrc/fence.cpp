#include "fence.hpp"

namespace gdsstream {

namespace {

cuda::Event make_event(const std::shared_ptr<cuda::Device>& device, bool timing) {
    const cuda::Device::Scope scope(*device);
    return cuda::Event(device, timing);
}

cuda::StreamHandle as_stream(std::uintptr_t stream) { return reinterpret_cast<cuda::StreamHandle>(stream); }

}  // namespace

Fence::Fence(const FenceStream& stream, bool timing) : device_(stream.device()), event_(make_event(device_, timing)) {}

void Fence::record(std::uintptr_t stream) {
    const cuda::Device::Scope scope(*device_);
    event_.record(as_stream(stream));
}

void Fence::order(std::uintptr_t stream) const {
    const cuda::Device::Scope scope(*device_);
    event_.make_wait(as_stream(stream));
}

bool Fence::done() const {
    const cuda::Device::Scope scope(*device_);
    return event_.complete();
}

float Fence::elapsed_ms(const Fence& earlier) const {
    const cuda::Device::Scope scope(*device_);
    return event_.elapsed_ms(earlier.event_);
}

}  // namespace gdsstream
