// Windows: the parts of a file that are held in host memory, to be read from there again and again.
//
// They are the file's own pages: mapped, brought in and, for a GPU, registered read-only. Where such pages cannot be
// registered they may be a pinned copy instead, which takes their bytes once more beside the page cache. Windows never
// change once they are made. Transfers keep their files, and files their windows: nothing is unregistered under a copy.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda.hpp"
#include "memory.hpp"

namespace gdsstream {

class File;

// `bytes` bytes of a file from `offset` on.
struct Range {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
};

struct HostTier {
    std::shared_ptr<cuda::Device> device;  // nullptr: nothing is registered, for CPU sinks
    int numa_node = -1;                    // where copies lie; < 0: anywhere
    bool allow_copy = false;
    std::shared_ptr<std::atomic<std::uint64_t>> held_bytes;  // counts the windows for as long as they exist
};

class Windows {
  public:
    // Ranges are widened to pages, and those that touch or overlap become one window; empty ones are left out.
    // Throws Error(config | read | short_read | changed | memory | cuda | unavailable), and leaves nothing behind.
    Windows(const File& file, const std::vector<Range>& ranges, HostTier tier);
    ~Windows();
    Windows(const Windows&) = delete;
    Windows& operator=(const Windows&) = delete;

    // Where `bytes` bytes at `offset` of the file are; nullptr where they are not all in one window.
    const std::byte* find(std::uint64_t offset, std::uint64_t bytes) const;
    // Bytes of the file in all windows together.
    std::uint64_t bytes() const { return bytes_; }
    // Whether a GPU can copy out of them.
    bool registered() const { return tier_.device != nullptr; }
    // Why they are a copy; "": they are the file's own pages.
    const std::string& copied_because() const { return copied_because_; }

  private:
    // Whole pages; the last one may reach past the end of the file.
    struct Window {
        std::uint64_t offset = 0;
        std::uint64_t bytes = 0;
        std::byte* data = nullptr;

        std::uint64_t end() const { return offset + bytes; }
    };
    using Registrations = std::vector<cuda::HostRegistration>;

    static std::vector<Window> widened(const File& file, std::vector<Range> ranges);
    std::vector<Window> pieces() const;
    void hold_pages(const File& file);
    void hold_copy(const File& file);
    void keep(Mapping memory, Registrations registrations);

    const HostTier tier_;
    std::vector<Window> windows_;  // by offset, with at least a page between two of them
    std::uint64_t bytes_ = 0;
    std::uint64_t unevictable_bytes_ = 0;
    Mapping memory_;
    Registrations registrations_;  // after memory_: they have to go first
    std::string copied_because_;
};

// Bytes of page cache that this process has registered. The kernel still counts them as available, as it does all page
// cache of files on disks, but it cannot evict them.
std::uint64_t unevictable_bytes();

}  // namespace gdsstream
