#include "task.hpp"

#include <algorithm>

#include "memory.hpp"

namespace gdsstream {

namespace {

// Calls visit(extent's file, offset, bytes, target) for every part of the task, in order.
template <typename Visit>
void for_each_part(const std::vector<Extent>& extents, const Task& task, Visit visit) {
    std::uint64_t left = task.bytes;
    std::uint64_t skip = task.skip;
    for (std::size_t i = task.first; left > 0; ++i) {
        const Extent& extent = extents[i];
        const std::uint64_t bytes = std::min(left, extent.bytes - skip);
        if (bytes > 0) visit(extent.file, extent.offset + skip, bytes, extent.target + skip);
        left -= bytes;
        skip = 0;
    }
}

std::uint64_t ramped(const CutRules& rules, std::size_t made) {
    if (rules.ramp_tasks == 0) return rules.task_bytes;
    const std::uint64_t divisor = made < rules.ramp_tasks ? 16 : made < 2 * std::size_t{rules.ramp_tasks} ? 4 : 1;
    return std::max<std::uint64_t>(rules.task_bytes / divisor, std::min<std::uint64_t>(rules.task_bytes, 64 << 10));
}

// One lane's tasks, made part by part.
class Cutter {
  public:
    explicit Cutter(const CutRules& rules) : rules_(rules) {}

    void add(std::uint32_t index, const Extent& extent) {
        std::uint64_t skip = 0;
        while (skip < extent.bytes) {
            if (open_ && (extent.group != current_.group || index > last_ + 1)) close();
            if (!open_) start(extent.group, index, skip);
            const std::uint64_t offset = extent.offset + skip;
            const std::uint64_t bytes = fitting(extent, offset, extent.bytes - skip);
            if (bytes == 0) {
                close();
                continue;
            }
            place(extent.file, offset, bytes);
            current_.bytes += bytes;
            last_ = index;
            skip += bytes;
            if (skip < extent.bytes) close();
        }
        // An empty extent lies between two parts of one task without breaking it.
        if (extent.bytes == 0 && open_ && index == last_ + 1) last_ = index;
    }

    std::vector<Task> finish() {
        if (open_) close();
        return std::move(tasks_);
    }

  private:
    void start(std::uint32_t group, std::uint32_t first, std::uint64_t skip) {
        current_ = Task{group, first, skip, 0};
        limit_ = ramped(rules_, tasks_.size());
        used_ = 0;
        read_end_ = 0;
        open_ = true;
        fresh_ = true;
        last_ = first;
    }

    void close() {
        tasks_.push_back(current_);
        open_ = false;
    }

    bool continues(std::uint32_t file, std::uint64_t offset) const {
        return !fresh_ && file == file_ && offset == read_end_;
    }

    // How much of [offset, offset + bytes) fits into the open task; a task that is still empty takes at least a part.
    std::uint64_t fitting(const Extent& extent, std::uint64_t offset, std::uint64_t bytes) const {
        const std::uint64_t alignment = rules_.alignment;
        const std::uint64_t begin = continues(extent.file, offset) ? offset : align_down(offset, alignment);
        // A continued read already holds the block in which it ends.
        const std::uint64_t used =
            continues(extent.file, offset) ? used_ - (align_up(offset, alignment) - offset) : used_;
        const std::uint64_t room = limit_ > used ? limit_ - used : 0;
        const std::uint64_t last = begin + room;
        if (align_up(offset + bytes, alignment) <= last) return bytes;
        // Cut where a block of the file ends: neither half then reads the other's block.
        const std::uint64_t cut = align_down(last, std::max<std::uint64_t>(alignment, kPageBytes));
        if (cut > offset) return cut - offset;
        if (!fresh_) return 0;
        return std::min(bytes, std::max<std::uint64_t>(1, last > offset ? last - offset : 1));
    }

    void place(std::uint32_t file, std::uint64_t offset, std::uint64_t bytes) {
        const std::uint64_t alignment = rules_.alignment;
        const std::uint64_t end = align_up(offset + bytes, alignment);
        if (continues(file, offset)) {
            used_ += end - align_up(offset, alignment);
        } else {
            used_ += end - align_down(offset, alignment);
        }
        file_ = file;
        read_end_ = offset + bytes;
        fresh_ = false;
    }

    const CutRules rules_;
    std::vector<Task> tasks_;
    Task current_;
    bool open_ = false;
    bool fresh_ = true;
    std::uint32_t last_ = 0;
    std::uint64_t limit_ = 0;
    std::uint64_t used_ = 0;
    std::uint32_t file_ = 0;
    std::uint64_t read_end_ = 0;
};

void push_read(std::vector<ReadSpan>& reads, const ReadSpan& span, std::uint64_t read_bytes) {
    for (std::uint64_t at = 0; at < span.bytes; at += read_bytes) {
        const std::uint64_t bytes = std::min(read_bytes, span.bytes - at);
        const std::uint64_t wanted = span.wanted > at ? std::min(bytes, span.wanted - at) : 0;
        reads.push_back(ReadSpan{span.file, span.offset + at, bytes, wanted, span.place + at});
    }
}

}  // namespace

std::vector<Task> cut_tasks(const std::vector<Extent>& extents, const std::vector<std::uint32_t>& file_lane,
                            std::uint32_t lane, const CutRules& rules) {
    Cutter cutter(rules);
    for (std::size_t i = 0; i < extents.size(); ++i) {
        if (file_lane[extents[i].file] == lane) cutter.add(static_cast<std::uint32_t>(i), extents[i]);
    }
    return cutter.finish();
}

void expand_staged(const std::vector<Extent>& extents, const Task& task, const CutRules& rules,
                   std::vector<ReadSpan>& reads, std::vector<CopySpan>& copies) {
    const std::uint64_t alignment = rules.alignment;
    ReadSpan open{};
    bool any = false;
    std::uint64_t cursor = 0;
    for_each_part(
        extents, task, [&](std::uint32_t file, std::uint64_t offset, std::uint64_t bytes, std::uint64_t target) {
            const bool continues = any && file == open.file && offset == open.offset + open.wanted;
            if (continues) {
                open.wanted += bytes;
                open.bytes = align_up(open.offset + open.wanted, alignment) - open.offset;
            } else {
                if (any) push_read(reads, open, rules.read_bytes);
                const std::uint64_t begin = align_down(offset, alignment);
                open =
                    ReadSpan{file, begin, align_up(offset + bytes, alignment) - begin, offset + bytes - begin, cursor};
                any = true;
            }
            cursor = open.place + open.bytes;
            const std::uint64_t source = open.place + (offset - open.offset);
            if (!copies.empty() && copies.back().source + copies.back().bytes == source &&
                copies.back().target + copies.back().bytes == target) {
                copies.back().bytes += bytes;
                copies.back().joined = true;
            } else {
                copies.push_back(CopySpan{source, target, bytes, file, false});
            }
        });
    if (any) push_read(reads, open, rules.read_bytes);
}

void expand_in_place(const std::vector<Extent>& extents, const Task& task, const CutRules& rules,
                     std::vector<ReadSpan>& reads) {
    ReadSpan open{};
    for_each_part(extents, task,
                  [&](std::uint32_t file, std::uint64_t offset, std::uint64_t bytes, std::uint64_t target) {
                      if (open.bytes > 0 && file == open.file && offset == open.offset + open.bytes &&
                          target == open.place + open.bytes) {
                          open.bytes += bytes;
                          open.wanted += bytes;
                          return;
                      }
                      if (open.bytes > 0) push_read(reads, open, rules.read_bytes);
                      open = ReadSpan{file, offset, bytes, bytes, target};
                  });
    if (open.bytes > 0) push_read(reads, open, rules.read_bytes);
}

void expand_mapped(const std::vector<Extent>& extents, const Task& task, std::vector<CopySpan>& copies) {
    for_each_part(
        extents, task, [&](std::uint32_t file, std::uint64_t offset, std::uint64_t bytes, std::uint64_t target) {
            if (!copies.empty() && copies.back().file == file && copies.back().source + copies.back().bytes == offset &&
                copies.back().target + copies.back().bytes == target) {
                copies.back().bytes += bytes;
                copies.back().joined = true;
            } else {
                copies.push_back(CopySpan{offset, target, bytes, file, false});
            }
        });
}

}  // namespace gdsstream
