#include "work.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

namespace gdsstream {

namespace {

// Below this, moving bytes together in the slot costs less than another copy command (about 2 us).
constexpr std::uint64_t kCompactBytes = 64 << 10;

// Small neighbours at the target that lie apart in the slot (widened reads) are moved together: one copy for all.
void compact(std::vector<CopySpan>& copies) {
    std::size_t kept = 0;
    for (std::size_t i = 1; i < copies.size(); ++i) {
        CopySpan& last = copies[kept];
        const CopySpan& next = copies[i];
        if (last.target + last.bytes == next.target && next.bytes <= kCompactBytes &&
            last.source + last.bytes <= next.source) {
            std::memmove(reinterpret_cast<void*>(last.source + last.bytes), reinterpret_cast<const void*>(next.source),
                         next.bytes);
            last.bytes += next.bytes;
            last.joined = true;
        } else {
            copies[++kept] = next;
        }
    }
    if (!copies.empty()) copies.resize(kept + 1);
}

void deliver(Work& work, Shared& shared) {
    if (work.slot != nullptr) {
        for (CopySpan& copy : work.copies) copy.source += reinterpret_cast<std::uintptr_t>(work.slot->data);
        compact(work.copies);
    }
    shared.sink->copy(work.copies, work.transfer->channel());
    std::uint64_t bytes = 0;
    for (const CopySpan& copy : work.copies) bytes += copy.bytes;
    shared.counters.copies.fetch_add(work.copies.size(), std::memory_order_relaxed);
    shared.counters.copied_bytes.fetch_add(bytes, std::memory_order_relaxed);
    if (work.copied == nullptr) return;
    // They are under way, and nobody learns when each of them has ended.
    for (const CopySpan& copy : work.copies) work.copied->add(copy.bytes, copy.bytes, 0);
}

void count(const Work& work, Counters& counters) {
    std::uint64_t bytes = 0;
    for (const ReadOp& op : work.reads) bytes += std::min(op.done, op.bytes);
    counters.reads.fetch_add(work.reads.size(), std::memory_order_relaxed);
    counters.read_bytes.fetch_add(bytes, std::memory_order_relaxed);
    counters.tasks.fetch_add(1, std::memory_order_relaxed);
    if (work.failed) counters.failures.fetch_add(1, std::memory_order_relaxed);
}

int near_cpu(const Work& work, std::uint64_t near_interrupts_bytes) {
    if (near_interrupts_bytes == 0 || work.reads.empty()) return -1;
    std::uint64_t bytes = 0;
    for (const ReadOp& op : work.reads) bytes += op.bytes;
    return bytes / work.reads.size() >= near_interrupts_bytes ? work.reads.front().file->interrupt_cpu() : -1;
}

void settle(Work& work, Shared& shared) {
    const std::shared_ptr<Work> keep = std::move(work.alive);
    Transfer& transfer = *work.transfer;
    bool copied = false;
    try {
        if (!work.failed && !transfer.aborted()) {
            copied = true;
            deliver(work, shared);
        }
    } catch (const std::exception& error) {
        if (work.copied != nullptr) work.copied->fail(0);
        transfer.fail(as_error(error));
    }
    if (work.slot != nullptr) {
        try {
            if (copied) {
                shared.sink->finish_slot(*work.ring, work.slot, transfer.channel());
            } else {
                work.ring->release(work.slot);
            }
        } catch (const std::exception& error) {
            // The event could not be recorded: the slot is free when no copy at all is left.
            transfer.fail(as_error(error));
            while (!shared.sink->idle()) std::this_thread::sleep_for(std::chrono::microseconds(50));
            work.ring->release(work.slot);
        }
    }
    count(work, shared.counters);
    retire(transfer, work.task, shared);
}

}  // namespace

std::shared_ptr<Work> make_work(std::shared_ptr<Transfer> transfer, const Task& task, const LaneConfig& lane,
                                const CutRules& rules, Shared& shared, StagingRing& ring) {
    const Transfer::Lists& lists = transfer->lists();
    auto work = std::make_shared<Work>();
    work->task = task;
    work->ring = &ring;
    std::vector<ReadSpan> spans;
    if (shared.sink->takes_reads_in_place() && !lane.direct) {
        expand_in_place(lists.extents, task, rules, spans);
    } else if (lane.reader == ReaderKind::mapped) {
        expand_mapped(lists.extents, task, work->copies);
        for (CopySpan& copy : work->copies) {
            const std::byte* source = lists.files[copy.file]->in_memory(copy.source, copy.bytes);
            copy.source = reinterpret_cast<std::uintptr_t>(source);
        }
    } else {
        work->staged = true;
        expand_staged(lists.extents, task, rules, spans, work->copies);
    }
    work->reads.reserve(spans.size());
    for (const ReadSpan& span : spans) {
        ReadOp op;
        op.file = lists.files[span.file].get();
        op.offset = span.offset;
        op.bytes = span.bytes;
        op.wanted = span.wanted;
        op.place = span.place;
        op.owner = work.get();
        work->reads.push_back(op);
    }
    work->left = work->reads.size();
    work->near_cpu = near_cpu(*work, lane.near_interrupts_bytes);
    work->transfer = std::move(transfer);
    return work;
}

bool take_slot(const std::shared_ptr<Work>& work, bool may_wait) {
    if (work->staged) {
        work->slot = may_wait ? work->ring->acquire() : work->ring->try_acquire();
        if (work->slot == nullptr) return false;
    }
    work->alive = work;
    return true;
}

void place_read(const Work& work, ReadOp& op) {
    if (work.slot != nullptr) {
        op.data = work.slot->data + op.place;
        op.segment = work.slot->segment;
        op.staged = true;
    } else {
        op.data = reinterpret_cast<std::byte*>(op.place);
    }
}

void retire(Transfer& transfer, const Task& task, Shared& shared) {
    // First, so that who sees the transfer land sees the time that it took.
    shared.activity.end();
    transfer.retire(task.group);
}

void finish_reads(Work& work, std::size_t count, Shared& shared) {
    if (work.left.fetch_sub(count, std::memory_order_acq_rel) == count) settle(work, shared);
}

}  // namespace gdsstream
