// A lane: the tasks that one kind of Reader works off, and the threads that do it.
//
// Transfers queue up first come, first served. A task fills a slot of many megabytes, so that the copy out of it is
// large; the workers take it in parts, so that the slot is filled by all of them at once. While one is handed out, the
// lists of the next are made, which takes long where its reads are small; its slot is taken when it is its turn.
// Threads start with the first task: a lane that is never used costs nothing.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "work.hpp"

namespace gdsstream {

// Reads [next, end) of a work: one worker's part of it.
struct Part {
    std::shared_ptr<Work> work;
    std::size_t next = 0;
    std::size_t end = 0;

    bool empty() const { return next == end; }
};

class Lane {
  public:
    // `ring` is what its tasks' slots come from; it has to stay until the threads are joined.
    Lane(LaneConfig config, CutRules rules, std::shared_ptr<Shared> shared, StagingRing& ring);
    ~Lane();
    Lane(const Lane&) = delete;
    Lane& operator=(const Lane&) = delete;

    const LaneConfig& config() const { return config_; }
    const CutRules& rules() const { return rules_; }
    StagingRing& ring() const { return ring_; }

    void enqueue(std::shared_ptr<Transfer> transfer, std::vector<Task> tasks);
    // A part that is not empty; or false: none now (with `wait`: the lane is stopping). Work near the interrupts is for
    // the `first` worker.
    bool claim(Part& part, bool wait, bool first);
    // Transfers that are queued fail; their tasks are retired unread. Joins the threads.
    void stop();
    // Whether tasks wait to be begun.
    bool busy() const;
    // Starts the threads before the first task does.
    void start_threads();
    std::size_t threads_started() const;

  private:
    struct Queued {
        std::shared_ptr<Transfer> transfer;
        std::vector<Task> tasks;
        std::size_t next = 0;
        std::uint64_t part_bytes = 0;
    };

    // false: fewer than configured, since the system gives no more.
    bool start_threads_locked();
    // The work that is read next, if its lists are made, is for the first worker only.
    bool is_for_first() const;
    // Wakes those who have something to do. A thread that is woken in vain costs the one that wakes it.
    void wake();
    // The same for a single thing to do.
    void wake_one();
    bool hand_out(Part& part);
    // Whether the next task's lists should be made while the open one is still being handed out.
    bool due_ahead() const;
    // Takes a task off the queue and makes its lists, without the lock, which it takes again.
    void make_next(std::unique_lock<std::mutex>& lock);
    // Opens next_ without the lock, which it takes again. false: no slot is free now.
    bool open_next(std::unique_lock<std::mutex>& lock, bool may_wait);

    const LaneConfig config_;
    const CutRules rules_;
    const std::shared_ptr<Shared> shared_;
    StagingRing& ring_;
    Tally* const copied_;  // of work without reads; written by whoever opens a task, one at a time
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::condition_variable first_changed_;  // what the first worker waits for
    std::deque<Queued> queue_;
    bool first_waits_ = false;
    bool opening_ = false;        // some worker makes or opens the next task
    std::shared_ptr<Work> next_;  // made; not open yet
    std::uint64_t next_part_bytes_ = 0;
    std::shared_ptr<Work> open_;
    std::size_t handed_out_ = 0;  // reads of open_
    std::uint64_t part_bytes_ = 0;
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace gdsstream
