// Checks what the fake promises, since tests of the engine are worth no more than that. Linked with the fake's sources:
//   g++ -std=c++20 -O1 -g -pthread [-fsanitize=thread] selftest.cpp fake_cuda.cpp memory.cpp control.cpp -o selftest
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "driver_api.h"
#include "fake_cuda.h"

namespace {

int failures = 0;

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            ++failures;                                                          \
        }                                                                        \
    } while (false)

constexpr std::size_t kBytes = 1 << 16;

CUdeviceptr device(void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

unsigned long count(const char* name) { return fake_cuda_counter(name); }

int exit_status(pid_t child) {
    int status = 0;
    ::waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

struct Pinned {
    unsigned char* data = static_cast<unsigned char*>(
        ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    Pinned() { CHECK(cuMemHostRegister_v2(data, kBytes, 1) == 0); }
    ~Pinned() {
        CHECK(cuMemHostUnregister(data) == 0);
        ::munmap(data, kBytes);
    }
};

struct Queue {
    CUstream stream = nullptr;
    CUevent event = nullptr;
    Queue() {
        CHECK(cuStreamCreate(&stream, 1) == 0);
        CHECK(cuEventCreate(&event, 3) == 0);
    }
    ~Queue() {
        CHECK(cuEventDestroy_v2(event) == 0);
        CHECK(cuStreamDestroy_v2(stream) == 0);
    }
};

// In a process of its own: exits with work queued in a paused stream, and with a host function that never returns.
void exits_promptly(bool paused) {
    const pid_t child = ::fork();
    if (child == 0) {
        ::alarm(20);
        CUcontext context = nullptr;
        CHECK(cuInit(0) == 0 && cuDevicePrimaryCtxRetain(&context, 0) == 0 && cuCtxSetCurrent(context) == 0);
        static unsigned char from[64], to[64];
        if (paused) fake_cuda_pause(1);
        CUstream stream = nullptr;
        CHECK(cuStreamCreate(&stream, 1) == 0);
        if (!paused) CHECK(cuLaunchHostFunc(stream, [](void*) { ::sleep(1000); }, nullptr) == 0);
        CHECK(cuMemcpyHtoDAsync_v2(device(to), from, sizeof from, stream) == 0);
        std::thread([context, stream] {
            cuCtxSetCurrent(context);
            cuStreamSynchronize(stream);
        }).detach();
        std::exit(failures);
    }
    CHECK(exit_status(child) == 0);
}

void before_init_and_without_context(CUcontext* context) {
    int value = 0;
    CUstream stream = nullptr;
    CHECK(cuDeviceGetCount(&value) == 3 && cuStreamQuery(nullptr) == 3);
    CHECK(cuInit(1) == 1);
    CHECK(fake_cuda_fail("cuInit", 999, 0, 1) == 0 && cuInit(0) == 999);
    CHECK(cuInit(0) == 0 && cuInit(0) == 0);
    CHECK(cuDeviceGetCount(&value) == 0 && value == 2);
    CHECK(cuDeviceGetAttribute(&value, 113, 0) == 0 && value == 1);
    char text[32];
    CHECK(cuDeviceGetPCIBusId(text, sizeof text, 0) == 0 && std::strcmp(text, "FA4E:01:00.0") == 0);
    CHECK(cuDeviceGetPCIBusId(text, 4, 0) == 1 && cuDeviceGet(&value, 2) == 101);
    const char* name = nullptr;
    CHECK(cuGetErrorName(201, &name) == 0 && std::strcmp(name, "CUDA_ERROR_INVALID_CONTEXT") == 0);
    CHECK(cuGetErrorString(-5, &name) == 1 && name == nullptr);

    CHECK(cuStreamCreate(&stream, 1) == 201 && cuStreamQuery(nullptr) == 201 && cuCtxPopCurrent_v2(context) == 201);
    CHECK(cuMemHostRegister_v2(text, sizeof text, 1) == 201);
    CHECK(cuDevicePrimaryCtxRelease_v2(0) == 201);
    CHECK(cuDevicePrimaryCtxRetain(context, 0) == 0 && count("primary_contexts") == 1);
    CHECK(cuCtxPushCurrent_v2(*context) == 0);
    int elsewhere = 0;
    std::thread([&] { elsewhere = cuStreamQuery(nullptr); }).join();
    CHECK(elsewhere == 201);
}

// Every other copy reads what the one before it wrote.
void keeps_order() {
    Pinned pinned;
    Queue queue;
    std::vector<unsigned char> target(256);
    for (int i = 0; i < 256; ++i) pinned.data[i] = static_cast<unsigned char>(i);
    for (int i = 0; i < 256; ++i) {
        CHECK(cuMemcpyHtoDAsync_v2(device(target.data()), pinned.data + i, 1, queue.stream) == 0);
        CHECK(cuMemcpyHtoDAsync_v2(device(&target[i == 0 ? 1 : i]), target.data(), 1, queue.stream) == 0);
    }
    CHECK(cuEventRecord(queue.event, queue.stream) == 0);
    CHECK(cuEventSynchronize(queue.event) == 0 && cuStreamQuery(queue.stream) == 0);
    for (int i = 1; i < 256; ++i) CHECK(target[i] == i);
    CHECK(target[0] == 255);
}

// The source is read when the copy runs: what is written to it too early arrives.
void reads_late() {
    Pinned pinned;
    Queue queue;
    unsigned char target = 0;
    pinned.data[0] = 1;
    CHECK(cuEventQuery(queue.event) == 0);
    fake_cuda_pause(1);
    CHECK(cuMemcpyHtoDAsync_v2(device(&target), pinned.data, 1, queue.stream) == 0);
    CHECK(cuEventRecord(queue.event, queue.stream) == 0);
    ::usleep(5000);  // longer than the delays: only the pause can hold the copy back
    CHECK(cuEventQuery(queue.event) == 600 && cuStreamQuery(queue.stream) == 600);
    CHECK(fake_cuda_drain() == -1 && count("in_flight_copies") == 1);
    pinned.data[0] = 2;
    fake_cuda_resume();
    CHECK(fake_cuda_drain() == 0 && cuEventQuery(queue.event) == 0 && count("in_flight_operations") == 0);
    CHECK(target == 2);
}

struct Gate {
    int opened[2];
    Gate() { CHECK(::pipe(opened) == 0); }
    static void wait(void* gate) {
        char byte;
        CHECK(::read(static_cast<Gate*>(gate)->opened[0], &byte, 1) == 1);
    }
    void open() { CHECK(::write(opened[1], "", 1) == 1); }
    ~Gate() {
        ::close(opened[0]);
        ::close(opened[1]);
    }
};

// A waiting stream waits for the latest record at the time of the call, also when the event goes on to other things.
void waits_for_the_latest_record() {
    Pinned pinned;
    Gate first, second;
    unsigned char target[2] = {};
    std::memset(pinned.data, 7, 2);
    CUstream copies = nullptr, consumer = nullptr;
    CUevent event = nullptr;
    CHECK(cuStreamCreate(&copies, 1) == 0 && cuStreamCreateWithPriority(&consumer, 1, -1) == 0);
    CHECK(cuEventCreate(&event, 3) == 0);
    CHECK(cuStreamWaitEvent(consumer, event, 0) == 0 && cuStreamSynchronize(consumer) == 0);
    CHECK(cuLaunchHostFunc(copies, Gate::wait, &first) == 0);
    CHECK(cuMemcpyHtoDAsync_v2(device(target), pinned.data, 1, copies) == 0);
    CHECK(cuEventRecord(event, copies) == 0 && cuStreamWaitEvent(consumer, event, 0) == 0);
    CHECK(cuMemcpyDtoHAsync_v2(target + 1, device(target), 1, consumer) == 0);
    CHECK(cuLaunchHostFunc(copies, Gate::wait, &second) == 0 && cuEventRecord(event, copies) == 0);
    ::usleep(5000);
    CHECK(cuStreamQuery(consumer) == 600);
    first.open();
    CHECK(cuStreamSynchronize(consumer) == 0 && target[1] == 7);
    CHECK(cuEventQuery(event) == 600);
    // Both may go while the second record is pending.
    CHECK(cuEventDestroy_v2(event) == 0 && cuStreamDestroy_v2(copies) == 0 && cuStreamDestroy_v2(consumer) == 0);
    CHECK(count("streams") == 0 && count("events") == 0);
    CHECK(cuStreamQuery(copies) == 400 && cuEventQuery(event) == 400 && count("invalid_handles") == 2);
    second.open();
    CHECK(cuCtxSynchronize() == 0);
}

void tracks_registrations() {
    Queue queue;
    unsigned char target[kBytes];
    auto* const memory = static_cast<unsigned char*>(
        ::mmap(nullptr, 2 * kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    CHECK(cuMemHostRegister_v2(nullptr, 1, 1) == 1 && cuMemHostRegister_v2(memory, 0, 1) == 1);
    CHECK(cuMemHostRegister_v2(memory, kBytes, 1) == 0 && cuMemHostRegister_v2(memory, kBytes, 1) == 712);
    CHECK(cuMemHostRegister_v2(memory + kBytes - 1, 4096, 1) == 712);
    CHECK(cuMemHostRegister_v2(memory + kBytes, kBytes, 1) == 0);
    CHECK(count("registrations") == 2 && count("registered_bytes") == 2 * kBytes);
    CHECK(cuMemHostUnregister(memory + 1) == 1 && cuMemHostUnregister(target) == 713);
    CHECK(cuMemcpyHtoDAsync_v2(device(target), memory + kBytes - 1, 2, queue.stream) == 1);
    CHECK(count("pageable_async_copies") == 256);
    CHECK(cuMemcpyHtoDAsync_v2(device(target), target + 8, 8, queue.stream) == 0);
    CHECK(count("pageable_async_copies") == 257);
    CHECK(cuMemHostUnregister(memory + kBytes) == 0 && count("unregister_in_use") == 0);
    fake_cuda_pause(1);
    CHECK(cuMemcpyHtoDAsync_v2(device(target), memory, kBytes, queue.stream) == 0);
    CHECK(cuMemHostUnregister(memory) == 0 && count("unregister_in_use") == 1);
    fake_cuda_pause(0);
    CHECK(cuStreamSynchronize(queue.stream) == 0 && count("registered_bytes") == 0);
    CHECK(::mprotect(memory, kBytes, PROT_READ) == 0);
    CHECK(cuMemHostRegister_v2(memory, kBytes, 1) == 1 && cuMemHostRegister_v2(memory, kBytes, 9) == 0);
    CHECK(cuMemHostUnregister(memory) == 0);
    ::munmap(memory, 2 * kBytes);
    CHECK(cuMemHostRegister_v2(memory, kBytes, 1) == 1);
}

void fails_on_purpose() {
    Pinned pinned;
    unsigned char target = 0;
    pinned.data[0] = 9;
    const unsigned long before = count("cuMemcpyHtoDAsync_v2"), copied = count("copies");
    CHECK(fake_cuda_fail("cuMemcpyHtoDAsync", 700, 0, 1) == -1);
    CHECK(fake_cuda_fail("cuMemcpyHtoDAsync_v2", 700, 2, 2) == 0);
    const int expected[] = {0, 0, 700, 700, 0};
    for (const int result : expected) CHECK(cuMemcpyHtoDAsync_v2(device(&target), pinned.data, 1, nullptr) == result);
    CHECK(cuCtxSynchronize() == 0 && count("copies") == copied + 3 && count("cuMemcpyHtoDAsync_v2") == before + 5);
    CHECK(fake_cuda_fail("cuStreamQuery", 2, 0, -1) == 0);
    CHECK(cuStreamQuery(nullptr) == 2 && cuStreamQuery(nullptr) == 2);
    fake_cuda_clear_faults();
    CHECK(cuStreamQuery(nullptr) == 0);
}

void default_streams_and_devices(CUcontext context) {
    CUcontext other = nullptr, popped = nullptr;
    CUdeviceptr memory = 0;
    unsigned char value = 5, back = 0;
    Queue queue;
    CHECK(cuDevicePrimaryCtxRetain(&other, 1) == 0 && other != context && cuCtxPushCurrent_v2(other) == 0);
    CHECK(cuEventRecord(queue.event, nullptr) == 400 && cuEventRecord(queue.event, queue.stream) == 0);
    CHECK(cuMemAlloc_v2(&memory, 100) == 0 && memory % 256 == 0 && count("device_bytes") == 100);
    CHECK(cuMemcpyHtoD_v2(memory, &value, 1) == 0 && cuMemcpyDtoH_v2(&back, memory, 1) == 0 && back == 5);
    CHECK(cuStreamQuery(reinterpret_cast<CUstream>(1)) == 0 && cuStreamSynchronize(reinterpret_cast<CUstream>(2)) == 0);
    CHECK(cuMemFree_v2(memory) == 0 && cuMemFree_v2(memory) == 1 && count("device_allocations") == 0);
    CHECK(cuDevicePrimaryCtxRelease_v2(1) == 0 && cuStreamQuery(nullptr) == 709);
    CHECK(cuCtxPopCurrent_v2(&popped) == 0 && popped == other && cuStreamQuery(nullptr) == 0);
    int inside = 0;
    CHECK(cuLaunchHostFunc(nullptr, [](void* out) { *static_cast<int*>(out) = cuStreamQuery(nullptr); }, &inside) == 0);
    CHECK(cuStreamSynchronize(nullptr) == 0 && inside == 800);
}

void refuses_a_forked_child() {
    const pid_t child = ::fork();
    if (child == 0) {
        CUcontext context = nullptr;
        int devices = 0;
        ::_exit(cuInit(0) == 3 && cuDeviceGetCount(&devices) == 3 && cuCtxGetCurrent(&context) == 3 &&
                        cuStreamQuery(nullptr) == 3 && fake_cuda_drain() == -1
                    ? 0
                    : 1);
    }
    CHECK(exit_status(child) == 0);
}

}  // namespace

int main() {
    ::alarm(120);
    exits_promptly(true);
    exits_promptly(false);
    CUcontext context = nullptr;
    before_init_and_without_context(&context);
    keeps_order();
    reads_late();
    waits_for_the_latest_record();
    tracks_registrations();
    fails_on_purpose();
    default_streams_and_devices(context);
    refuses_a_forked_child();
    fake_cuda_stats_t stats = {};
    CHECK(fake_cuda_stats(&stats) == 0 && stats.streams == 0 && stats.events == 0 && stats.registrations == 0);
    CHECK(stats.in_flight_copies == 0 && stats.primary_contexts == 1 && stats.copied_bytes > kBytes);
    std::puts(failures == 0 ? "ok" : "FAILED");
    return failures == 0 ? 0 : 1;
}
