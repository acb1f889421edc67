#include "worker.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace gdsstream {

namespace {

// Below this, moving bytes together in the slot costs less than another copy command (about 2 us).
constexpr std::uint64_t kCompactBytes = 64 << 10;

void run_on(const std::vector<int>& cpus) {
    if (cpus.empty()) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int cpu : cpus) CPU_SET(static_cast<unsigned>(cpu), &set);
    // A preference: in a container whose cpuset excludes the node, the thread stays where it may run.
    ::pthread_setaffinity_np(::pthread_self(), sizeof set, &set);
}

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
        } else {
            copies[++kept] = next;
        }
    }
    if (!copies.empty()) copies.resize(kept + 1);
}

}  // namespace

void Worker::set_up() {
    run_on(shared_.cpus);
    try {
        shared_.sink->attach_thread();
        const LaneConfig& config = lane_.config();
        ReaderOptions options;
        options.direct = config.direct;
        options.depth = config.depth;
        if (config.fixed_buffers) {
            StagingRing& ring = *shared_.ring;
            options.max_segments = ring.max_segments();
            options.segment_bytes = ring.segment_bytes();
            options.segment_data = [&ring](unsigned segment) { return ring.segment_data(segment); };
            options.note = shared_.note;
        }
        std::unique_ptr<Reader> reader = config.reader == ReaderKind::uring    ? make_uring_reader(options)
                                         : config.reader == ReaderKind::mapped ? make_mapped_reader()
                                                                               : make_pread_reader(options);
        reader_ = with_faults(std::move(reader), config.faults);
    } catch (const Error& error) {
        broken_ = std::make_unique<Error>(error);
    }
}

void Worker::run() {
    ::pthread_setname_np(::pthread_self(), "gdsstream");
    set_up();
    for (;;) {
        top_up();
        if (active_.empty() && !has_pending_) return;
        collect();
    }
}

void Worker::top_up() {
    for (;;) {
        start_reads();
        const bool idle = active_.empty();
        if (!idle && (reader_->room() == 0 || active_.size() >= reader_->depth())) return;
        if (!has_pending_) {
            if (!lane_.claim(pending_, idle)) return;
            has_pending_ = true;
        }
        if (!begin(pending_)) return;
        has_pending_ = false;
        pending_ = Claim{};
    }
}

bool Worker::begin(Claim& claim) {
    if (broken_ != nullptr) claim.transfer->fail(*broken_);
    if (claim.transfer->aborted()) {
        claim.transfer->retire(claim.task.group);
        return true;
    }
    if (spare_.empty()) spare_.emplace_back();
    active_.splice(active_.end(), spare_, spare_.begin());
    Work& work = active_.back();
    work.claim = claim;
    try {
        if (!lay_out(work)) {
            recycle(std::prev(active_.end()));
            return false;
        }
    } catch (const Error& error) {
        claim.transfer->fail(error);
        work.failed = true;
        work.reads.clear();
    }
    if (work.reads.empty()) finish(std::prev(active_.end()));
    return true;
}

bool Worker::lay_out(Work& work) {
    const Transfer::Lists& lists = work.claim.transfer->lists();
    const LaneConfig& config = lane_.config();
    const bool mapped = config.reader == ReaderKind::mapped;
    const bool in_place = shared_.sink->takes_reads_in_place() && !config.direct;
    std::uint64_t base = 0;
    spans_.clear();
    if (in_place) {
        expand_in_place(lists.extents, work.claim.task, lane_.rules(), spans_);
    } else if (mapped) {
        expand_mapped(lists.extents, work.claim.task, work.copies);
        for (CopySpan& copy : work.copies) {
            copy.source += reinterpret_cast<std::uintptr_t>(lists.files[copy.file]->mapped());
        }
    } else {
        // With reads under way a slot will come free by finishing them; without, it has to be waited for.
        work.slot = active_.size() > 1 ? shared_.ring->try_acquire() : shared_.ring->acquire();
        if (work.slot == nullptr) return false;
        base = reinterpret_cast<std::uintptr_t>(work.slot->data);
        expand_staged(lists.extents, work.claim.task, lane_.rules(), spans_, work.copies);
        for (CopySpan& copy : work.copies) copy.source += base;
    }
    work.reads.reserve(spans_.size());
    for (const ReadSpan& span : spans_) {
        ReadOp op;
        op.file = lists.files[span.file].get();
        op.offset = span.offset;
        op.bytes = span.bytes;
        op.wanted = span.wanted;
        op.data = reinterpret_cast<std::byte*>(base + span.place);
        op.owner = &work;
        op.segment = work.slot != nullptr ? work.slot->segment : 0;
        op.staged = work.slot != nullptr;
        work.reads.push_back(op);
    }
    return true;
}

void Worker::start_reads() {
    for (auto work = active_.begin(); work != active_.end();) {
        while (work->started < work->reads.size() && reader_->room() > 0) {
            ReadOp& op = work->reads[work->started++];
            if (work->failed || work->claim.transfer->aborted()) {
                work->failed = true;
                ++work->finished;
                continue;
            }
            try {
                reader_->start(op);
            } catch (const Error& error) {
                work->claim.transfer->fail(error);
                work->failed = true;
                ++work->finished;
            }
        }
        // Every read was skipped or has failed to start: nothing will arrive that would finish the work.
        const auto current = work++;
        if (current->finished == current->reads.size()) finish(current);
        if (reader_->room() == 0) return;
    }
}

void Worker::collect() {
    if (reader_ == nullptr) return;
    arrived_.clear();
    try {
        reader_->collect(arrived_);
    } catch (const Error& error) {
        // The reader itself is broken (io_uring_enter refuses): what it had under way can only be reported.
        for (Work& work : active_) work.claim.transfer->fail(error);
        return;
    }
    for (ReadOp* op : arrived_) {
        Work& work = *op->owner;
        if (op->failed()) {
            work.failed = true;
            work.claim.transfer->fail(op->errnum != 0 ? op->file->read_failed(op->offset, op->wanted, op->errnum)
                                                      : op->file->ended_early(op->offset, op->wanted, op->done));
        }
        if (++work.finished < work.reads.size()) continue;
        finish(std::find_if(active_.begin(), active_.end(), [&](const Work& other) { return &other == &work; }));
    }
}

void Worker::deliver(Work& work) {
    if (work.slot != nullptr) compact(work.copies);
    std::uint64_t bytes = 0;
    for (const CopySpan& copy : work.copies) {
        shared_.sink->copy(reinterpret_cast<const std::byte*>(copy.source), copy.target, copy.bytes);
        bytes += copy.bytes;
    }
    shared_.counters.copies.fetch_add(work.copies.size(), std::memory_order_relaxed);
    shared_.counters.copied_bytes.fetch_add(bytes, std::memory_order_relaxed);
}

void Worker::finish(std::list<Work>::iterator work) {
    settle(*work);
    recycle(work);
}

void Worker::recycle(std::list<Work>::iterator work) {
    work->claim = Claim{};
    work->slot = nullptr;
    work->reads.clear();
    work->copies.clear();
    work->started = 0;
    work->finished = 0;
    work->failed = false;
    spare_.splice(spare_.end(), active_, work);
}

void Worker::settle(Work& work) {
    Transfer& transfer = *work.claim.transfer;
    bool copied = false;
    try {
        if (!work.failed && !transfer.aborted()) {
            copied = true;
            deliver(work);
        }
    } catch (const Error& error) {
        transfer.fail(error);
    }
    if (work.slot != nullptr) {
        try {
            if (copied) {
                shared_.sink->finish_slot(*shared_.ring, work.slot);
            } else {
                shared_.ring->release(work.slot);
            }
        } catch (const Error& error) {
            // The event could not be recorded: the driver is gone, and no copy reads the slot any more.
            transfer.fail(error);
            shared_.ring->release(work.slot);
        }
    }
    std::uint64_t bytes = 0;
    for (const ReadOp& op : work.reads) bytes += std::min(op.done, op.bytes);
    shared_.counters.reads.fetch_add(work.reads.size(), std::memory_order_relaxed);
    shared_.counters.read_bytes.fetch_add(bytes, std::memory_order_relaxed);
    shared_.counters.tasks.fetch_add(1, std::memory_order_relaxed);
    if (work.failed) shared_.counters.failures.fetch_add(1, std::memory_order_relaxed);
    transfer.retire(work.claim.task.group);
}

}  // namespace gdsstream
