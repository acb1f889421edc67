// Calls of the C library that fail as storage does, to be loaded before it (LD_PRELOAD). The environment says how:
// FAIL_WRITES=CALL:ERRNO:N fails every CALL but the first N; SLOW_WRITES_US pauses before each write, and SHORT_WRITES
// is how many bytes one takes at most (-1: none).
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace {

template <typename Function>
Function next(const char* name) {
    return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

long number(const char* variable) {
    const char* text = std::getenv(variable);
    return text == nullptr ? 0 : std::atol(text);
}

bool fails(const char* call) {
    static std::atomic<long> passed{0};
    const char* text = std::getenv("FAIL_WRITES");
    const std::size_t length = std::strlen(call);
    if (text == nullptr || std::strncmp(text, call, length) != 0 || text[length] != ':') return false;
    char* end = nullptr;
    const long code = std::strtol(text + length + 1, &end, 10);
    if (passed.fetch_add(1) < std::strtol(end + 1, nullptr, 10)) return false;
    errno = static_cast<int>(code);
    return true;
}

ssize_t write_views(int descriptor, const iovec* views, int count, off_t offset) {
    if (const long pause = number("SLOW_WRITES_US")) ::usleep(static_cast<useconds_t>(pause));
    if (fails("pwritev")) return -1;
    const long most = number("SHORT_WRITES");
    if (most < 0) return 0;
    if (most > 0 && count > 0)
        return ::pwrite(descriptor, views[0].iov_base, std::min<std::size_t>(views[0].iov_len, most), offset);
    return next<ssize_t (*)(int, const iovec*, int, off_t)>("pwritev")(descriptor, views, count, offset);
}

}  // namespace

extern "C" {

ssize_t pwritev(int descriptor, const iovec* views, int count, off_t offset) {
    return write_views(descriptor, views, count, offset);
}

ssize_t pwritev64(int descriptor, const iovec* views, int count, off_t offset) {
    return write_views(descriptor, views, count, offset);
}

ssize_t pwritev2(int descriptor, const iovec* views, int count, off_t offset, int) {
    return write_views(descriptor, views, count, offset);
}

ssize_t pwritev64v2(int descriptor, const iovec* views, int count, off_t offset, int) {
    return write_views(descriptor, views, count, offset);
}

int fallocate(int descriptor, int mode, off_t offset, off_t length) {
    if (fails("fallocate")) return -1;
    return next<int (*)(int, int, off_t, off_t)>("fallocate")(descriptor, mode, offset, length);
}

int fsync(int descriptor) {
    if (fails("fsync")) return -1;
    return next<int (*)(int)>("fsync")(descriptor);
}

int rename(const char* from, const char* to) {
    if (fails("rename")) return -1;
    return next<int (*)(const char*, const char*)>("rename")(from, to);
}

}  // extern "C"
