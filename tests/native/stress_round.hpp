// One round of the stress program: what it is made of by chance, and what may go wrong in it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "engine.hpp"
#include "stress_parts.hpp"

namespace gdsstream {
namespace {

constexpr std::uint64_t kSlotBytes = 64 << 10;
constexpr std::uint32_t kMappedLane = 1;  // as Round::config adds them

struct Round {
    int device = -1;
    unsigned slots = 1;
    bool close_early = false;
    bool touch = false;
    bool driver_faults = false;
    std::string faults;
    unsigned lanes = 0;
    std::shared_ptr<Ledger> ledger = std::make_shared<Ledger>(true);
    std::shared_ptr<Activity> process = std::make_shared<Activity>();

    static Round make(Random& random, const Fake& fake) {
        Round round;
        round.device = fake.there() && random.chance(75) ? static_cast<int>(random.below(2)) : -1;
        round.slots = 1 + static_cast<unsigned>(random.below(6));
        round.close_early = random.chance(40);
        round.touch = random.chance(15);
        round.driver_faults = round.device >= 0 && random.chance(25);
        if (random.chance(40)) round.faults = "eio@" + std::to_string(1 + random.below(60));
        if (random.chance(30)) round.faults += ",short@" + std::to_string(1 + random.below(60));
        if (random.chance(30)) round.faults += ",nomem@" + std::to_string(1 + random.below(60));
        if (random.chance(40)) round.faults += ",delay_us=" + std::to_string(random.below(300));
        if (!round.faults.empty() && round.faults.front() == ',') round.faults.erase(0, 1);
        return round;
    }

    EngineConfig config(Random& random) {
        EngineConfig config;
        config.device = device;
        config.slot_bytes = kSlotBytes;
        config.staging_bytes = slots * kSlotBytes;
        const bool uring = uring_unavailable_reason().empty();
        const auto add = [&](ReaderKind reader, bool direct) {
            LaneConfig lane;
            lane.reader = reader;
            lane.direct = direct;
            lane.threads = 1 + static_cast<unsigned>(random.below(3));
            lane.depth = reader == ReaderKind::uring ? 1 + static_cast<unsigned>(random.below(8)) : 1;
            lane.read_bytes = random.chance(50) ? 16 << 10 : kSlotBytes;
            lane.fixed_buffers = reader == ReaderKind::uring && random.chance(50);
            if (reader == ReaderKind::uring && random.chance(50)) lane.paced_bytes = 16384 << random.below(5);
            if (random.chance(50)) lane.near_interrupts_bytes = 4096 << random.below(4);
            if (random.chance(50)) {
                lane.slot_bytes = kSlotBytes << random.below(2);
                lane.staging_bytes = (1 + random.below(4)) * lane.slot_bytes;
            }
            lane.faults = faults;
            if (random.chance(50)) lane.ledger = ledger;
            config.lanes.push_back(lane);
        };
        add(ReaderKind::pread, false);
        add(ReaderKind::mapped, false);
        add(ReaderKind::pread, true);
        if (uring) add(ReaderKind::uring, false);
        if (uring) add(ReaderKind::uring, true);
        lanes = static_cast<unsigned>(config.lanes.size());
        config.process = process;
        return config;
    }

    bool allows(const Error& error) const {
        const bool has_eio = faults.find("eio") != std::string::npos;
        const bool has_short = faults.find("short") != std::string::npos;
        switch (error.kind()) {
            case ErrorKind::read:
                return has_eio;
            case ErrorKind::short_read:
                return has_short;
            case ErrorKind::changed:
                return touch;
            case ErrorKind::closed:
                return close_early;
            case ErrorKind::memory:
                return driver_faults || faults.find("nomem") != std::string::npos;
            case ErrorKind::cuda:
                return driver_faults;
            default:
                return false;
        }
    }

    std::string text() const {
        return "device " + std::to_string(device) + ", " + std::to_string(slots) + " slot(s)" +
               (close_early ? ", closed early" : "") + (touch ? ", touched" : "") +
               (driver_faults ? ", driver faults" : "") + (faults.empty() ? "" : ", " + faults);
    }
};

}  // namespace
}  // namespace gdsstream
