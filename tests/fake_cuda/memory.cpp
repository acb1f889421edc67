// The driver's memory: host memory under two names. What is registered is known by its exact range, because copies from
// it, and its end while copies are queued, are what the engine has to get right.
#include <cstdlib>
#include <cstring>

#include "driver.hpp"

using namespace fake;

namespace {

constexpr std::size_t kDeviceBytes = std::size_t{80} << 30;
constexpr unsigned kRegisterReadOnly = 0x8;
constexpr unsigned kRegisterFlags = 0xf;

// One copy, whose host side is looked up as the driver does: from where it starts.
CUresult enqueue_copy(Call& call, Stream& stream, void* target, const void* source, std::size_t bytes,
                      const void* host_side, bool count_pageable) {
    if (target == nullptr || source == nullptr) return bytes == 0 ? kSuccess : kInvalidValue;
    if (bytes == 0) return kSuccess;
    const auto begin = reinterpret_cast<CUdeviceptr>(target);
    const auto allocation = call.driver.allocation_at(begin);
    if (allocation != call.driver.allocations.end() && begin + bytes > allocation->first + allocation->second) {
        return kInvalidValue;
    }
    const auto host = reinterpret_cast<std::uintptr_t>(host_side);
    std::shared_ptr<Registration> registration;
    if (const auto found = call.driver.registration_at(host); found != call.driver.registrations.end()) {
        registration = found->second;
        if (host + bytes > found->first + registration->bytes) return kInvalidValue;
        ++registration->queued_copies;
    } else if (count_pageable) {
        ++counters.pageable_async_copies;
    }
    const auto retire = [registration, bytes] {
        if (registration != nullptr) --registration->queued_copies;
        ++counters.copies;
        counters.copied_bytes += bytes;
    };
    const auto run = [target, source, bytes] { std::memcpy(target, source, bytes); };
    call.scheduler.enqueue(call.lock, stream, {Operation::Kind::copy, nullptr, run, retire});
    return kSuccess;
}

// On the default stream of the current context, as the legacy default stream does it.
CUresult copy_now(Call& call, void* target, const void* source, std::size_t bytes, const void* host_side) {
    const auto stream = call.stream(nullptr);
    if (call.refused != kSuccess) return call.refused;
    const CUresult result = enqueue_copy(call, *stream, target, source, bytes, host_side, false);
    return result != kSuccess ? result : call.wait_for(stream);
}

void* host_address(CUdeviceptr pointer) { return reinterpret_cast<void*>(pointer); }

}  // namespace

extern "C" {

CUresult cuMemAlloc_v2(CUdeviceptr* pointer, std::size_t bytes) {
    Call call("cuMemAlloc_v2", Needs::context);
    if (call.refused != kSuccess) return call.refused;
    if (pointer == nullptr || bytes == 0) return kInvalidValue;
    // The driver promises 256 bytes of alignment.
    void* const memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (memory == nullptr) return kOutOfMemory;
    *pointer = reinterpret_cast<CUdeviceptr>(memory);
    call.driver.allocations.emplace(*pointer, bytes);
    ++counters.device_allocations;
    counters.device_bytes += bytes;
    return kSuccess;
}

CUresult cuMemFree_v2(CUdeviceptr pointer) {
    Call call("cuMemFree_v2", Needs::context);
    if (call.refused != kSuccess) return call.refused;
    if (pointer == 0) return kSuccess;
    const auto found = call.driver.allocations.find(pointer);
    if (found == call.driver.allocations.end()) return kInvalidValue;
    const std::size_t bytes = found->second;
    call.driver.allocations.erase(found);
    --counters.device_allocations;
    counters.device_bytes -= bytes;
    // The driver waits here too: nothing that is queued loses its memory.
    if (!call.scheduler.wait_for_context(call.lock, call.context())) return kDeinitialized;
    std::free(host_address(pointer));
    return kSuccess;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, std::size_t* bytes, CUdeviceptr address) {
    Call call("cuMemGetAddressRange_v2", Needs::context);
    if (call.refused != kSuccess) return call.refused;
    const auto found = call.driver.allocation_at(address);
    if (found == call.driver.allocations.end()) return kNotFound;
    if (base != nullptr) *base = found->first;
    if (bytes != nullptr) *bytes = found->second;
    return kSuccess;
}

CUresult cuMemGetInfo_v2(std::size_t* free_bytes, std::size_t* total_bytes) {
    Call call("cuMemGetInfo_v2", Needs::context);
    if (call.refused != kSuccess) return call.refused;
    if (free_bytes == nullptr || total_bytes == nullptr) return kInvalidValue;
    *total_bytes = kDeviceBytes;
    *free_bytes = kDeviceBytes - std::min<std::size_t>(kDeviceBytes, counters.device_bytes);
    return kSuccess;
}

// As the driver answers for memory it does not know, which all memory is here.
CUresult cuPointerGetAttribute(void*, int, CUdeviceptr) {
    Call call("cuPointerGetAttribute", Needs::driver);
    return call.refused != kSuccess ? call.refused : kInvalidValue;
}

CUresult cuMemHostRegister_v2(void* pointer, std::size_t bytes, unsigned flags) {
    Call call("cuMemHostRegister_v2", Needs::context);
    if (call.refused != kSuccess) return call.refused;
    if (pointer == nullptr || bytes == 0 || (flags & ~kRegisterFlags) != 0) return kInvalidValue;
    const auto begin = reinterpret_cast<std::uintptr_t>(pointer);
    auto& known = call.driver.registrations;
    const auto next = known.lower_bound(begin);
    const bool overlaps =
        call.driver.registration_at(begin) != known.end() || (next != known.end() && next->first - begin < bytes);
    if (overlaps) return kAlreadyRegistered;
    if (!is_mapped(begin, bytes, (flags & kRegisterReadOnly) == 0)) return kInvalidValue;
    known.emplace(begin, std::make_shared<Registration>(Registration{bytes}));
    ++counters.registrations;
    counters.registered_bytes += bytes;
    return kSuccess;
}

CUresult cuMemHostUnregister(void* pointer) {
    Call call("cuMemHostUnregister", Needs::context);
    if (call.refused != kSuccess) return call.refused;
    if (pointer == nullptr) return kInvalidValue;
    const auto begin = reinterpret_cast<std::uintptr_t>(pointer);
    const auto found = call.driver.registration_at(begin);
    if (found == call.driver.registrations.end()) return kNotRegistered;
    if (found->first != begin) return kInvalidValue;
    if (found->second->queued_copies > 0) ++counters.unregister_in_use;
    if (!is_mapped(begin, found->second->bytes, false)) ++counters.unregister_unmapped;
    --counters.registrations;
    counters.registered_bytes -= found->second->bytes;
    call.driver.registrations.erase(found);
    return kSuccess;
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr target, const void* source, std::size_t bytes, CUstream handle) {
    Call call("cuMemcpyHtoDAsync_v2", Needs::context);
    const auto stream = call.stream(handle);
    if (call.refused != kSuccess) return call.refused;
    return enqueue_copy(call, *stream, host_address(target), source, bytes, source, true);
}

// Off unless FAKE_CUDA_BATCH=1: a driver that has the symbol and does not support it on this machine.
CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* targets, CUdeviceptr* sources, std::size_t* bytes, std::size_t count,
                               void* attributes, std::size_t* attribute_starts, std::size_t attribute_count,
                               CUstream handle) {
    const char* wanted = std::getenv("FAKE_CUDA_BATCH");
    if (wanted == nullptr || std::strcmp(wanted, "1") != 0) return kNotSupported;
    if (count == 0 || attributes == nullptr || attribute_count != 1 || *attribute_starts != 0) return kInvalidValue;
    Call call("cuMemcpyBatchAsync_v2", Needs::context);
    const auto stream = call.stream(handle);
    if (call.refused != kSuccess) return call.refused;
    for (std::size_t i = 0; i < count; ++i) {
        const void* source = host_address(sources[i]);
        const CUresult result = enqueue_copy(call, *stream, host_address(targets[i]), source, bytes[i], source, true);
        if (result != kSuccess) return result;
    }
    return kSuccess;
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr target, const void* source, std::size_t bytes) {
    Call call("cuMemcpyHtoD_v2", Needs::context);
    return copy_now(call, host_address(target), source, bytes, source);
}

CUresult cuMemcpyDtoHAsync_v2(void* target, CUdeviceptr source, std::size_t bytes, CUstream handle) {
    Call call("cuMemcpyDtoHAsync_v2", Needs::context);
    const auto stream = call.stream(handle);
    if (call.refused != kSuccess) return call.refused;
    return enqueue_copy(call, *stream, target, host_address(source), bytes, target, false);
}

CUresult cuMemcpyDtoH_v2(void* target, CUdeviceptr source, std::size_t bytes) {
    Call call("cuMemcpyDtoH_v2", Needs::context);
    return copy_now(call, target, host_address(source), bytes, target);
}

}  // extern "C"
