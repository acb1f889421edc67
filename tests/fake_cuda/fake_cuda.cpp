// A libcuda.so.1 without a GPU: device memory is host memory, streams are threads that run late, and every fence,
// cancel and quarantine of the engine can be watched and broken. fake_cuda.h says how to build and steer it. Here are
// the devices, contexts, streams and events; memory.cpp has memory and copies.
#include "fake_cuda.h"

#include <cstring>

#include "driver.hpp"
#include "driver_api.h"

using namespace fake;

namespace {

constexpr int kVersion = 13000;

struct ErrorText {
    int code;
    const char* name;
    const char* text;
};
constexpr ErrorText kErrors[] = {
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kDeinitialized, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {kNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {kContextIsDestroyed, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {kAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {kNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {kNotPermitted, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

CUresult describe(CUresult error, const char** out, const char* ErrorText::* field) {
    if (out == nullptr) return kInvalidValue;
    *out = nullptr;
    for (const ErrorText& known : kErrors) {
        if (known.code == error) *out = known.*field;
    }
    return *out != nullptr ? kSuccess : kInvalidValue;
}

CUresult print(char* out, int length, const char* format, int number) {
    char text[64];
    const int needed = std::snprintf(text, sizeof text, format, number) + 1;
    if (out == nullptr || length < needed) return kInvalidValue;
    std::memcpy(out, text, static_cast<std::size_t>(needed));
    return kSuccess;
}

CUresult create_stream(Call& call, CUstream* out, unsigned flags) {
    if (call.refused != kSuccess) return call.refused;
    if (out == nullptr || flags > 1) return kInvalidValue;
    auto stream = call.scheduler.start_stream(call.lock, call.context());
    if (stream == nullptr) return kOutOfMemory;
    const std::uintptr_t handle = call.driver.new_handle();
    call.driver.streams.emplace(handle, std::move(stream));
    ++counters.streams;
    *out = reinterpret_cast<CUstream>(handle);
    return kSuccess;
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned flags) {
    Call call("cuInit", Needs::nothing);
    if (call.refused != kSuccess) return call.refused;
    if (flags != 0) return kInvalidValue;
    if (call.driver.devices == 0) return kNoDevice;
    if (call.driver.initialized_in == 0) {
        call.driver.initialized_in = ::getpid();
        std::atexit([] {
            if (!Driver::instance().forked()) Scheduler::instance().shut_down();
        });
    }
    return kSuccess;
}

CUresult cuDriverGetVersion(int* version) {
    if (version == nullptr) return kInvalidValue;
    *version = kVersion;
    return kSuccess;
}

CUresult cuGetErrorName(CUresult error, const char** name) { return describe(error, name, &ErrorText::name); }

CUresult cuGetErrorString(CUresult error, const char** text) { return describe(error, text, &ErrorText::text); }

CUresult cuDeviceGetCount(int* count) {
    Call call("cuDeviceGetCount", Needs::driver);
    if (call.refused != kSuccess) return call.refused;
    if (count == nullptr) return kInvalidValue;
    *count = call.driver.devices;
    return kSuccess;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    Call call("cuDeviceGet", Needs::driver);
    if (call.refused != kSuccess) return call.refused;
    if (device == nullptr) return kInvalidValue;
    if (ordinal < 0 || ordinal >= call.driver.devices) return kInvalidDevice;
    *device = ordinal;
    return kSuccess;
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
    Call call("cuDeviceGetName", Needs::driver);
    if (call.refused != kSuccess) return call.refused;
    if (device < 0 || device >= call.driver.devices) return kInvalidDevice;
    return print(name, length, "Fake GPU %d", device);
}

CUresult cuDeviceGetAttribute(int* value, int attribute, CUdevice device) {
    constexpr int kHostRegister = 99;
    constexpr int kReadOnlyHostRegister = 113;
    Call call("cuDeviceGetAttribute", Needs::driver);
    if (call.refused != kSuccess) return call.refused;
    if (value == nullptr) return kInvalidValue;
    if (device < 0 || device >= call.driver.devices) return kInvalidDevice;
    *value = attribute == kHostRegister || attribute == kReadOnlyHostRegister ? 1 : 0;
    return kSuccess;
}

CUresult cuDeviceGetPCIBusId(char* id, int length, CUdevice device) {
    Call call("cuDeviceGetPCIBusId", Needs::driver);
    if (call.refused != kSuccess) return call.refused;
    if (device < 0 || device >= call.driver.devices) return kInvalidDevice;
    // A domain that no machine has: sysfs must not answer for a device that happens to have the number.
    return print(id, length, "FA4E:%02X:00.0", device + 1);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    Call call("cuDevicePrimaryCtxRetain", Needs::driver);
    if (call.refused != kSuccess) return call.refused;
    if (context == nullptr) return kInvalidValue;
    if (device < 0 || device >= call.driver.devices) return kInvalidDevice;
    ++call.driver.contexts[device].references;
    ++counters.primary_contexts;
    *context = reinterpret_cast<CUcontext>(&call.driver.contexts[device]);
    return kSuccess;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    Call call("cuDevicePrimaryCtxRelease_v2", Needs::driver);
    if (call.refused != kSuccess) return call.refused;
    if (device < 0 || device >= call.driver.devices) return kInvalidDevice;
    if (call.driver.contexts[device].references == 0) return kInvalidContext;
    --call.driver.contexts[device].references;
    --counters.primary_contexts;
    return kSuccess;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    Call call("cuCtxPushCurrent_v2", Needs::driver);
    if (call.refused != kSuccess) return call.refused;
    if (context == nullptr) return kInvalidValue;
    auto* const pushed = reinterpret_cast<Context*>(context);
    if (!call.driver.owns(pushed)) return kInvalidContext;
    ThreadContexts& thread = current_thread;
    if (thread.depth == static_cast<int>(std::size(thread.stack))) return kInvalidValue;
    thread.stack[thread.depth++] = pushed;
    return kSuccess;
}

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
    Call call("cuCtxPopCurrent_v2", Needs::driver);
    if (call.refused != kSuccess) return call.refused;
    if (call.context() == nullptr) return kInvalidContext;
    if (context != nullptr) *context = reinterpret_cast<CUcontext>(call.context());
    --current_thread.depth;
    return kSuccess;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    Call call("cuCtxSetCurrent", Needs::driver);
    if (call.refused != kSuccess) return call.refused;
    auto* const wanted = reinterpret_cast<Context*>(context);
    if (wanted != nullptr && !call.driver.owns(wanted)) return kInvalidContext;
    ThreadContexts& thread = current_thread;
    if (thread.depth > 0) --thread.depth;
    if (wanted != nullptr) thread.stack[thread.depth++] = wanted;
    return kSuccess;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
    Call call("cuCtxGetCurrent", Needs::driver);
    if (call.refused != kSuccess) return call.refused;
    if (context == nullptr) return kInvalidValue;
    *context = reinterpret_cast<CUcontext>(call.context());
    return kSuccess;
}

CUresult cuCtxSynchronize() {
    Call call("cuCtxSynchronize", Needs::context);
    if (call.refused != kSuccess) return call.refused;
    return call.scheduler.wait_for_context(call.lock, call.context()) ? kSuccess : kDeinitialized;
}

CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
    Call call("cuStreamCreate", Needs::context);
    return create_stream(call, stream, flags);
}

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int) {
    Call call("cuStreamCreateWithPriority", Needs::context);
    return create_stream(call, stream, flags);
}

CUresult cuStreamDestroy_v2(CUstream handle) {
    Call call("cuStreamDestroy_v2", Needs::context);
    if (reinterpret_cast<std::uintptr_t>(handle) <= 2) return call.refused != kSuccess ? call.refused : kInvalidHandle;
    const auto stream = call.stream(handle);
    if (call.refused != kSuccess) return call.refused;
    call.scheduler.destroy_stream(call.lock, *stream);
    call.driver.streams.erase(reinterpret_cast<std::uintptr_t>(handle));
    --counters.streams;
    return kSuccess;
}

CUresult cuStreamSynchronize(CUstream handle) {
    Call call("cuStreamSynchronize", Needs::context);
    const auto stream = call.stream(handle);
    return call.refused != kSuccess ? call.refused : call.wait_for(stream);
}

CUresult cuStreamQuery(CUstream handle) {
    Call call("cuStreamQuery", Needs::context);
    const auto stream = call.stream(handle);
    if (call.refused != kSuccess) return call.refused;
    return stream->completed == stream->submitted ? kSuccess : kNotReady;
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned flags) {
    Call call("cuStreamWaitEvent", Needs::context);
    const auto stream = call.stream(handle);
    const Event* const event = call.event(event_handle);
    if (call.refused != kSuccess) return call.refused;
    if (flags > 1) return kInvalidValue;
    if (event->latest == nullptr) return kSuccess;
    call.scheduler.enqueue(call.lock, *stream, {Operation::Kind::wait, event->latest, nullptr, nullptr});
    return kSuccess;
}

CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void* user_data) {
    Call call("cuLaunchHostFunc", Needs::context);
    const auto stream = call.stream(handle);
    if (call.refused != kSuccess) return call.refused;
    if (function == nullptr) return kInvalidValue;
    const auto run = [function, user_data] {
        current_thread.in_host_function = true;
        function(user_data);
        current_thread.in_host_function = false;
    };
    const auto retire = [] { ++counters.host_functions; };
    call.scheduler.enqueue(call.lock, *stream, {Operation::Kind::host_function, nullptr, run, retire});
    return kSuccess;
}

CUresult cuEventCreate(CUevent* event, unsigned flags) {
    Call call("cuEventCreate", Needs::context);
    if (call.refused != kSuccess) return call.refused;
    if (event == nullptr || flags > 7) return kInvalidValue;
    const std::uintptr_t handle = call.driver.new_handle();
    call.driver.events.emplace(handle, Event{call.context(), nullptr});
    ++counters.events;
    *event = reinterpret_cast<CUevent>(handle);
    return kSuccess;
}

CUresult cuEventDestroy_v2(CUevent handle) {
    Call call("cuEventDestroy_v2", Needs::context);
    call.event(handle);
    if (call.refused != kSuccess) return call.refused;
    call.driver.events.erase(reinterpret_cast<std::uintptr_t>(handle));
    --counters.events;
    return kSuccess;
}

CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
    Call call("cuEventRecord", Needs::context);
    const auto stream = call.stream(stream_handle);
    Event* const event = call.event(handle);
    if (call.refused != kSuccess) return call.refused;
    if (event->context != stream->context) return kInvalidHandle;
    event->latest = std::make_shared<Marker>();
    call.scheduler.enqueue(call.lock, *stream, {Operation::Kind::record, event->latest, nullptr, nullptr});
    return kSuccess;
}

CUresult cuEventQuery(CUevent handle) {
    Call call("cuEventQuery", Needs::context);
    const Event* const event = call.event(handle);
    if (call.refused != kSuccess) return call.refused;
    return event->latest == nullptr || event->latest->done ? kSuccess : kNotReady;
}

CUresult cuEventSynchronize(CUevent handle) {
    Call call("cuEventSynchronize", Needs::context);
    const Event* const event = call.event(handle);
    if (call.refused != kSuccess) return call.refused;
    // The event may be recorded again or destroyed meanwhile.
    const auto marker = event->latest;
    return call.wait([&] { return marker == nullptr || marker->done; });
}

}  // extern "C"
