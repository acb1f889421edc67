// pread as storage may answer it, to be loaded before the C library (LD_PRELOAD): every other call is interrupted
// (INTERRUPT_READS=eintr), or brings half of what was asked for (INTERRUPT_READS=half).
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace {

using Pread = ssize_t (*)(int, void*, size_t, off_t);

ssize_t read_with_luck(const char* name, int descriptor, void* data, size_t bytes, off_t offset) {
    static std::atomic<unsigned> calls{0};
    const auto next = reinterpret_cast<Pread>(::dlsym(RTLD_NEXT, name));
    const char* mode = std::getenv("INTERRUPT_READS");
    if (mode == nullptr || calls.fetch_add(1) % 2 == 1) return next(descriptor, data, bytes, offset);
    if (std::strcmp(mode, "eintr") == 0) {
        errno = EINTR;
        return -1;
    }
    return next(descriptor, data, (bytes + 1) / 2, offset);
}

}  // namespace

extern "C" ssize_t pread(int descriptor, void* data, size_t bytes, off_t offset) {
    return read_with_luck("pread", descriptor, data, bytes, offset);
}

extern "C" ssize_t pread64(int descriptor, void* data, size_t bytes, off_t offset) {
    return read_with_luck("pread64", descriptor, data, bytes, offset);
}
