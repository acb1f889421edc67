// Timed ios under load: buffers or none, on the CPU and on the stand-in driver's devices, and by chance a failing copy,
// an io past the end of its file, and a close in the middle by another thread.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "stress_parts.hpp"
#include "timed_ios.hpp"

namespace gdsstream {

// What one round of them came to; `wrong` says what should not have been.
struct IosRound {
    bool right = false;
    std::string wrong;
};

inline std::string check_ios(const Source& source, const std::vector<TimedIo>& ios,
                             const std::vector<double>& seconds) {
    for (std::size_t i = 0; i < ios.size(); ++i) {
        const auto* delivered = reinterpret_cast<const void*>(ios[i].address);
        if (std::memcmp(delivered, source.bytes.data() + ios[i].offset, ios[i].bytes) != 0) return "a wrong byte";
        if (seconds[i] <= 0) return "no time";
    }
    return "";
}

inline IosRound run_ios_round(Random& random, const Fake& fake, const std::vector<Source>& sources) {
    const Source& source = sources[random.below(2)];
    TimedIosConfig config;
    config.threads = 1 + static_cast<unsigned>(random.below(5));
    config.device = fake.there() && random.chance(60) ? static_cast<int>(random.below(2)) : -1;
    config.buffers = static_cast<unsigned>(random.below(4)) + (config.device >= 0 ? 1 : 0);
    config.buffer_bytes = 8 << 10;
    Bytes memory(config.threads * config.buffers * config.buffer_bytes + 1);
    config.memory = reinterpret_cast<std::uint64_t>(memory.data());
    const bool failing = config.device >= 0 && random.chance(30);
    const bool past_end = random.chance(20);
    const bool closing = random.chance(40);
    const std::string text = "ios on device " + std::to_string(config.device) + ", " + std::to_string(config.threads) +
                             " threads, " + std::to_string(config.buffers) + " buffers" +
                             (failing ? ", failing copies" : "") + (past_end ? ", past the end" : "") +
                             (closing ? ", closed early" : "") + ": ";

    std::vector<TimedIo> ios(50 + random.below(400));
    Bytes target(ios.size() * config.buffer_bytes);
    const int descriptor = ::open(source.path.c_str(), O_RDONLY | O_CLOEXEC);
    for (std::size_t i = 0; i < ios.size(); ++i) {
        const std::uint64_t bytes = 1 + random.below(config.buffer_bytes);
        ios[i] = TimedIo{descriptor, random.below(source.bytes.size() - bytes), bytes,
                         reinterpret_cast<std::uint64_t>(target.data()) + i * config.buffer_bytes};
    }
    if (past_end) ios[random.below(ios.size())].offset = source.bytes.size();

    IosRound round;
    {
        // Outlives the ios: what is registered may be copied from until they have ended.
        const std::shared_ptr<cuda::Device> device = config.device >= 0 ? cuda::Device::open(config.device) : nullptr;
        cuda::HostRegistration registration;
        if (device != nullptr) {
            const cuda::Device::Scope scope(*device);
            registration = cuda::HostRegistration(device, memory.data(), memory.size(), false);
        }
        TimedIos timed(config);
        if (failing) fake.fail("cuMemcpyHtoDAsync_v2", 999, static_cast<int>(random.below(ios.size())), 1);
        std::jthread closer;
        try {
            for (int turn = 0; turn < 2; ++turn) {
                timed.begin(ios, false);
                if (closing && turn == 1) {
                    const std::chrono::microseconds pause(random.below(3000));
                    closer = std::jthread([&timed, pause] {
                        std::this_thread::sleep_for(pause);
                        timed.close();
                    });
                }
                while (!timed.wait(0.001)) {
                }
                round.right = true;
                if (past_end) round.wrong = text + "read what is not there";
                const std::string found = check_ios(source, ios, timed.seconds());
                if (!found.empty()) round.wrong = text + found;
            }
        } catch (const Error& error) {
            const bool expected = (error.kind() == ErrorKind::short_read && past_end) ||
                                  (error.kind() == ErrorKind::cuda && failing) ||
                                  (error.kind() == ErrorKind::closed && closing);
            if (!expected) round.wrong = text + error.what();
        }
    }
    if (fake.there()) fake.clear_faults();
    ::close(descriptor);
    return round;
}

}  // namespace gdsstream
