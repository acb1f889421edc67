// Blocking ios by threads of their own, each of them timed, as programs that measure storage make them: what bench's
// routes are made of, whose figures of single ios an interpreter's lock would bound. No part of loading: nothing is
// staged for others, ordered or fenced here.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "cuda.hpp"
#include "error.hpp"

namespace gdsstream {

struct TimedIo {
    int descriptor;
    std::uint64_t offset, bytes;
    // Where it goes, or comes from: host memory or, through buffers, the device's.
    std::uint64_t address;
};

struct TimedIosConfig {
    unsigned threads = 1;
    // Host memory of threads * buffers * buffer_bytes, which every io goes through; none: straight to its address.
    std::uint64_t memory = 0;
    std::uint64_t buffer_bytes = 0;
    unsigned buffers = 0;
    // Between the buffers and the addresses the driver copies, on a stream for each thread; -1: the thread itself.
    int device = -1;
};

// One caller at a time. A thread has one io under way or, reading through several buffers, copies of the ones before.
class TimedIos {
  public:
    // Starts the threads. Throws Error(config | unavailable | cuda).
    explicit TimedIos(const TimedIosConfig& config);
    ~TimedIos();
    TimedIos(const TimedIos&) = delete;
    TimedIos& operator=(const TimedIos&) = delete;

    // Lets go of the threads, behind the ios that are under way.
    void close();
    // Lets the threads take the ios in turn. Throws Error(config) for one that is larger than a buffer.
    void begin(std::vector<TimedIo> ios, bool write);
    // Whether all have ended, after `seconds` at most. Throws the first failure, once no thread does anything more, and
    // Error(closed) where a close came before the last of them.
    bool wait(double seconds);
    // Seconds of each io, from before its read or copy to behind both; a read through several buffers ends where its
    // buffer is needed again. Only behind `wait`.
    const std::vector<double>& seconds() const { return seconds_; }

  private:
    using Clock = std::chrono::steady_clock;
    class Lane;

    void run(unsigned thread);
    void take_ios(Lane& lane);

    const TimedIosConfig config_;
    std::shared_ptr<cuda::Device> device_;
    std::mutex mutex_;
    std::condition_variable begun_, ended_;
    std::uint64_t turn_ = 0;
    unsigned running_ = 0;
    bool closing_ = false;
    std::optional<Error> failure_;
    std::atomic<bool> stop_{false};
    std::atomic<std::size_t> next_{0};
    std::vector<TimedIo> ios_;
    std::vector<double> seconds_;
    bool write_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace gdsstream
