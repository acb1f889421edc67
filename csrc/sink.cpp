#include "sink.hpp"

#include <cstring>
#include <utility>

namespace gdsstream {

namespace {

class CudaSink : public Sink {
  public:
    explicit CudaSink(std::shared_ptr<cuda::Device> device) : device_(std::move(device)), events_(device_) {}

    bool takes_reads_in_place() const override { return false; }
    void attach_thread() override { device_->attach_thread(); }

    void copy(const std::byte* source, std::uint64_t target, std::uint64_t bytes) override {
        cuda::check(cuda::driver()->copy_to_device(target, source, bytes, device_->copy_stream()),
                    "copying to the device");
    }

    void finish_slot(StagingRing& ring, Slot* slot) override {
        slot->copied.record(device_->copy_stream());
        ring.release_after_copies(slot);
    }

    cuda::Event mark() override {
        const cuda::Device::Scope scope(*device_);
        cuda::Event event = events_.take();
        event.record(device_->copy_stream());
        return event;
    }

    void give_back(cuda::Event event) override {
        if (event.valid()) events_.give_back(std::move(event));
    }

    void order_after(std::uintptr_t stream) override {
        const cuda::Device::Scope scope(*device_);
        cuda::Event event = events_.take();
        event.record(reinterpret_cast<cuda::StreamHandle>(stream));
        event.make_wait(device_->copy_stream());
        // A wait holds on to the record it saw: the event may be used again at once.
        events_.give_back(std::move(event));
    }

    void order_before(std::uintptr_t stream, const cuda::Event& event) override {
        const cuda::Device::Scope scope(*device_);
        event.make_wait(reinterpret_cast<cuda::StreamHandle>(stream));
    }

    bool complete(const cuda::Event& event) override {
        if (!event.valid()) return true;
        const cuda::Device::Scope scope(*device_);
        return event.complete();
    }

    bool idle() override {
        try {
            const cuda::Device::Scope scope(*device_);
            return !device_->copying();
        } catch (const Error&) {
            return true;
        }
    }

  private:
    const std::shared_ptr<cuda::Device> device_;
    cuda::EventPool events_;
};

class CpuSink : public Sink {
  public:
    bool takes_reads_in_place() const override { return true; }
    void attach_thread() override {}
    void copy(const std::byte* source, std::uint64_t target, std::uint64_t bytes) override {
        std::memcpy(reinterpret_cast<void*>(target), source, bytes);
    }
    void finish_slot(StagingRing& ring, Slot* slot) override { ring.release(slot); }
    cuda::Event mark() override { return {}; }
    void give_back(cuda::Event) override {}
    void order_after(std::uintptr_t) override {}
    void order_before(std::uintptr_t, const cuda::Event&) override {}
    bool complete(const cuda::Event&) override { return true; }
    bool idle() override { return true; }
};

}  // namespace

std::unique_ptr<Sink> make_cuda_sink(std::shared_ptr<cuda::Device> device) {
    return std::make_unique<CudaSink>(std::move(device));
}

std::unique_ptr<Sink> make_cpu_sink() { return std::make_unique<CpuSink>(); }

}  // namespace gdsstream
