// How a transfer is cut: extents -> tasks (one slot's worth each) -> reads and copies. Pure: no I/O, no locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gdsstream {

// `bytes` at `offset` of file number `file` are wanted at address `target`.
struct Extent {
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
    std::uint64_t target = 0;
    std::uint32_t file = 0;
    std::uint32_t group = 0;
};

// `bytes` bytes of consecutive extents of one group and one lane, beginning `skip` bytes into extent `first`.
struct Task {
    std::uint32_t group = 0;
    std::uint32_t first = 0;
    std::uint64_t skip = 0;
    std::uint64_t bytes = 0;
};

// What a lane reads by; alignment 1 means through the page cache.
struct CutRules {
    std::uint64_t task_bytes = 0;  // the most that one task may take of a slot, widening included
    std::uint64_t alignment = 1;   // of file offsets, lengths and memory, for O_DIRECT
    std::uint64_t read_bytes = 0;  // the most that one read takes
    unsigned ramp_tasks = 0;       // how many tasks of a sixteenth, then of a quarter, come first; 0: none
};

// Extents [0, n) -> the tasks of those whose file is on `lane` (file_lane[extent.file] == lane).
std::vector<Task> cut_tasks(const std::vector<Extent>& extents, const std::vector<std::uint32_t>& file_lane,
                            std::uint32_t lane, const CutRules& rules);

struct ReadSpan {
    std::uint32_t file = 0;
    std::uint64_t offset = 0;  // aligned
    std::uint64_t bytes = 0;   // aligned; may pass the end of the file
    std::uint64_t wanted = 0;  // how many of them have to arrive
    std::uint64_t place = 0;   // where in the slot, or the target's address for direct placement
};

struct CopySpan {
    std::uint64_t source = 0;  // where in the slot, or the offset in the mapped file
    std::uint64_t target = 0;
    std::uint64_t bytes = 0;
    std::uint32_t file = 0;
    bool joined = false;  // of several extents, whose targets may belong to several allocations that happen to touch
};

// Staged: reads into one slot, neighbours in one read, and the copies out of it, neighbours in one copy.
void expand_staged(const std::vector<Extent>& extents, const Task& task, const CutRules& rules,
                   std::vector<ReadSpan>& reads, std::vector<CopySpan>& copies);
// In place: reads that land at their targets, no copies (page cache -> CPU memory).
void expand_in_place(const std::vector<Extent>& extents, const Task& task, const CutRules& rules,
                     std::vector<ReadSpan>& reads);
// Mapped: copies only, their sources being offsets in the mapped file.
void expand_mapped(const std::vector<Extent>& extents, const Task& task, std::vector<CopySpan>& copies);

}  // namespace gdsstream
