#include "file.hpp"

#include <fcntl.h>
#include <linux/stat.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>
#include <vector>

#ifndef STATX_DIOALIGN
#define STATX_DIOALIGN 0x00002000U
#endif

namespace gdsstream {

namespace {

// The kernel's struct statx as of 6.1, where the direct-I/O fields came; older headers lack them.
struct StatxDirect {
    std::uint8_t before[0x98];
    std::uint32_t memory_alignment;
    std::uint32_t offset_alignment;
    std::uint8_t after[0x100 - 0xa0];
};
static_assert(sizeof(StatxDirect) == 0x100);

FileDescriptor open_file(const std::string& path, int extra_flags) {
    // O_NONBLOCK: a FIFO in the file's place must not hang the open; it means nothing to regular files.
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | extra_flags);
    if (fd < 0) throw Error(ErrorKind::read, path + ": could not be opened: " + errno_text(errno), errno);
    return FileDescriptor(fd);
}

Stamp stamp_of(int fd) {
    struct stat st{};
    if (::fstat(fd, &st) != 0) throw Error(ErrorKind::read, "fstat failed: " + errno_text(errno), errno);
    return Stamp{static_cast<std::uint64_t>(st.st_dev), static_cast<std::uint64_t>(st.st_ino), st.st_size,
                 st.st_mtim.tv_sec * 1000000000LL + st.st_mtim.tv_nsec,
                 st.st_ctim.tv_sec * 1000000000LL + st.st_ctim.tv_nsec};
}

std::string difference(const Stamp& was, const Stamp& now) {
    if (was.device != now.device || was.inode != now.inode) return "it was replaced by another file";
    if (now.size < was.size) {
        return "it was truncated from " + std::to_string(was.size) + " to " + std::to_string(now.size) + " bytes";
    }
    if (now.size > was.size) {
        return "it grew from " + std::to_string(was.size) + " to " + std::to_string(now.size) + " bytes";
    }
    if (was.mtime_ns != now.mtime_ns) return "it was written to";
    return "its inode changed (renamed over, unlinked, linked or given other attributes)";
}

}  // namespace

File::File(std::string path, const Stamp& expected, int interrupt_cpu)
    : path_(std::move(path)), stamp_(expected), interrupt_cpu_(interrupt_cpu) {
    buffered_ = open_file(path_, 0);
    check_unchanged("opened");
}

Stamp File::stamp_now() const { return stamp_of(buffered_.get()); }

void File::check_unchanged(const char* doing) const {
    const Stamp now = stamp_now();
    if (now == stamp_) return;
    throw Error(ErrorKind::changed, path_ + ": " + difference(stamp_, now) +
                                        " since its header was read, found while it was " + doing +
                                        "; what was read cannot be trusted: open it again");
}

Error File::ended_early(std::uint64_t offset, std::uint64_t wanted, std::uint64_t got) const {
    const Stamp now = stamp_now();
    const std::string where = path_ + ": read of " + std::to_string(wanted) + " bytes at offset " +
                              std::to_string(offset) + " ended after " + std::to_string(got);
    if (!(now == stamp_)) {
        return Error(ErrorKind::changed, where + ": " + difference(stamp_, now) + " while it was read; open it again");
    }
    return Error(ErrorKind::short_read,
                 where + " although the file has " + std::to_string(now.size) + " bytes; check the storage");
}

Error File::read_failed(std::uint64_t offset, std::uint64_t wanted, int errnum) const {
    return Error(ErrorKind::read,
                 path_ + ": read of " + std::to_string(wanted) + " bytes at offset " + std::to_string(offset) +
                     " failed: " + errno_text(errnum) + "; check the storage and the kernel log",
                 errnum);
}

int File::direct_descriptor() {
    std::lock_guard lock(mutex_);
    if (!direct_.valid()) {
        const std::string through = "/proc/self/fd/" + std::to_string(buffered_.get());
        int fd = ::open(through.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
        if (fd < 0) {
            throw Error(ErrorKind::read,
                        path_ + ": could not be opened with O_DIRECT: " + errno_text(errno) +
                            "; use direct_io=False on this filesystem",
                        errno);
        }
        direct_ = FileDescriptor(fd);
    }
    return direct_.get();
}

double File::resident_fraction() const {
    constexpr std::size_t windows = 64;
    constexpr std::size_t window_pages = 16;
    const std::size_t pages = (size() + kPageBytes - 1) / kPageBytes;
    if (pages == 0) return 1.0;
    const Mapping mapping = Mapping::of_file(buffered_.get(), 0, size());
    const std::size_t stride = std::max<std::size_t>(pages / windows, window_pages);
    std::size_t seen = 0;
    std::size_t resident = 0;
    for (std::size_t first = 0; first < pages; first += stride) {
        unsigned char flags[window_pages];
        const std::size_t count = std::min(window_pages, pages - first);
        if (::mincore(mapping.data() + first * kPageBytes, count * kPageBytes, flags) != 0) {
            throw Error(ErrorKind::read, path_ + ": mincore failed: " + errno_text(errno), errno);
        }
        seen += count;
        for (std::size_t i = 0; i < count; ++i) resident += flags[i] & 1;
    }
    return static_cast<double>(resident) / static_cast<double>(seen);
}

const Windows& File::map(const std::vector<Range>& ranges, HostTier tier) {
    std::lock_guard lock(mutex_);
    if (windows_ == nullptr) {
        windows_ = std::make_unique<const Windows>(*this, ranges, std::move(tier));
        published_.store(windows_.get(), std::memory_order_release);
    } else {
        for (const Range& range : ranges) in_memory(range.offset, range.bytes);
    }
    return *windows_;
}

const std::byte* File::in_memory(std::uint64_t offset, std::uint64_t bytes) const {
    const Windows* held = windows();
    const std::byte* found = held != nullptr ? held->find(offset, bytes) : nullptr;
    if (found != nullptr || (held != nullptr && bytes == 0)) return found;
    throw Error(ErrorKind::config,
                path_ + ": " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset) +
                    (held == nullptr ? " are not held in host memory: map the file before it is read so"
                                     : " are in none of its windows in host memory: open it with a "
                                       "window for them, or read them by another lane"));
}

std::pair<std::uint32_t, std::uint32_t> direct_alignment_of(const std::string& path) {
    StatxDirect buffer{};
    if (::syscall(SYS_statx, AT_FDCWD, path.c_str(), 0, STATX_DIOALIGN, &buffer) != 0) return {0, 0};
    std::uint32_t mask = 0;
    std::memcpy(&mask, &buffer, sizeof mask);
    if ((mask & STATX_DIOALIGN) == 0) return {0, 0};
    return {buffer.memory_alignment, buffer.offset_alignment};
}

bool direct_io_works(const std::string& path) {
    const FileDescriptor buffered = open_file(path, 0);
    const FileDescriptor direct(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_DIRECT));
    if (!direct.valid()) return false;
    const Mapping block = Mapping::anonymous(kPageBytes, -1);
    return ::pread(direct.get(), block.data(), kPageBytes, 0) >= 0;
}

std::uint64_t resident_bytes(const std::string& path, std::uint64_t offset, std::uint64_t bytes) {
    const FileDescriptor fd = open_file(path, 0);
    const auto size = static_cast<std::uint64_t>(stamp_of(fd.get()).size);
    const std::uint64_t end = std::min(size, offset + bytes);
    if (offset >= end) return 0;
    const std::uint64_t start = align_down(offset, kPageBytes);
    void* raw = ::mmap(nullptr, end - start, PROT_READ, MAP_SHARED, fd.get(), static_cast<off_t>(start));
    if (raw == MAP_FAILED) throw Error(ErrorKind::read, path + ": mmap failed: " + errno_text(errno), errno);
    std::vector<unsigned char> pages((end - start + kPageBytes - 1) / kPageBytes);
    const int failed = ::mincore(raw, end - start, pages.data()) == 0 ? 0 : errno;
    ::munmap(raw, end - start);
    if (failed != 0) throw Error(ErrorKind::read, path + ": mincore failed: " + errno_text(failed), failed);
    std::uint64_t resident = 0;
    for (std::size_t i = 0; i < pages.size(); ++i) {
        if ((pages[i] & 1) == 0) continue;
        const std::uint64_t first = std::max(offset, start + i * kPageBytes);
        resident += std::min(end, start + (i + 1) * kPageBytes) - first;
    }
    return resident;
}

}  // namespace gdsstream
