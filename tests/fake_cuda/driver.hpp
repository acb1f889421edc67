// The state behind the driver's functions: contexts, handles, registered memory, and the rules that every call obeys
// before it does anything (initialised, not forked, not failing on purpose, a context where one is needed).
#pragma once

#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string_view>

#include "driver_api.h"
#include "streams.hpp"

namespace fake __attribute__((visibility("hidden"))) {

    enum Result : int {
        kSuccess = 0,
        kInvalidValue = 1,
        kOutOfMemory = 2,
        kNotInitialized = 3,
        kDeinitialized = 4,
        kNoDevice = 100,
        kInvalidDevice = 101,
        kInvalidContext = 201,
        kInvalidHandle = 400,
        kNotFound = 500,
        kNotReady = 600,
        kNotSupported = 801,
        kContextIsDestroyed = 709,
        kAlreadyRegistered = 712,
        kNotRegistered = 713,
        kNotPermitted = 800,
    };

    inline constexpr std::string_view kSymbols[] = {
        "cuInit",
        "cuDeviceGetCount",
        "cuDeviceGet",
        "cuDeviceGetName",
        "cuDeviceGetAttribute",
        "cuDeviceGetPCIBusId",
        "cuDevicePrimaryCtxRetain",
        "cuDevicePrimaryCtxRelease_v2",
        "cuCtxSetCurrent",
        "cuCtxGetCurrent",
        "cuCtxPushCurrent_v2",
        "cuCtxPopCurrent_v2",
        "cuCtxSynchronize",
        "cuStreamCreate",
        "cuStreamCreateWithPriority",
        "cuStreamDestroy_v2",
        "cuStreamSynchronize",
        "cuStreamQuery",
        "cuStreamWaitEvent",
        "cuLaunchHostFunc",
        "cuEventCreate",
        "cuEventDestroy_v2",
        "cuEventRecord",
        "cuEventQuery",
        "cuEventSynchronize",
        "cuMemAlloc_v2",
        "cuMemFree_v2",
        "cuMemGetAddressRange_v2",
        "cuMemGetInfo_v2",
        "cuPointerGetAttribute",
        "cuMemHostRegister_v2",
        "cuMemHostUnregister",
        "cuMemcpyBatchAsync_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuMemcpyHtoD_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyDtoH_v2",
    };
    inline constexpr int kSymbolCount = std::size(kSymbols);
    inline std::array<std::atomic<unsigned long>, kSymbolCount> calls_of{};

    constexpr int find_symbol(std::string_view name) {
        for (int i = 0; i < kSymbolCount; ++i) {
            if (kSymbols[i] == name) return i;
        }
        return -1;
    }

    // A function that is missing in the list, and so could not be made to fail, does not compile.
    struct Symbol {
        int index;
        consteval Symbol(const char* name) : index(find_symbol(name)) {
            if (index < 0) throw "not in kSymbols";
        }
    };

    struct Fault {
        int symbol;
        int result;
        int after;
        int times;  // negative: for ever
    };

    struct Context {
        int references = 0;
        std::shared_ptr<Stream> default_stream;
    };

    struct Event {
        Context* context;
        std::shared_ptr<Marker> latest;  // nullptr: never recorded
    };

    struct Registration {
        std::size_t bytes;
        unsigned queued_copies = 0;
    };

    // How far streams had been filled at some time.
    using Place = std::vector<std::pair<std::shared_ptr<Stream>, unsigned long>>;

    inline constexpr int kMaxDevices = 16;

    // Never destroyed, like the scheduler, whose lock guards it.
    struct Driver {
        const int devices = static_cast<int>(std::min(environment("FAKE_CUDA_DEVICES", 2), 0UL + kMaxDevices));
        std::atomic<pid_t> initialized_in{0};
        Context contexts[kMaxDevices];
        // Handles are numbers that are never used again, so that a stale one is always noticed.
        std::uintptr_t next_handle = 0x10000;
        std::map<std::uintptr_t, std::shared_ptr<Stream>> streams;
        std::map<std::uintptr_t, Event> events;
        std::map<std::uintptr_t, std::shared_ptr<Registration>> registrations;
        std::map<CUdeviceptr, std::size_t> allocations;
        std::vector<Fault> faults;
        std::map<unsigned long, Place> places;
        unsigned long last_place = 0;

        static Driver& instance() {
            static Driver* const driver = new Driver;
            return *driver;
        }

        std::uintptr_t new_handle() { return next_handle += 16; }

        // In a child of the process that initialised, as the real driver: its threads are gone, and its locks as they
        // were.
        bool forked() const {
            const pid_t pid = initialized_in;
            return pid != 0 && pid != ::getpid();
        }

        bool owns(const Context* context) const { return context >= contexts && context < contexts + devices; }

        // The range that holds `address`, or the end.
        auto registration_at(std::uintptr_t address) {
            auto next = registrations.upper_bound(address);
            if (next == registrations.begin()) return registrations.end();
            --next;
            return address - next->first < next->second->bytes ? next : registrations.end();
        }

        // The allocation that holds `address`, or the end.
        auto allocation_at(CUdeviceptr address) {
            auto next = allocations.upper_bound(address);
            if (next == allocations.begin()) return allocations.end();
            --next;
            return address - next->first < next->second ? next : allocations.end();
        }

        int injected_fault(int symbol) {
            for (auto fault = faults.begin(); fault != faults.end(); ++fault) {
                if (fault->symbol != symbol) continue;
                if (fault->after > 0) {
                    --fault->after;
                    return kSuccess;
                }
                const int result = fault->result;
                if (fault->times > 0 && --fault->times == 0) faults.erase(fault);
                return result;
            }
            return kSuccess;
        }
    };

    // Trivially destructible: static destructors of the main thread may still call in.
    struct ThreadContexts {
        Context* stack[64];
        int depth;
        bool in_host_function;
    };
    inline thread_local ThreadContexts current_thread{};

    enum class Needs { nothing, driver, context };

    // One call of a driver function. It holds the lock until it returns, `refused` says why it must return at once.
    class Call {
      public:
        Call(Symbol symbol, Needs needs) {
            ++calls_of[symbol.index];
            refused = check(symbol.index, needs);
        }

        int refused;
        Driver& driver = Driver::instance();
        Scheduler& scheduler = Scheduler::instance();
        Lock lock;

        Context* context() const {
            return current_thread.depth > 0 ? current_thread.stack[current_thread.depth - 1] : nullptr;
        }

        // 0, 1 (legacy) and 2 (per thread) are the default stream of the current context.
        std::shared_ptr<Stream> stream(CUstream handle) {
            if (refused != kSuccess) return nullptr;
            const auto number = reinterpret_cast<std::uintptr_t>(handle);
            if (number <= 2) {
                auto& stream = context()->default_stream;
                if (stream == nullptr) stream = scheduler.start_stream(lock, context());
                if (stream == nullptr) refused = kOutOfMemory;
                return stream;
            }
            const auto found = driver.streams.find(number);
            if (found == driver.streams.end()) return invalid_handle();
            if (found->second->context->references == 0) refused = kContextIsDestroyed;
            return found->second;
        }

        Event* event(CUevent handle) {
            if (refused != kSuccess) return nullptr;
            const auto found = driver.events.find(reinterpret_cast<std::uintptr_t>(handle));
            if (found == driver.events.end()) return invalid_handle();
            if (found->second.context->references == 0) refused = kContextIsDestroyed;
            return &found->second;
        }

        template <typename Predicate>
        int wait(Predicate predicate) {
            return scheduler.wait(lock, predicate) ? kSuccess : kDeinitialized;
        }

        int wait_for(const std::shared_ptr<Stream>& stream) {
            return wait([&stream, target = stream->submitted] { return stream->completed >= target; });
        }

      private:
        int check(int symbol, Needs needs) {
            if (driver.forked()) return kNotInitialized;
            if (current_thread.in_host_function) return kNotPermitted;
            lock = Lock(scheduler.mutex);
            if (scheduler.exiting(lock)) return kDeinitialized;
            if (const int fault = driver.injected_fault(symbol)) return fault;
            if (needs != Needs::nothing && driver.initialized_in == 0) return kNotInitialized;
            if (needs != Needs::context) return kSuccess;
            if (context() == nullptr) return kInvalidContext;
            return context()->references > 0 ? kSuccess : kContextIsDestroyed;
        }

        std::nullptr_t invalid_handle() {
            ++counters.invalid_handles;
            refused = kInvalidHandle;
            return nullptr;
        }
    };

    // Whether every byte of the range is mapped, and may be written where that is asked for.
    inline bool is_mapped(std::uintptr_t begin, std::size_t bytes, bool writable) {
        std::FILE* maps = std::fopen("/proc/self/maps", "re");
        if (maps == nullptr) return true;
        std::uintptr_t reached = begin;
        char line[512];
        while (reached < begin + bytes && std::fgets(line, sizeof line, maps) != nullptr) {
            unsigned long from = 0, to = 0;
            char read = '-', write = '-';
            // The tail of a line longer than the buffer does not scan.
            if (std::sscanf(line, "%lx-%lx %c%c", &from, &to, &read, &write) != 4 || to <= reached) continue;
            if (from > reached || read != 'r' || (writable && write != 'w')) break;
            reached = to;
        }
        std::fclose(maps);
        return reached >= begin + bytes;
    }

}  // namespace fake
