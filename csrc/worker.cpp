#include "worker.hpp"

#include <pthread.h>

#include <algorithm>
#include <utility>

namespace gdsstream {

namespace {

// Of smaller reads, which a thread makes one by one in a microsecond or so, every sixteenth is timed.
constexpr std::uint64_t kAlwaysTimedBytes = 64 << 10;
constexpr std::uint64_t kTimedShare = 16;

}  // namespace

void Worker::set_up() {
    broken_.reset();
    try {
        shared_.sink->attach_thread();
        const LaneConfig& config = lane_.config();
        if (config.ledger != nullptr && tally_ == nullptr) tally_ = &config.ledger->open();
        ReaderOptions options;
        options.direct = config.direct;
        options.depth = config.depth;
        if (config.fixed_buffers) {
            StagingRing& ring = lane_.ring();
            options.max_segments = ring.max_segments();
            options.segment_bytes = ring.segment_bytes();
            options.segment_data = [&ring](unsigned segment) { return ring.segment_data(segment); };
            options.note = shared_.note;
        }
        std::unique_ptr<Reader> reader = config.reader == ReaderKind::uring    ? make_uring_reader(options)
                                         : config.reader == ReaderKind::mapped ? make_mapped_reader()
                                                                               : make_pread_reader(options);
        // What arrives is never lost for want of memory.
        arrived_.reserve(reader->depth());
        one_by_one_ = reader->depth() == 1;
        reader_ = with_faults(std::move(reader), config.faults);
    } catch (const std::exception& error) {
        broken_ = as_error(error);
    }
}

void Worker::run() {
    ::pthread_setname_np(::pthread_self(), "gdsstream");
    placement_.begin(shared_.cpus);
    set_up();
    for (;;) {
        top_up(true);
        if (reads_under_way_ == 0) return;
        collect();
        // The disk goes on with the next reads while what arrived is copied; behind failures there are none.
        if (!one_by_one_) top_up(false);
        deliver();
    }
}

void Worker::top_up(bool may_wait) {
    for (;;) {
        const bool idle = reads_under_way_ == 0;
        if (!idle && (reader_->room() == 0 || bytes_under_way_ >= most_under_way())) break;
        // What stopped the set-up (no descriptor left, say) may be over by now; and claiming already needs the context.
        if (part_.empty() && broken_.has_value()) set_up();
        if (part_.empty()) {
            if (!lane_.claim(part_, idle && may_wait, first_)) break;
            alone_ = part_.work->near_cpu >= 0;
            placement_.follow(part_.work->near_cpu);
            if (timed() && !one_by_one_) now_ns_ = now_ns();
        }
        if (idle && may_wait && paced_) pace_.begin(now_ns_);
        start_next_read();
        // It begins with one part while the next is claimed.
        if (part_.empty() && reader_ != nullptr) reader_->submit();
    }
    if (reader_ != nullptr) reader_->submit();
}

// A look at the clock takes 25 ns. Reads that are made at depth share one for all that arrive together.
void Worker::note_start(ReadOp& op) {
    if (!timed()) return;
    if (!one_by_one_) {
        op.started_ns = now_ns_;
    } else if (op.bytes >= kAlwaysTimedBytes || small_reads_++ % kTimedShare == 0) {
        op.started_ns = now_ns();
    }
}

void Worker::note_end(const ReadOp& op) {
    if (tally_ == nullptr) return;
    if (op.failed()) {
        tally_->fail(op.retries);
        return;
    }
    tally_->add(op.bytes, std::min(op.done, op.bytes), op.retries);
    if (op.started_ns != 0) tally_->time((one_by_one_ ? now_ns() : now_ns_) - op.started_ns);
}

// Before any of what arrived is delivered, which takes time that the disk did not.
void Worker::note_pace() {
    std::uint64_t bytes = 0;
    std::uint64_t quickest_ns = now_ns_;
    for (const ReadOp* op : arrived_) {
        bytes += op->bytes;
        quickest_ns = std::min(quickest_ns, now_ns_ - op->started_ns);
    }
    pace_.arrived(arrived_.size(), bytes, quickest_ns, now_ns_);
}

// More than the most fills a disk's queue with large reads, and slots with bytes that wait.
std::uint64_t Worker::most_under_way() const {
    if (!paced_) return Pace::kMostBytes;
    return alone_ ? std::max(pace_.limit_bytes(), lane_.config().paced_bytes) : pace_.limit_bytes();
}

void Worker::start_next_read() {
    Work& work = *part_.work;
    // Claiming may have taken long enough for the reason to be over.
    if (broken_.has_value()) set_up();
    if (broken_.has_value()) {
        if (tally_ != nullptr) tally_->fail(0);
        work.transfer->fail(*broken_);
    }
    bool skip = work.failed || work.transfer->aborted();
    if (!skip) {
        ReadOp& op = work.reads[part_.next];
        place_read(work, op);
        note_start(op);
        try {
            reader_->start(op);
            ++part_.next;
            ++reads_under_way_;
            bytes_under_way_ += op.bytes;
        } catch (const std::exception& error) {
            if (tally_ != nullptr) tally_->fail(0);
            work.transfer->fail(as_error(error));
            skip = true;
        }
    }
    if (skip) {
        work.failed = true;
        finish_reads(work, part_.end - part_.next, shared_);
        part_.next = part_.end;
    }
    // The last read keeps the work alive by itself.
    if (part_.empty()) part_ = Part{};
}

void Worker::collect() {
    arrived_.clear();
    reader_->collect(arrived_);
    if (timed() && !one_by_one_) now_ns_ = now_ns();
    if (paced_) note_pace();
    for (const ReadOp* op : arrived_) {
        Work& work = *op->owner;
        --reads_under_way_;
        bytes_under_way_ -= op->bytes;
        note_end(*op);
        if (op->failed()) {
            work.failed = true;
            try {
                work.transfer->fail(op->errnum != 0 ? op->file->read_failed(op->offset, op->wanted, op->errnum)
                                                    : op->file->ended_early(op->offset, op->wanted, op->done));
            } catch (const std::exception& error) {
                work.transfer->fail(as_error(error));
            }
        }
    }
}

void Worker::deliver() {
    for (const ReadOp* op : arrived_) finish_reads(*op->owner, 1, shared_);
}

}  // namespace gdsstream
