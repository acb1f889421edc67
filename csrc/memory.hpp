// Descriptors and mappings that close themselves.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gdsstream {

inline constexpr std::size_t kPageBytes = 4096;

constexpr std::uint64_t align_down(std::uint64_t value, std::uint64_t alignment) {
    return value / alignment * alignment;
}
constexpr std::uint64_t align_up(std::uint64_t value, std::uint64_t alignment) {
    return align_down(value + alignment - 1, alignment);
}

class FileDescriptor {
  public:
    FileDescriptor() = default;
    explicit FileDescriptor(int fd) : fd_(fd) {}
    FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.release()) {}
    FileDescriptor& operator=(FileDescriptor&& other) noexcept;
    FileDescriptor(const FileDescriptor&) = delete;
    FileDescriptor& operator=(const FileDescriptor&) = delete;
    ~FileDescriptor() { reset(); }

    int get() const { return fd_; }
    bool valid() const { return fd_ >= 0; }
    int release();
    void reset();

  private:
    int fd_ = -1;
};

// An mmap that unmaps itself, in the process that made it: forked children do not inherit the pages, and by the time
// they drop the object something of theirs may lie at the address.
class Mapping {
  public:
    Mapping() = default;
    Mapping(Mapping&& other) noexcept;
    Mapping& operator=(Mapping&& other) noexcept;
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping() { reset(); }

    // Anonymous, huge pages where the system grants them, absent in forked children: a child that wrote to memory
    // the driver has pinned would split it from the pages the device reads. `numa_node` < 0: no preference.
    // Throws Error(memory) when the system has no room.
    static Mapping anonymous(std::size_t bytes, int numa_node);
    // A part of a file from a page's boundary on, shared and read-only. Throws Error(read).
    static Mapping of_file(int fd, std::uint64_t offset, std::size_t bytes);

    std::byte* data() const { return data_; }
    std::size_t size() const { return bytes_; }
    void reset();

  private:
    Mapping(std::byte* data, std::size_t bytes);

    std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;
    pid_t owner_ = 0;
};

// Pages are brought in by the kernel (MADV_POPULATE_READ / _WRITE): it reports a file that became too short as an
// error where a touch would raise SIGBUS. Returns 0 or the errno.
int populate(std::byte* data, std::size_t bytes, bool write);

// Asks for huge pages under memory that is about to be filled for the first time: one fault for 2 MiB instead of 512.
void prefer_huge_pages(std::uintptr_t address, std::size_t bytes);

}  // namespace gdsstream
