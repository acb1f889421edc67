// Where a reader thread runs: where the engine wants it, or on the one CPU that takes the interrupts of the disk.
//
// A virtual disk with a single queue brings what it has read together, by one interrupt. Elsewhere a thread is woken
// by that CPU, which takes tens of microseconds on a virtual machine whose processors sleep, and the disk has nothing
// to do until it has heard of the next reads.
#pragma once

#include <sched.h>

#include <vector>

namespace gdsstream {

class Placement {
  public:
    // Of the calling thread, which alone may use it. It moves to `cpus`; where those are none, it stays as it is.
    void begin(const std::vector<int>& cpus);
    // Moves to `cpu`, if that is one that it may use; with a negative one to where it was at first.
    void follow(int cpu);

  private:
    cpu_set_t usual_{};
    int at_ = -1;
};

}  // namespace gdsstream
