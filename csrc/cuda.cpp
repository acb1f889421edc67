#include "cuda.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <utility>

#include "error.hpp"

namespace gdsstream::cuda {

namespace {

// CUresult and flag values of cuda.h, which the build does not need.
constexpr Result kSuccess = 0;
constexpr Result kInvalidValue = 1;
constexpr Result kOutOfMemory = 2;
constexpr Result kNotReady = 600;
constexpr Result kNotPermitted = 800;
constexpr Result kNotSupported = 801;
constexpr unsigned kStreamNonBlocking = 0x1;
constexpr unsigned kEventBlockingSync = 0x1;
constexpr unsigned kEventDisableTiming = 0x2;
constexpr unsigned kRegisterPortable = 0x1;
constexpr unsigned kRegisterReadOnly = 0x8;
constexpr int kAttributeReadOnlyRegister = 113;
// Longer batches gain nothing, and one call should not hold the driver's lock for long.
constexpr std::size_t kMaxBatch = 1024;

// CUmemcpyAttributes: the driver reads it once and applies it to every copy of a batch.
struct BatchAttributes {
    int source_access_order = 1;  // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read in stream order
    int source_location[2] = {0, 0};
    int target_location[2] = {0, 0};
    unsigned flags = 0;
};

struct Loaded {
    Driver driver{};
    std::string reason;
};

template <typename Function>
void resolve(void* library, const char* symbol, Function& function, std::string& missing) {
    function = reinterpret_cast<Function>(::dlsym(library, symbol));
    if (function == nullptr) missing += std::string(missing.empty() ? "" : ", ") + symbol;
}

std::string describe(const Driver& driver, Result result) {
    const char* name = nullptr;
    const char* text = nullptr;
    driver.error_name(result, &name);
    driver.error_string(result, &text);
    return std::string(name != nullptr ? name : "unknown error") + " (" + std::to_string(result) + ")" +
           (text != nullptr ? std::string(": ") + text : "");
}

Loaded load() {
    Loaded loaded;
    const char* replaced = std::getenv("GDSSTREAM_LIBCUDA");
    const char* name = replaced != nullptr && *replaced != '\0' ? replaced : "libcuda.so.1";
    // Never closed: the driver keeps threads of its own.
    void* library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        const char* why = ::dlerror();
        loaded.reason = std::string("the CUDA driver is not there: ") + (why != nullptr ? why : name);
        return loaded;
    }
    Driver& d = loaded.driver;
    std::string missing;
    resolve(library, "cuInit", d.init, missing);
    resolve(library, "cuDeviceGetCount", d.device_get_count, missing);
    resolve(library, "cuDeviceGet", d.device_get, missing);
    resolve(library, "cuDeviceGetAttribute", d.device_get_attribute, missing);
    resolve(library, "cuDeviceGetPCIBusId", d.device_get_pci_bus_id, missing);
    resolve(library, "cuDevicePrimaryCtxRetain", d.primary_retain, missing);
    resolve(library, "cuDevicePrimaryCtxRelease_v2", d.primary_release, missing);
    resolve(library, "cuCtxPushCurrent_v2", d.push_current, missing);
    resolve(library, "cuCtxPopCurrent_v2", d.pop_current, missing);
    resolve(library, "cuCtxGetCurrent", d.get_current, missing);
    resolve(library, "cuCtxSetCurrent", d.set_current, missing);
    resolve(library, "cuStreamCreate", d.stream_create, missing);
    resolve(library, "cuStreamDestroy_v2", d.stream_destroy, missing);
    resolve(library, "cuStreamQuery", d.stream_query, missing);
    resolve(library, "cuStreamWaitEvent", d.stream_wait_event, missing);
    resolve(library, "cuEventCreate", d.event_create, missing);
    resolve(library, "cuEventDestroy_v2", d.event_destroy, missing);
    resolve(library, "cuEventRecord", d.event_record, missing);
    resolve(library, "cuEventQuery", d.event_query, missing);
    resolve(library, "cuEventSynchronize", d.event_synchronize, missing);
    resolve(library, "cuMemcpyHtoDAsync_v2", d.copy_to_device, missing);
    resolve(library, "cuMemcpyDtoHAsync_v2", d.copy_to_host, missing);
    resolve(library, "cuMemGetAddressRange_v2", d.address_range, missing);
    resolve(library, "cuMemHostRegister_v2", d.host_register, missing);
    resolve(library, "cuMemHostUnregister", d.host_unregister, missing);
    resolve(library, "cuGetErrorName", d.error_name, missing);
    resolve(library, "cuGetErrorString", d.error_string, missing);
    std::string optional;
    resolve(library, "cuMemcpyBatchAsync_v2", d.copy_batch, optional);
    resolve(library, "cuEventElapsedTime", d.event_elapsed, optional);
    if (!missing.empty()) {
        loaded.reason = std::string(name) + " is too old, it lacks: " + missing;
        return loaded;
    }
    const Result result = d.init(0);
    if (result != kSuccess) loaded.reason = "cuInit failed: " + describe(d, result);
    return loaded;
}

const Loaded& loaded() {
    static const Loaded instance = load();
    return instance;
}

// Errors on paths that cannot throw (destructors): a driver that is shutting down refuses, and nothing is left to do.
void ignore(Result) {}

}  // namespace

const Driver* driver() { return loaded().reason.empty() ? &loaded().driver : nullptr; }

const std::string& unavailable_reason() { return loaded().reason; }

void check(Result result, const char* doing) {
    if (result == kSuccess) return;
    const std::string message = std::string("CUDA failed while ") + doing + ": " + describe(loaded().driver, result);
    throw Error(result == kOutOfMemory ? ErrorKind::memory : ErrorKind::cuda, message);
}

namespace {

// Whether the driver took them all: one may have the symbol and still refuse, on older devices for instance.
bool copied_in_batches(const Driver& d, std::vector<DevicePointer>& targets, std::vector<DevicePointer>& sources,
                       std::vector<std::size_t>& bytes, StreamHandle stream) {
    static std::atomic<bool> refused{false};
    if (d.copy_batch == nullptr || bytes.size() < 2 || refused.load(std::memory_order_relaxed)) return false;
    BatchAttributes attributes;
    std::size_t first = 0;  // the attributes hold from copy 0 on
    for (std::size_t at = 0; at < bytes.size(); at += kMaxBatch) {
        const std::size_t count = std::min(kMaxBatch, bytes.size() - at);
        const Result result = d.copy_batch(targets.data() + at, sources.data() + at, bytes.data() + at, count,
                                           &attributes, &first, 1, stream);
        if (result == kNotSupported && at == 0) {
            refused.store(true, std::memory_order_relaxed);
            return false;
        }
        check(result, "copying to the device in a batch");
    }
    return true;
}

}  // namespace

namespace {

// What tells a bad address from a bad stream when a driver only says "invalid argument".
std::string copying(DevicePointer target, DevicePointer source, std::size_t bytes) {
    std::array<char, 96> text{};
    std::snprintf(text.data(), text.size(), "copying %zu bytes at %#llx to the device at %#llx", bytes,
                  static_cast<unsigned long long>(source), static_cast<unsigned long long>(target));
    return text.data();
}

}  // namespace

void copy_all(std::vector<DevicePointer>& targets, std::vector<DevicePointer>& sources, std::vector<std::size_t>& bytes,
              StreamHandle stream) {
    const Driver& d = *driver();
    if (copied_in_batches(d, targets, sources, bytes, stream)) return;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
        const Result result = d.copy_to_device(targets[i], reinterpret_cast<const void*>(sources[i]), bytes[i], stream);
        if (result != kSuccess) check(result, copying(targets[i], sources[i], bytes[i]).c_str());
    }
}

DevicePointer allocation_end(DevicePointer address) {
    DevicePointer base = 0;
    std::size_t bytes = 0;
    const bool known = driver()->address_range(&base, &bytes, address) == kSuccess;
    return known ? base + bytes : std::numeric_limits<DevicePointer>::max();
}

namespace {

// Throws what Device::open promises for machines and ordinals that cannot be used.
DeviceHandle find_device(int ordinal) {
    const Driver* d = driver();
    if (d == nullptr) {
        throw Error(ErrorKind::unavailable, "device cuda:" + std::to_string(ordinal) +
                                                " cannot be used: " + unavailable_reason() + "; use device=\"cpu\"");
    }
    int count = 0;
    check(d->device_get_count(&count), "counting devices");
    if (ordinal < 0 || ordinal >= count) {
        throw Error(ErrorKind::config, "device cuda:" + std::to_string(ordinal) + " does not exist: this machine has " +
                                           std::to_string(count) + " CUDA device(s)");
    }
    DeviceHandle handle = 0;
    check(d->device_get(&handle, ordinal), "opening the device");
    return handle;
}

}  // namespace

std::shared_ptr<Device> Device::open(int ordinal, unsigned copy_streams) {
    const DeviceHandle handle = find_device(ordinal);
    const Driver* d = driver();
    std::shared_ptr<Device> device(new Device);
    device->ordinal_ = ordinal;
    device->handle_ = handle;
    int read_only = 0;
    if (d->device_get_attribute(&read_only, kAttributeReadOnlyRegister, device->handle_) == kSuccess) {
        device->registers_read_only_ = read_only != 0;
    }
    check(d->primary_retain(&device->context_, device->handle_), "retaining the primary context");
    const Scope scope(*device);
    // Non-blocking: the legacy default stream must not order our copies behind the caller's kernels.
    for (unsigned i = 0; i < copy_streams; ++i) {
        device->streams_.push_back(nullptr);
        check(d->stream_create(&device->streams_.back(), kStreamNonBlocking), "creating a copy stream");
    }
    return device;
}

std::string pci_bus_id(int ordinal) {
    const DeviceHandle handle = find_device(ordinal);
    char text[32] = {};
    check(driver()->device_get_pci_bus_id(text, sizeof text, handle), "asking for the PCI bus id");
    return text;
}

Device::~Device() {
    if (context_ == nullptr) return;
    if (!streams_.empty()) {
        ignore(driver()->push_current(context_));
        for (StreamHandle stream : streams_) {
            if (stream != nullptr) ignore(driver()->stream_destroy(stream));
        }
        ContextHandle popped = nullptr;
        ignore(driver()->pop_current(&popped));
    }
    ignore(driver()->primary_release(handle_));
}

void Device::attach_thread() const { check(driver()->set_current(context_), "making the context current"); }

bool idle(StreamHandle stream) {
    const Result result = driver()->stream_query(stream);
    if (result == kNotReady) return false;
    check(result, "asking whether a stream has work left");
    return true;
}

bool Device::copying() const {
    return std::any_of(streams_.begin(), streams_.end(), [](StreamHandle stream) { return !idle(stream); });
}

Device::Scope::Scope(const Device& device) {
    ContextHandle current = nullptr;
    // Nearly always it is: one call that is cheap instead of two that are not.
    if (driver()->get_current(&current) == kSuccess && current == device.context_) return;
    check(driver()->push_current(device.context_), "making the context current");
    pushed_ = true;
}

Device::Scope::~Scope() {
    if (!pushed_) return;
    ContextHandle popped = nullptr;
    ignore(driver()->pop_current(&popped));
}

Event::Event(std::shared_ptr<Device> device, bool timing) : device_(std::move(device)) {
    const unsigned flags = kEventBlockingSync | (timing ? 0 : kEventDisableTiming);
    check(driver()->event_create(&handle_, flags), "creating an event");
}

Event::Event(Event&& other) noexcept
    : device_(std::move(other.device_)), handle_(std::exchange(other.handle_, nullptr)) {}

Event& Event::operator=(Event&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(handle_, other.handle_);
    return *this;
}

Event::~Event() {
    if (handle_ == nullptr) return;
    try {
        const Device::Scope scope(*device_);
        ignore(driver()->event_destroy(handle_));
    } catch (const Error&) {
        // The driver is shutting down and takes its events along.
    }
}

void Event::record(StreamHandle stream) { check(driver()->event_record(handle_, stream), "recording an event"); }

bool Event::complete() const {
    const Result result = driver()->event_query(handle_);
    if (result == kNotReady) return false;
    check(result, "asking whether copies are complete");
    return true;
}

void Event::synchronize() const { check(driver()->event_synchronize(handle_), "waiting for copies"); }

void Event::make_wait(StreamHandle stream) const {
    check(driver()->stream_wait_event(stream, handle_, 0), "making a stream wait for copies");
}

float Event::elapsed_ms(const Event& earlier) const {
    float milliseconds = std::numeric_limits<float>::quiet_NaN();
    if (driver()->event_elapsed == nullptr) return milliseconds;
    check(driver()->event_elapsed(&milliseconds, earlier.handle_, handle_), "asking for the time between events");
    return milliseconds;
}

Event EventPool::take() {
    {
        std::lock_guard lock(mutex_);
        if (!free_.empty()) {
            Event event = std::move(free_.back());
            free_.pop_back();
            return event;
        }
    }
    const Device::Scope scope(*device_);
    return Event(device_);
}

void EventPool::give_back(Event event) {
    std::lock_guard lock(mutex_);
    try {
        free_.push_back(std::move(event));
    } catch (const std::bad_alloc&) {
        // Destroyed instead of kept: destructors come here, too.
    }
}

HostRegistration::HostRegistration(std::shared_ptr<Device> device, void* data, std::size_t bytes, bool read_only)
    : device_(std::move(device)) {
    if (read_only && !device_->registers_read_only()) {
        throw Error(ErrorKind::unavailable, "this device or driver cannot register read-only memory");
    }
    const Device::Scope scope(*device_);
    const Result result = driver()->host_register(data, bytes, kRegisterPortable | (read_only ? kRegisterReadOnly : 0));
    if (read_only && (result == kInvalidValue || result == kNotPermitted || result == kNotSupported)) {
        throw Error(ErrorKind::unavailable,
                    "the driver refuses to register pages of a file: " + describe(*driver(), result));
    }
    check(result, "registering host memory");
    data_ = data;
}

HostRegistration::HostRegistration(HostRegistration&& other) noexcept
    : device_(std::move(other.device_)), data_(std::exchange(other.data_, nullptr)) {}

HostRegistration& HostRegistration::operator=(HostRegistration&& other) noexcept {
    if (this != &other) {
        reset();
        device_ = std::move(other.device_);
        data_ = std::exchange(other.data_, nullptr);
    }
    return *this;
}

void HostRegistration::reset() {
    if (data_ == nullptr) return;
    try {
        const Device::Scope scope(*device_);
        ignore(driver()->host_unregister(data_));
    } catch (const Error&) {
        // The driver is shutting down and lets go of the pages itself.
    }
    data_ = nullptr;
    device_.reset();
}

}  // namespace gdsstream::cuda
