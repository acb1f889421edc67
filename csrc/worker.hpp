// A worker: one thread's Reader x Sink loop. It starts reads while its reader has room, collects those that arrived,
// and delivers the works that became complete. It is the same for every route.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "lane.hpp"
#include "pace.hpp"
#include "placement.hpp"

namespace gdsstream {

class Worker {
  public:
    // `first`: of its lane, which makes the reads near the interrupts.
    Worker(Lane& lane, Shared& shared, bool first)
        : lane_(lane),
          shared_(shared),
          first_(first),
          paced_(lane.config().paced_bytes > 0),
          pace_(lane.config().threads, lane.config().paced_bytes) {}
    void run();

  private:
    void set_up();
    void top_up(bool may_wait);
    void start_next_read();
    void collect();
    void deliver();
    void note_start(ReadOp& op);
    void note_end(const ReadOp& op);
    void note_pace();
    std::uint64_t most_under_way() const;
    bool timed() const { return tally_ != nullptr || paced_; }

    Lane& lane_;
    Shared& shared_;
    const bool first_;
    bool alone_ = false;  // what it claimed last is read by no other thread
    std::unique_ptr<Reader> reader_;
    std::optional<Error> broken_;  // why this worker cannot read; its parts fail with it
    Part part_;
    std::size_t reads_under_way_ = 0;
    std::uint64_t bytes_under_way_ = 0;
    const bool paced_;
    Pace pace_;
    Placement placement_;
    std::vector<ReadOp*> arrived_;
    Tally* tally_ = nullptr;  // where this thread counts, if anybody wants to know
    bool one_by_one_ = false;
    std::uint64_t small_reads_ = 0;
    std::uint64_t now_ns_ = 0;  // when parts were claimed or reads arrived last
};

}  // namespace gdsstream
