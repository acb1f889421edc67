#include "lane.hpp"

#include <algorithm>
#include <optional>
#include <system_error>
#include <utility>

#include "signals.hpp"
#include "worker.hpp"

namespace gdsstream {

namespace {

// A part smaller than this costs more to hand out than to read.
constexpr std::uint64_t kMinPartBytes = 64 << 10;
// Parts for each worker, so that a short transfer ends on all of them at about the same time.
constexpr std::uint64_t kPartsPerThread = 4;

}  // namespace

Lane::Lane(LaneConfig config, CutRules rules, std::shared_ptr<Shared> shared, StagingRing& ring)
    : config_(std::move(config)),
      rules_(rules),
      shared_(std::move(shared)),
      ring_(ring),
      copied_(config_.ledger != nullptr ? &config_.ledger->open() : nullptr) {}

Lane::~Lane() { stop(); }

void Lane::enqueue(std::shared_ptr<Transfer> transfer, std::vector<Task> tasks) {
    if (tasks.empty()) return;
    std::uint64_t bytes = 0;
    for (const Task& task : tasks) bytes += task.bytes;
    const std::uint64_t share = align_up(bytes / (config_.threads * kPartsPerThread) + 1, kPageBytes);
    const std::uint64_t part_bytes = std::clamp(share, std::min(kMinPartBytes, rules_.read_bytes), rules_.read_bytes);
    std::optional<Error> refused;
    bool fewer_threads = false;
    {
        std::lock_guard lock(mutex_);
        if (stopping_) {
            refused = Error(ErrorKind::closed, "the engine was closed while a transfer was submitted");
        } else {
            fewer_threads = !start_threads_locked();
            if (threads_.empty()) {
                refused = Error(ErrorKind::unavailable,
                                "no reader thread could be started; raise the limit of threads (ulimit -u) or of "
                                "memory (ulimit -v), or lower num_threads");
            }
        }
        if (!refused) {
            const std::size_t count = tasks.size();
            queue_.push_back(Queued{transfer, std::move(tasks), 0, part_bytes});
            shared_->activity.begin(count);
            wake_one();
        }
    }
    if (refused) {
        // Other lanes may have begun: the transfer fails and drains as for any other reason.
        transfer->fail(*refused);
        for (const Task& task : tasks) transfer->retire(task.group);
        return;
    }
    if (fewer_threads && shared_->note) {
        shared_->note("fewer reader threads than asked for: the limit of threads or of memory is reached");
    }
}

void Lane::start_threads() {
    std::lock_guard lock(mutex_);
    start_threads_locked();
}

bool Lane::start_threads_locked() {
    const SignalsBlocked blocked;  // threads inherit the mask
    try {
        while (!stopping_ && threads_.size() < config_.threads) {
            threads_.emplace_back([this, first = threads_.empty()] { Worker(*this, *shared_, first).run(); });
        }
        return true;
    } catch (const std::system_error&) {
        return false;
    }
}

bool Lane::busy() const {
    std::lock_guard lock(mutex_);
    return !queue_.empty() || open_ != nullptr || next_ != nullptr;
}

bool Lane::claim(Part& part, bool wait, bool first) {
    std::unique_lock lock(mutex_);
    for (;;) {
        const bool mine = first || !is_for_first();
        if (mine && hand_out(part)) {
            if (due_ahead()) make_next(lock);
            return true;
        }
        if (mine && !opening_ && next_ != nullptr) {
            if (!open_next(lock, wait)) return false;
            continue;
        }
        if (mine && !opening_ && !queue_.empty()) {
            make_next(lock);
            continue;
        }
        // The first worker stays to the end.
        if (!wait || (stopping_ && (!first || (queue_.empty() && !opening_)))) return false;
        if (!first) {
            changed_.wait(lock);
            continue;
        }
        first_waits_ = true;
        first_changed_.wait(lock);
        first_waits_ = false;
    }
}

bool Lane::is_for_first() const {
    const Work* work = open_ != nullptr ? open_.get() : next_.get();
    return work != nullptr && work->near_cpu >= 0;
}

void Lane::wake() {
    first_changed_.notify_one();
    if (!is_for_first()) changed_.notify_all();
}

void Lane::wake_one() {
    if (first_waits_) {
        first_changed_.notify_one();
    } else if (!is_for_first()) {
        changed_.notify_one();
    }
}

bool Lane::hand_out(Part& part) {
    if (open_ == nullptr) return false;
    part.work = open_;
    part.next = handed_out_;
    std::uint64_t bytes = 0;
    while (handed_out_ < open_->reads.size() &&
           (bytes == 0 || bytes + open_->reads[handed_out_].bytes <= part_bytes_)) {
        bytes += open_->reads[handed_out_++].bytes;
    }
    part.end = handed_out_;
    if (handed_out_ == open_->reads.size()) open_.reset();
    return true;
}

bool Lane::due_ahead() const {
    return !opening_ && next_ == nullptr && !queue_.empty() && threads_.size() > 1 &&
           (open_ == nullptr || 2 * handed_out_ >= open_->reads.size());
}

void Lane::make_next(std::unique_lock<std::mutex>& lock) {
    Queued& front = queue_.front();
    const Task task = front.tasks[front.next];
    const std::shared_ptr<Transfer> transfer = front.transfer;
    const std::uint64_t part_bytes = front.part_bytes;
    opening_ = true;
    lock.unlock();

    std::shared_ptr<Work> work;
    try {
        CutRules rules = rules_;
        rules.read_bytes = part_bytes;
        if (!transfer->aborted()) work = make_work(transfer, task, config_, rules, *shared_, ring_);
    } catch (const std::exception& error) {
        transfer->fail(as_error(error));
    }
    if (work == nullptr) retire(*transfer, task, *shared_);

    lock.lock();
    opening_ = false;
    // Only who is opening takes tasks off, and others only append: the front is still the same.
    if (++queue_.front().next == queue_.front().tasks.size()) queue_.pop_front();
    next_ = std::move(work);
    next_part_bytes_ = part_bytes;
    wake();
}

bool Lane::open_next(std::unique_lock<std::mutex>& lock, bool may_wait) {
    const std::shared_ptr<Work> work = next_;
    opening_ = true;
    lock.unlock();
    bool open = false;
    bool over = work->transfer->aborted();
    if (!over) {
        try {
            open = take_slot(work, may_wait);
            // Mapped files need no reads: there is nothing to hand out.
            if (open && work->reads.empty()) {
                work->copied = copied_;
                finish_reads(*work, 0, *shared_);
            }
        } catch (const std::exception& error) {
            work->transfer->fail(as_error(error));
            over = true;
        }
    }
    if (over) retire(*work->transfer, work->task, *shared_);
    lock.lock();
    opening_ = false;
    if (!open && !over) {
        // Somebody who can afford to wait for a slot should try.
        wake_one();
        return false;
    }
    next_.reset();
    if (open && !work->reads.empty()) {
        open_ = work;
        handed_out_ = 0;
        part_bytes_ = next_part_bytes_;
    }
    wake();
    return true;
}

void Lane::stop() {
    std::vector<std::thread> threads;
    {
        const auto close = [](Transfer& transfer) {
            transfer.fail(Error(ErrorKind::closed, "the engine was closed while a transfer was under way"));
        };
        std::lock_guard lock(mutex_);
        stopping_ = true;
        if (next_ != nullptr) close(*next_->transfer);
        for (Queued& queued : queue_) close(*queued.transfer);
        threads.swap(threads_);
    }
    first_changed_.notify_all();
    changed_.notify_all();
    for (std::thread& thread : threads) thread.join();
}

std::size_t Lane::threads_started() const {
    std::lock_guard lock(mutex_);
    return threads_.size();
}

}  // namespace gdsstream
