#include "memory.hpp"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string>
#include <utility>

#include "error.hpp"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace gdsstream {

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
    if (this != &other) {
        reset();
        fd_ = other.release();
    }
    return *this;
}

int FileDescriptor::release() { return std::exchange(fd_, -1); }

void FileDescriptor::reset() {
    if (fd_ >= 0) ::close(release());
}

Mapping::Mapping(std::byte* data, std::size_t bytes) : data_(data), bytes_(bytes), owner_(::getpid()) {}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)), owner_(other.owner_) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
    if (this != &other) {
        reset();
        data_ = std::exchange(other.data_, nullptr);
        bytes_ = std::exchange(other.bytes_, 0);
        owner_ = other.owner_;
    }
    return *this;
}

void Mapping::reset() {
    if (data_ != nullptr && owner_ == ::getpid()) ::munmap(data_, bytes_);
    data_ = nullptr;
    bytes_ = 0;
}

namespace {

// A preference, not a binding: where the node is full, a distant page is slower but a failed allocation is worse.
void prefer_node(std::byte* data, std::size_t bytes, int numa_node) {
    std::array<unsigned long, 16> mask{};
    constexpr std::size_t bits = sizeof(unsigned long) * 8;
    if (numa_node < 0 || static_cast<std::size_t>(numa_node) >= mask.size() * bits) return;
    mask[static_cast<std::size_t>(numa_node) / bits] = 1UL << (static_cast<std::size_t>(numa_node) % bits);
    ::syscall(SYS_mbind, data, bytes, MPOL_PREFERRED, mask.data(), mask.size() * bits + 1, 0);
}

}  // namespace

Mapping Mapping::anonymous(std::size_t bytes, int numa_node) {
    constexpr std::size_t huge = std::size_t{2} << 20;
    const std::size_t rounded = align_up(bytes, bytes >= huge ? huge : kPageBytes);
    // mmap aligns to 4 KiB only; one huge page more leaves room to start on a huge page's boundary.
    const std::size_t reserve = rounded >= huge ? rounded + huge : rounded;
    void* raw = ::mmap(nullptr, reserve, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) {
        throw Error(ErrorKind::memory,
                    "could not map " + std::to_string(bytes) + " bytes of staging memory: " + errno_text(errno) +
                        "; lower staging_bytes",
                    errno);
    }
    auto* start = static_cast<std::byte*>(raw);
    auto* aligned = start;
    if (rounded >= huge) {
        aligned = reinterpret_cast<std::byte*>(align_up(reinterpret_cast<std::uintptr_t>(start), huge));
        if (aligned > start) ::munmap(start, static_cast<std::size_t>(aligned - start));
        auto* end = start + reserve;
        if (end > aligned + rounded) ::munmap(aligned + rounded, static_cast<std::size_t>(end - aligned - rounded));
    }
    Mapping mapping(aligned, rounded);
    ::madvise(aligned, rounded, MADV_DONTFORK);
    ::madvise(aligned, rounded, MADV_HUGEPAGE);
    prefer_node(aligned, rounded, numa_node);
    const int failed = populate(aligned, rounded, true);
    if (failed == ENOMEM || failed == EFAULT) {
        throw Error(ErrorKind::memory,
                    "no room for " + std::to_string(bytes) + " bytes of staging memory; lower staging_bytes", failed);
    }
    // Where free memory was in pieces the kernel gave small pages; asked again it moves things to make huge ones.
    if (rounded >= huge) ::madvise(aligned, rounded, MADV_COLLAPSE);
    return mapping;
}

Mapping Mapping::of_file(int fd, std::uint64_t offset, std::size_t bytes) {
    void* raw = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(offset));
    if (raw == MAP_FAILED) throw Error(ErrorKind::read, "mmap of the file failed: " + errno_text(errno), errno);
    auto* data = static_cast<std::byte*>(raw);
    ::madvise(data, bytes, MADV_DONTFORK);
    return Mapping(data, bytes);
}

void prefer_huge_pages(std::uintptr_t address, std::size_t bytes) {
    constexpr std::size_t huge = std::size_t{2} << 20;
    const std::uintptr_t first = align_up(address, kPageBytes);
    const std::uintptr_t end = align_down(address + bytes, kPageBytes);
    if (end > first && end - first >= 2 * huge) ::madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
}

int populate(std::byte* data, std::size_t bytes, bool write) {
    // In pieces, so that a signal (EINTR) loses little work.
    constexpr std::size_t piece = std::size_t{64} << 20;
    for (std::size_t at = 0; at < bytes;) {
        const std::size_t length = std::min(piece, bytes - at);
        if (::madvise(data + at, length, write ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) == 0) {
            at += length;
        } else if (errno != EINTR && errno != EAGAIN) {
            return errno;
        }
    }
    return 0;
}

}  // namespace gdsstream
