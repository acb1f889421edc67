// A lane: the tasks that one kind of Reader works off, and the threads that do it.
//
// Transfers queue up first come, first served; each worker claims a task at a time. Threads start with the first
// task, so that a lane that is never used costs nothing.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "reader.hpp"
#include "ring.hpp"
#include "sink.hpp"
#include "task.hpp"
#include "transfer.hpp"

namespace gdsstream {

enum class ReaderKind { pread, uring, mapped };

struct LaneConfig {
    ReaderKind reader = ReaderKind::pread;
    bool direct = false;
    unsigned threads = 1;
    unsigned depth = 1;            // reads under way in each thread
    std::uint64_t read_bytes = 0;  // the most that one read takes
    bool fixed_buffers = false;
    std::string faults;  // see with_faults()
};

struct Claim {
    std::shared_ptr<Transfer> transfer;
    Task task;
};

// What one worker has under way for one claim.
struct Work {
    Claim claim;
    Slot* slot = nullptr;
    std::vector<ReadOp> reads;
    std::vector<CopySpan> copies;  // sources are addresses here
    std::size_t started = 0;
    std::size_t finished = 0;
    bool failed = false;
};

struct Counters {
    std::atomic<std::uint64_t> reads{0};
    std::atomic<std::uint64_t> read_bytes{0};
    std::atomic<std::uint64_t> copies{0};
    std::atomic<std::uint64_t> copied_bytes{0};
    std::atomic<std::uint64_t> tasks{0};
    std::atomic<std::uint64_t> failures{0};
};

// What workers share with the engine.
struct Shared {
    std::shared_ptr<Sink> sink;
    std::shared_ptr<StagingRing> ring;
    std::vector<int> cpus;  // where workers run; empty: anywhere
    Counters counters;
    std::function<void(const std::string&)> note;
};

class Lane {
  public:
    Lane(LaneConfig config, CutRules rules, std::shared_ptr<Shared> shared);
    ~Lane();
    Lane(const Lane&) = delete;
    Lane& operator=(const Lane&) = delete;

    const LaneConfig& config() const { return config_; }
    const CutRules& rules() const { return rules_; }

    void enqueue(std::shared_ptr<Transfer> transfer, std::vector<Task> tasks);
    // A task, or false: none now (with `wait`: the lane is stopping).
    bool claim(Claim& claim, bool wait);
    // No more tasks are handed out; those queued are retired unread. Joins the threads.
    void stop();
    std::size_t threads_started() const;

  private:
    struct Queued {
        std::shared_ptr<Transfer> transfer;
        std::vector<Task> tasks;
        std::size_t next = 0;
    };

    const LaneConfig config_;
    const CutRules rules_;
    const std::shared_ptr<Shared> shared_;
    mutable std::mutex mutex_;
    std::condition_variable arrived_;
    std::deque<Queued> queue_;
    bool stopping_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace gdsstream
