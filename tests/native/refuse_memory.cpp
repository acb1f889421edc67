// An operator new to be loaded before all others (LD_PRELOAD): it refuses memory to the engine's reader threads, once
// or for good, at the allocation that a test names. The stand-in driver works in the same threads, and gets what it
// asks for: a real one would not throw, either.
#include <dlfcn.h>
#include <execinfo.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

std::atomic<bool> armed{false};
std::atomic<long> left{0};  // allocations to grant before
std::atomic<bool> for_good{false};
std::atomic<unsigned long> refused{0};

bool in_reader_thread() {
    char name[16] = {};
    return ::pthread_getname_np(::pthread_self(), name, sizeof name) == 0 && std::strcmp(name, "gdsstream") == 0;
}

bool within(const void* frame, const char* library) {
    Dl_info info{};
    return ::dladdr(frame, &info) != 0 && info.dli_fname != nullptr && std::strstr(info.dli_fname, library) != nullptr;
}

// Strings and containers may allocate inside the standard library: who asked stands above it.
bool asked_by_engine() {
    void* frames[32];
    const int count = ::backtrace(frames, 32);
    for (int i = 0; i < count; ++i) {
        if (!within(frames[i], "librefusememory") && !within(frames[i], "libstdc++"))
            return within(frames[i], "_native");
    }
    return false;
}

bool refuse() {
    if (!armed.load() || !in_reader_thread() || !asked_by_engine()) return false;
    const long before = left.fetch_sub(1);
    if (before > 0 || (before < 0 && !for_good.load())) return false;
    ++refused;
    return true;
}

}  // namespace

void* operator new(std::size_t bytes) {
    void* memory = refuse() ? nullptr : std::malloc(bytes != 0 ? bytes : 1);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

extern "C" {

// Grants reader threads `after` more allocations, and then refuses one, or all.
void refuse_memory_after(long after, int all) {
    // Its first call loads a library.
    void* frame = nullptr;
    ::backtrace(&frame, 1);
    left = after;
    for_good = all != 0;
    refused = 0;
    armed = true;
}

// Grants everything again. How many allocations were refused.
unsigned long grant_memory() {
    armed = false;
    return refused;
}

}  // extern "C"
