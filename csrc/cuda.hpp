// The CUDA driver behind a thin shim: opened at run time, so that a machine without a GPU (and a build without the
// toolkit) works, and replaceable by another library (GDSSTREAM_LIBCUDA), so that tests run every fence without one.
// Handles are owned by the classes below; nothing else calls the driver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace gdsstream::cuda {

using Result = int;
using DeviceHandle = int;
using ContextHandle = struct ContextOpaque*;
using StreamHandle = struct StreamOpaque*;
using EventHandle = struct EventOpaque*;
using DevicePointer = std::uint64_t;

// The driver's functions that are used, resolved once. The names carry the driver's versioned symbols.
struct Driver {
    Result (*init)(unsigned);
    Result (*device_get_count)(int*);
    Result (*device_get)(DeviceHandle*, int);
    Result (*device_get_attribute)(int*, int, DeviceHandle);
    Result (*device_get_pci_bus_id)(char*, int, DeviceHandle);
    Result (*primary_retain)(ContextHandle*, DeviceHandle);
    Result (*primary_release)(DeviceHandle);
    Result (*push_current)(ContextHandle);
    Result (*pop_current)(ContextHandle*);
    Result (*get_current)(ContextHandle*);
    Result (*set_current)(ContextHandle);
    Result (*stream_create)(StreamHandle*, unsigned);
    Result (*stream_destroy)(StreamHandle);
    Result (*stream_query)(StreamHandle);
    Result (*stream_wait_event)(StreamHandle, EventHandle, unsigned);
    Result (*event_create)(EventHandle*, unsigned);
    Result (*event_destroy)(EventHandle);
    Result (*event_record)(EventHandle, StreamHandle);
    Result (*event_query)(EventHandle);
    Result (*event_synchronize)(EventHandle);
    Result (*copy_to_device)(DevicePointer, const void*, std::size_t, StreamHandle);
    Result (*copy_to_host)(void*, DevicePointer, std::size_t, StreamHandle);
    // Since CUDA 12.8; nullptr in older drivers. The attributes are BatchAttributes of cuda.cpp.
    Result (*copy_batch)(DevicePointer*, DevicePointer*, std::size_t*, std::size_t, void*, std::size_t*, std::size_t,
                         StreamHandle);
    Result (*address_range)(DevicePointer*, std::size_t*, DevicePointer);
    // nullptr where the library has none: times are then unknown.
    Result (*event_elapsed)(float*, EventHandle, EventHandle);
    Result (*host_register)(void*, std::size_t, unsigned);
    Result (*host_unregister)(void*);
    Result (*error_name)(Result, const char**);
    Result (*error_string)(Result, const char**);
};

// Whether `stream` has nothing left to do. The calling thread has its context current.
bool idle(StreamHandle stream);

// The loaded driver, or nullptr with the reason in `unavailable_reason()`. Opened once a process.
const Driver* driver();
const std::string& unavailable_reason();
// Throws Error(cuda) when `result` is not success; `doing` completes "... while <doing>".
void check(Result result, const char* doing);

// Enqueues copies to the device, in one call where the driver can: 3 MiB copies reach 0.995 of the link in batches and
// 0.95 one by one, 64 KiB copies 0.94 and 0.30 (H200, PCIe 5 x16). The three arrays are of equal length.
void copy_all(std::vector<DevicePointer>& targets, std::vector<DevicePointer>& sources, std::vector<std::size_t>& bytes,
              StreamHandle stream);

// The end of the device allocation that `address` is in; the largest address where the driver knows of none. The
// calling thread has its context current.
DevicePointer allocation_end(DevicePointer address);

// "0000:3b:00.0"; needs no context. Throws as Device::open.
std::string pci_bus_id(int ordinal);

// A device's primary context, the one torch uses, retained for as long as this lives, and the streams on which the
// engine copies to it.
class Device {
  public:
    // Throws Error(unavailable) without a driver, Error(config) for an ordinal that does not exist.
    static std::shared_ptr<Device> open(int ordinal, unsigned copy_streams = 1);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    int ordinal() const { return ordinal_; }
    StreamHandle copy_stream(unsigned index = 0) const { return streams_[index]; }
    unsigned copy_streams() const { return static_cast<unsigned>(streams_.size()); }
    bool registers_read_only() const { return registers_read_only_; }
    // Makes the context current in a thread that belongs to the engine.
    void attach_thread() const;
    // Whether a copy stream has something left to do. The calling thread has the context current.
    bool copying() const;

    // Makes the context current in a thread of the caller's, and gives the caller's own back.
    class Scope {
      public:
        explicit Scope(const Device& device);
        ~Scope();
        Scope(const Scope&) = delete;
        Scope& operator=(const Scope&) = delete;

      private:
        bool pushed_ = false;
    };

  private:
    Device() = default;

    int ordinal_ = -1;
    DeviceHandle handle_ = 0;
    ContextHandle context_ = nullptr;
    std::vector<StreamHandle> streams_;
    bool registers_read_only_ = false;
};

// An event whose waiters sleep instead of spinning; without timing, which makes it cheaper, unless asked for.
class Event {
  public:
    Event() = default;
    explicit Event(std::shared_ptr<Device> device, bool timing = false);
    Event(Event&& other) noexcept;
    Event& operator=(Event&& other) noexcept;
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    ~Event();

    bool valid() const { return handle_ != nullptr; }
    // The calling thread has the device's context current.
    void record(StreamHandle stream);
    bool complete() const;
    void synchronize() const;
    void make_wait(StreamHandle stream) const;
    // Milliseconds from `earlier` to this, both complete and with timing; NaN where the driver does not say.
    float elapsed_ms(const Event& earlier) const;

  private:
    std::shared_ptr<Device> device_;
    EventHandle handle_ = nullptr;
};

// Events are reused: creating one costs about as much as a copy.
class EventPool {
  public:
    explicit EventPool(std::shared_ptr<Device> device) : device_(std::move(device)) {}
    Event take();
    void give_back(Event event);

  private:
    std::shared_ptr<Device> device_;
    std::mutex mutex_;
    std::vector<Event> free_;
};

// Host memory pinned and known to the driver, until it is destroyed.
class HostRegistration {
  public:
    HostRegistration() = default;
    // Throws Error(memory | cuda), and Error(unavailable) where such memory is not registered at all: read-only.
    HostRegistration(std::shared_ptr<Device> device, void* data, std::size_t bytes, bool read_only);
    HostRegistration(HostRegistration&& other) noexcept;
    HostRegistration& operator=(HostRegistration&& other) noexcept;
    HostRegistration(const HostRegistration&) = delete;
    HostRegistration& operator=(const HostRegistration&) = delete;
    ~HostRegistration() { reset(); }

    bool active() const { return data_ != nullptr; }
    void reset();

  private:
    std::shared_ptr<Device> device_;
    void* data_ = nullptr;
};

}  // namespace gdsstream::cuda
