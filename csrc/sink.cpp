#include "sink.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <utility>

#include "error.hpp"

namespace gdsstream {

namespace {

// Questions in a row that fail until a context counts as gone.
constexpr unsigned kGoneAfter = 20;

class CudaSink : public Sink {
  public:
    explicit CudaSink(std::shared_ptr<cuda::Device> device) : device_(std::move(device)), events_(device_) {}

    bool takes_reads_in_place() const override { return false; }
    void attach_thread() override { device_->attach_thread(); }

    void copy(const std::vector<CopySpan>& copies, unsigned channel) override {
        std::vector<cuda::DevicePointer> targets;
        std::vector<cuda::DevicePointer> sources;
        std::vector<std::size_t> bytes;
        for (const CopySpan& copy : copies) {
            // A driver refuses a copy that reaches from one allocation into the next, however close they lie.
            for (std::uint64_t done = 0; done < copy.bytes;) {
                const cuda::DevicePointer target = copy.target + done;
                const std::uint64_t room = copy.joined ? cuda::allocation_end(target) - target : copy.bytes;
                const std::uint64_t part = std::min(copy.bytes - done, room);
                targets.push_back(target);
                sources.push_back(copy.source + done);
                bytes.push_back(part);
                done += part;
            }
        }
        cuda::copy_all(targets, sources, bytes, device_->copy_stream(channel));
    }

    void finish_slot(StagingRing& ring, Slot* slot, unsigned channel) override {
        slot->copied.record(device_->copy_stream(channel));
        ring.release_after_copies(slot);
    }

    cuda::Event mark(unsigned channel) override {
        const cuda::Device::Scope scope(*device_);
        cuda::Event event = events_.take();
        event.record(device_->copy_stream(channel));
        return event;
    }

    void give_back(cuda::Event event) override {
        if (event.valid()) events_.give_back(std::move(event));
    }

    unsigned order_after(std::uintptr_t stream) override {
        const cuda::Device::Scope scope(*device_);
        auto* const handle = reinterpret_cast<cuda::StreamHandle>(stream);
        std::lock_guard lock(mutex_);
        if (cuda::idle(handle)) return channel_;
        channel_ = (channel_ + 1) % device_->copy_streams();
        cuda::Event event = events_.take();
        event.record(handle);
        event.make_wait(device_->copy_stream(channel_));
        // A wait holds on to the record it saw: the event may be used again at once.
        events_.give_back(std::move(event));
        return channel_;
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
            const bool copying = device_->copying();
            failures_ = 0;
            return !copying;
        } catch (const Error&) {
            // One failure says nothing about the copies; a context that is gone fails for good, and so do they.
            return ++failures_ > kGoneAfter;
        }
    }

  private:
    const std::shared_ptr<cuda::Device> device_;
    cuda::EventPool events_;
    std::mutex mutex_;
    unsigned channel_ = 0;
    std::atomic<unsigned> failures_ = 0;  // of `idle`, one after the other
};

class CpuSink : public Sink {
  public:
    bool takes_reads_in_place() const override { return true; }
    void attach_thread() override {}
    void copy(const std::vector<CopySpan>& copies, unsigned) override {
        for (const CopySpan& copy : copies) {
            std::memcpy(reinterpret_cast<void*>(copy.target), reinterpret_cast<const void*>(copy.source), copy.bytes);
        }
    }
    void finish_slot(StagingRing& ring, Slot* slot, unsigned) override { ring.release(slot); }
    cuda::Event mark(unsigned) override { return {}; }
    void give_back(cuda::Event) override {}
    unsigned order_after(std::uintptr_t) override { return 0; }
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
