// One task on its way: its reads, its slot and its copies. The workers of a lane fill it together; the one that
// finishes its last read delivers it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ledger.hpp"
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
    std::uint64_t paced_bytes = 0;  // the least of a pace (pace.hpp), for readers that keep many under way; 0: none
    // Work whose reads have as much on average, or more, is for the lane's first worker alone, which makes them on the
    // CPU that takes their disk's interrupts; 0: none is.
    std::uint64_t near_interrupts_bytes = 0;
    std::uint64_t slot_bytes = 0;  // of a staging ring of its own; 0: the engine's, and no more of this
    std::uint64_t staging_bytes = 0;
    std::string faults;              // see with_faults()
    std::shared_ptr<Ledger> ledger;  // what the lane reads is counted there; null: not at all
};

struct Counters {
    std::atomic<std::uint64_t> transfers{0};
    std::atomic<std::uint64_t> reads{0};
    std::atomic<std::uint64_t> read_bytes{0};
    std::atomic<std::uint64_t> copies{0};
    std::atomic<std::uint64_t> copied_bytes{0};
    std::atomic<std::uint64_t> tasks{0};
    std::atomic<std::uint64_t> failures{0};
    std::atomic<std::uint64_t> ring_wait_us{0};  // see StagingRing
};

// What workers share with the engine.
struct Shared {
    explicit Shared(std::shared_ptr<Activity> process = nullptr) : activity(std::move(process)) {}

    std::shared_ptr<Sink> sink;
    // The engine's, and those of lanes that have one of their own; none after close.
    std::vector<std::shared_ptr<StagingRing>> rings;
    std::vector<int> cpus;  // where workers run; empty: anywhere
    Counters counters;
    Activity activity;  // tasks of any transfers
    // Bytes of files in host memory. Shared with the files, which may outlive the engine.
    std::shared_ptr<std::atomic<std::uint64_t>> held_bytes = std::make_shared<std::atomic<std::uint64_t>>(0);
    std::function<void(const std::string&)> note;
};

struct Work {
    std::shared_ptr<Transfer> transfer;
    Task task;
    bool staged = false;  // its reads land in a slot
    StagingRing* ring = nullptr;
    Slot* slot = nullptr;  // of the ring; taken when it is opened
    std::vector<ReadOp> reads;
    std::vector<CopySpan> copies;  // sources lie in the slot, or are addresses where there is none
    // The CPU on which the lane's first worker reads all of it; < 0: all workers read it, anywhere.
    int near_cpu = -1;
    std::atomic<std::size_t> left{0};
    std::atomic<bool> failed{false};
    Tally* copied = nullptr;  // where its copies are counted: those of work without reads
    // Reads under way know their work by a bare pointer; it lives until the last of them is finished.
    std::shared_ptr<Work> alive;
};

// Makes the reads and copies of `task`.
std::shared_ptr<Work> make_work(std::shared_ptr<Transfer> transfer, const Task& task, const LaneConfig& lane,
                                const CutRules& rules, Shared& shared, StagingRing& ring);

// The work is ready to be read. false: it needs a slot and none is free (only without `may_wait`).
// Throws Error(memory | cuda) where no slot can be had at all; the task is then not retired.
bool take_slot(const std::shared_ptr<Work>& work, bool may_wait);

// Where the bytes of a read go, which is known once the work has its slot.
void place_read(const Work& work, ReadOp& op);

// A task that was queued is over, read or not.
void retire(Transfer& transfer, const Task& task, Shared& shared);

// `count` reads of the work are over. The last of them delivers the bytes, frees the slot and retires the task.
void finish_reads(Work& work, std::size_t count, Shared& shared);

}  // namespace gdsstream
