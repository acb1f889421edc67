#include "windows.hpp"

#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "error.hpp"
#include "file.hpp"

namespace gdsstream {

namespace {

// Small enough to share out evenly, large against the cost of a system call.
constexpr std::uint64_t kPieceBytes = 16 << 20;
// One thread brings in or copies about 6 GB/s; several are needed to make the set-up as fast as the storage.
constexpr std::size_t kMaxThreads = 8;

std::atomic<std::uint64_t> unevictable{0};

// Calls work(i) for every i < count on several threads, this one among them. Throws the first failure.
template <typename Work>
void share_out(std::size_t count, Work work) {
    std::atomic<std::size_t> next{0};
    std::mutex mutex;
    std::optional<Error> failure;
    const auto run = [&] {
        try {
            for (std::size_t i = next++; i < count; i = next++) work(i);
        } catch (const std::exception& error) {
            next = count;
            std::lock_guard lock(mutex);
            if (!failure) failure = as_error(error);
        }
    };
    {
        std::vector<std::jthread> others;
        const std::size_t wanted = std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, kMaxThreads);
        try {
            while (others.size() + 1 < std::min(wanted, count)) others.emplace_back(run);
        } catch (const std::system_error&) {
            // Fewer threads take longer, which is all.
        }
        run();
    }
    if (failure) throw Error(*failure);
}

void bring_in(const File& file, std::byte* data, std::uint64_t bytes) {
    const int errnum = populate(data, bytes, false);
    if (errnum == 0) return;
    file.check_unchanged("mapped");
    if (errnum == EINVAL) {
        throw Error(ErrorKind::unavailable,
                    "this kernel cannot populate a mapping safely (MADV_POPULATE_READ needs Linux 5.14)", errnum);
    }
    throw Error(ErrorKind::read, file.path() + ": its pages could not be brought in: " + errno_text(errnum), errnum);
}

void read_into(const File& file, std::uint64_t offset, std::byte* data, std::uint64_t bytes) {
    for (std::uint64_t done = 0; done < bytes;) {
        const ssize_t got = ::pread(file.descriptor(), data + done, bytes - done, static_cast<off_t>(offset + done));
        if (got > 0) {
            done += static_cast<std::uint64_t>(got);
        } else if (got == 0) {
            throw file.ended_early(offset, bytes, done);
        } else if (errno != EINTR) {
            throw file.read_failed(offset, bytes, errno);
        }
    }
}

Mapping memory_for_copy(const File& file, std::uint64_t bytes, int numa_node) {
    try {
        return Mapping::anonymous(bytes, numa_node);
    } catch (const Error& error) {
        throw Error(ErrorKind::memory,
                    file.path() + ": no room for a pinned copy of " + std::to_string(bytes) +
                        " of its bytes; hold less of it in host memory",
                    error.errnum());
    }
}

// Of what lies in memory anyway (tmpfs) the kernel counts nothing as available.
bool lies_in_memory(const File& file) {
    struct statfs info{};
    if (::fstatfs(file.descriptor(), &info) != 0) return false;
    const auto type = static_cast<unsigned long>(info.f_type);
    return type == TMPFS_MAGIC || type == RAMFS_MAGIC || type == HUGETLBFS_MAGIC;
}

}  // namespace

std::uint64_t unevictable_bytes() { return unevictable.load(std::memory_order_relaxed); }

Windows::Windows(const File& file, const std::vector<Range>& ranges, HostTier tier)
    : tier_(std::move(tier)), windows_(widened(file, ranges)) {
    if (windows_.empty()) return;
    for (const Window& window : windows_) bytes_ += std::min(window.end(), file.size()) - window.offset;
    try {
        hold_pages(file);
    } catch (const Error& error) {
        // Anything else is no reason to believe that a copy would fare better.
        if (error.kind() != ErrorKind::unavailable) throw;
        file.check_unchanged("mapped");
        if (!tier_.allow_copy) {
            throw Error(ErrorKind::unavailable,
                        file.path() + ": " + error.what() + "; use backend=\"staged\", or allow a pinned copy of it",
                        error.errnum());
        }
        copied_because_ = error.what();
        hold_copy(file);
    }
    if (copied_because_.empty() && registered() && !lies_in_memory(file)) unevictable_bytes_ = bytes_;
    unevictable.fetch_add(unevictable_bytes_, std::memory_order_relaxed);
    if (tier_.held_bytes != nullptr) tier_.held_bytes->fetch_add(bytes_, std::memory_order_relaxed);
}

Windows::~Windows() {
    unevictable.fetch_sub(unevictable_bytes_, std::memory_order_relaxed);
    if (tier_.held_bytes != nullptr) tier_.held_bytes->fetch_sub(bytes_, std::memory_order_relaxed);
}

std::vector<Windows::Window> Windows::widened(const File& file, std::vector<Range> ranges) {
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.offset < b.offset; });
    std::vector<Window> windows;
    for (const Range& range : ranges) {
        if (range.offset > file.size() || range.bytes > file.size() - range.offset) {
            throw Error(ErrorKind::config, file.path() + ": a window of " + std::to_string(range.bytes) +
                                               " bytes at offset " + std::to_string(range.offset) +
                                               " ends past the file's end at " + std::to_string(file.size()));
        }
        if (range.bytes == 0) continue;
        const std::uint64_t begin = align_down(range.offset, kPageBytes);
        const std::uint64_t end = align_up(range.offset + range.bytes, kPageBytes);
        if (!windows.empty() && begin <= windows.back().end()) {
            windows.back().bytes = std::max(windows.back().end(), end) - windows.back().offset;
        } else {
            windows.push_back(Window{begin, end - begin, nullptr});
        }
    }
    return windows;
}

std::vector<Windows::Window> Windows::pieces() const {
    std::vector<Window> pieces;
    for (const Window& window : windows_) {
        for (std::uint64_t at = 0; at < window.bytes; at += kPieceBytes) {
            pieces.push_back(Window{window.offset + at, std::min(kPieceBytes, window.bytes - at), window.data + at});
        }
    }
    return pieces;
}

void Windows::keep(Mapping memory, Registrations registrations) {
    memory_ = std::move(memory);
    registrations_ = std::move(registrations);
}

void Windows::hold_pages(const File& file) {
    // One mapping however many windows there are: a process may have 65,530 of them, and addresses cost nothing.
    const std::uint64_t first = windows_.front().offset;
    Mapping memory = Mapping::of_file(file.descriptor(), first, windows_.back().end() - first);
    for (Window& window : windows_) window.data = memory.data() + (window.offset - first);
    const std::vector<Window> parts = pieces();
    share_out(parts.size(), [&](std::size_t i) { bring_in(file, parts[i].data, parts[i].bytes); });
    file.check_unchanged("mapped");
    Registrations registrations;
    if (registered()) {
        registrations.reserve(windows_.size());
        for (const Window& window : windows_) {
            registrations.emplace_back(tier_.device, window.data, window.bytes, true);
        }
    }
    keep(std::move(memory), std::move(registrations));
}

void Windows::hold_copy(const File& file) {
    std::uint64_t total = 0;
    for (const Window& window : windows_) total += window.bytes;
    Mapping memory = memory_for_copy(file, total, tier_.numa_node);
    std::byte* place = memory.data();
    for (Window& window : windows_) {
        window.data = place;
        place += window.bytes;
    }
    const std::vector<Window> parts = pieces();
    share_out(parts.size(), [&](std::size_t i) {
        const Window& part = parts[i];
        read_into(file, part.offset, part.data, std::min(part.end(), file.size()) - part.offset);
    });
    file.check_unchanged("copied into host memory");
    Registrations registrations;
    if (registered()) registrations.emplace_back(tier_.device, memory.data(), total, false);
    keep(std::move(memory), std::move(registrations));
}

const std::byte* Windows::find(std::uint64_t offset, std::uint64_t bytes) const {
    auto next = std::upper_bound(windows_.begin(), windows_.end(), offset,
                                 [](std::uint64_t value, const Window& window) { return value < window.offset; });
    if (next == windows_.begin()) return nullptr;
    const Window& window = *--next;
    if (offset >= window.end() || bytes > window.end() - offset) return nullptr;
    return window.data + (offset - window.offset);
}

}  // namespace gdsstream
