// A file that is read: its descriptors, its stamp, its O_DIRECT alignment and, where asked for, its windows.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "error.hpp"
#include "memory.hpp"
#include "windows.hpp"

namespace gdsstream {

// What tells one state of a file from another; a change of any field means that the bytes may differ.
struct Stamp {
    std::uint64_t device = 0;
    std::uint64_t inode = 0;
    std::int64_t size = 0;
    std::int64_t mtime_ns = 0;
    std::int64_t ctime_ns = 0;

    bool operator==(const Stamp&) const = default;
};

// Shared between Python and transfers without the interpreter: whoever drops it last, a worker too, needs no lock of
// its.
class File : public std::enable_shared_from_this<File> {
  public:
    // Opens `path` and compares it with `expected`. Throws Error(read) or Error(changed).
    File(std::string path, const Stamp& expected, int interrupt_cpu);

    const std::string& path() const { return path_; }
    // The CPU that takes the interrupts of its disk; < 0: unknown.
    int interrupt_cpu() const { return interrupt_cpu_; }
    std::uint64_t size() const { return static_cast<std::uint64_t>(stamp_.size); }

    int descriptor() const { return buffered_.get(); }
    // Opened on first use, through the descriptor above so that it is the same inode whatever the path names by now.
    // Throws Error(read) with EINVAL where the filesystem has no O_DIRECT.
    int direct_descriptor();

    // The share of the file that is in the page cache, from windows spread over it: a full count takes milliseconds a
    // gigabyte. 1 for an empty file. Throws Error(read).
    double resident_fraction() const;

    // Throws Error(changed) unless the file is still what the stamp says. `doing` completes "... while it was ...".
    void check_unchanged(const char* doing) const;
    // The error for a read that ended early: changed where the stamp differs, short_read where it does not.
    Error ended_early(std::uint64_t offset, std::uint64_t wanted, std::uint64_t got) const;
    Error read_failed(std::uint64_t offset, std::uint64_t wanted, int errnum) const;

    // Holds parts of the file in host memory, once: a later call may ask for what is held already and for no more.
    // Throws as Windows does, and Error(config).
    const Windows& map(const std::vector<Range>& ranges, HostTier tier);
    // nullptr until then; never changes afterwards.
    const Windows* windows() const { return published_.load(std::memory_order_acquire); }
    // Throws Error(config) for bytes that no window holds.
    const std::byte* in_memory(std::uint64_t offset, std::uint64_t bytes) const;

  private:
    Stamp stamp_now() const;

    std::string path_;
    Stamp stamp_;
    const int interrupt_cpu_;
    FileDescriptor buffered_;
    std::mutex mutex_;
    FileDescriptor direct_;
    std::unique_ptr<const Windows> windows_;
    std::atomic<const Windows*> published_{nullptr};
};

// (memory, offset) alignment that statx(STATX_DIOALIGN) reports; (0, 0) where it does not.
std::pair<std::uint32_t, std::uint32_t> direct_alignment_of(const std::string& path);
// Reads one aligned block with O_DIRECT; false where that is refused. Throws Error(read) for a missing file.
bool direct_io_works(const std::string& path);
// How many of the bytes [offset, offset + bytes) are in the page cache. Throws Error(read).
std::uint64_t resident_bytes(const std::string& path, std::uint64_t offset, std::uint64_t bytes);

}  // namespace gdsstream
