#include "placement.hpp"

#include <pthread.h>

namespace gdsstream {

namespace {

// A preference: in a container whose cpuset excludes it, the thread stays where it may run.
void run_on(const cpu_set_t& set) { ::pthread_setaffinity_np(::pthread_self(), sizeof set, &set); }

}  // namespace

void Placement::begin(const std::vector<int>& cpus) {
    if (!cpus.empty()) {
        cpu_set_t set;
        CPU_ZERO(&set);
        for (const int cpu : cpus) CPU_SET(static_cast<unsigned>(cpu), &set);
        run_on(set);
    }
    // Machines with more CPUs than a cpu_set_t has are left alone: no CPU is one that it may use then.
    if (::pthread_getaffinity_np(::pthread_self(), sizeof usual_, &usual_) != 0) CPU_ZERO(&usual_);
}

void Placement::follow(int cpu) {
    // Numbers that a set has no place for are in none.
    if (cpu >= 0 && !CPU_ISSET(static_cast<unsigned>(cpu), &usual_)) cpu = -1;
    if (cpu == at_) return;
    at_ = cpu;
    if (cpu < 0) {
        run_on(usual_);
        return;
    }
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<unsigned>(cpu), &set);
    run_on(set);
}

}  // namespace gdsstream
