// A worker: one thread's Reader x Sink loop. It begins tasks while its reader has room, hands what has arrived to the
// sink, and retires tasks. It is the same for every route.
#pragma once

#include <list>
#include <memory>
#include <vector>

#include "lane.hpp"

namespace gdsstream {

class Worker {
  public:
    Worker(Lane& lane, Shared& shared) : lane_(lane), shared_(shared) {}
    void run();

  private:
    void set_up();
    void top_up();
    // Whether the claim is under way or over; false: no slot is free now.
    bool begin(Claim& claim);
    bool lay_out(Work& work);
    void start_reads();
    void collect();
    void deliver(Work& work);
    void finish(std::list<Work>::iterator work);
    void recycle(std::list<Work>::iterator work);
    void settle(Work& work);

    Lane& lane_;
    Shared& shared_;
    std::unique_ptr<Reader> reader_;
    std::unique_ptr<Error> broken_;  // why this worker cannot read; its tasks fail with it
    std::list<Work> active_;
    std::list<Work> spare_;  // kept for the capacity of their vectors
    bool has_pending_ = false;
    Claim pending_;
    std::vector<ReadOp*> arrived_;
    std::vector<ReadSpan> spans_;
};

}  // namespace gdsstream
