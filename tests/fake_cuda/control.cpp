// What tests steer and read: faults, delays, the pause, the counts.
#include "driver.hpp"
#include "fake_cuda.h"

using namespace fake;

extern "C" {

int fake_cuda_stats(fake_cuda_stats_t* out) {
#define FAKE_CUDA_FIELD(name) out->name = counters.name;
    FAKE_CUDA_COUNTERS(FAKE_CUDA_FIELD)
#undef FAKE_CUDA_FIELD
    return 0;
}

unsigned long fake_cuda_counter(const char* name) {
    const std::string_view wanted = name;
#define FAKE_CUDA_FIELD(name) \
    if (wanted == #name) return counters.name;
    FAKE_CUDA_COUNTERS(FAKE_CUDA_FIELD)
#undef FAKE_CUDA_FIELD
    const int symbol = find_symbol(wanted);
    return symbol < 0 ? 0 : calls_of[symbol].load();
}

int fake_cuda_fail(const char* symbol, int result, int after_n_calls, int times) {
    const int index = find_symbol(symbol);
    if (index < 0 || Driver::instance().forked()) return -1;
    if (times == 0) return 0;
    const Lock lock(Scheduler::instance().mutex);
    Driver::instance().faults.push_back({index, result, after_n_calls, times});
    return 0;
}

void fake_cuda_clear_faults() {
    if (Driver::instance().forked()) return;
    const Lock lock(Scheduler::instance().mutex);
    Driver::instance().faults.clear();
}

int fake_cuda_allocation(unsigned long long address, unsigned long long bytes) {
    if (Driver::instance().forked()) return -1;
    const Lock lock(Scheduler::instance().mutex);
    return Driver::instance().allocations.emplace(address, bytes).second ? 0 : -1;
}

unsigned long fake_cuda_place(unsigned long handle) {
    if (Driver::instance().forked()) return 0;
    const Lock lock(Scheduler::instance().mutex);
    Driver& driver = Driver::instance();
    Place place;
    if (const auto found = driver.streams.find(handle); found != driver.streams.end()) {
        place.emplace_back(found->second, found->second->submitted);
    } else if (handle == 0) {
        for (const Context& context : driver.contexts) {
            const auto& stream = context.default_stream;
            if (stream != nullptr) place.emplace_back(stream, stream->submitted);
        }
    }
    driver.places.emplace(++driver.last_place, std::move(place));
    return driver.last_place;
}

int fake_cuda_reached(unsigned long number) {
    if (Driver::instance().forked()) return 1;
    const Lock lock(Scheduler::instance().mutex);
    auto& places = Driver::instance().places;
    const auto found = places.find(number);
    if (found == places.end()) return 1;
    for (const auto& [stream, submitted] : found->second) {
        if (stream->completed < submitted) return 0;
    }
    places.erase(found);
    return 1;
}

void fake_cuda_set_delay_us(unsigned microseconds) { Scheduler::instance().set_delay_us(microseconds); }

void fake_cuda_pause(int on) {
    if (!Driver::instance().forked()) Scheduler::instance().pause(on != 0);
}

void fake_cuda_resume() { fake_cuda_pause(0); }

int fake_cuda_drain() { return !Driver::instance().forked() && Scheduler::instance().drain() ? 0 : -1; }

}  // extern "C"
