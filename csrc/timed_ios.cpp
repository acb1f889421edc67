#include "timed_ios.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "signals.hpp"

namespace gdsstream {

namespace {

constexpr std::chrono::microseconds kPoll{50};

std::string path_of(int descriptor) {
    char path[4096];
    const ssize_t length = ::readlink(("/proc/self/fd/" + std::to_string(descriptor)).c_str(), path, sizeof path);
    return length > 0 ? std::string(path, static_cast<std::size_t>(length))
                      : "descriptor " + std::to_string(descriptor);
}

// Until every byte has moved.
void move_full(const TimedIo& io, char* memory, bool write) {
    std::uint64_t done = 0;
    while (done < io.bytes) {
        const auto offset = static_cast<off_t>(io.offset + done);
        const ssize_t count = write ? ::pwrite(io.descriptor, memory + done, io.bytes - done, offset)
                                    : ::pread(io.descriptor, memory + done, io.bytes - done, offset);
        if (count > 0) {
            done += static_cast<std::uint64_t>(count);
            continue;
        }
        const int errnum = errno;
        if (count < 0 && errnum == EINTR) continue;
        const std::string what = std::string(write ? "writing " : "reading ") + std::to_string(io.bytes) +
                                 " bytes at byte " + std::to_string(io.offset) + " of " + path_of(io.descriptor);
        if (count == 0) {
            throw Error(ErrorKind::short_read,
                        what + ": the file ends " + std::to_string(io.bytes - done) + " bytes early");
        }
        throw Error(ErrorKind::read, what + " failed: " + errno_text(errnum), errnum);
    }
}

double since(std::chrono::steady_clock::time_point began) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

}  // namespace

// A thread's buffers, and which copies out of them are under way.
class TimedIos::Lane {
  public:
    Lane(TimedIos& owner, unsigned thread) : owner_(owner), slots_(owner.config_.buffers) {
        const TimedIosConfig& config = owner.config_;
        for (unsigned i = 0; i < config.buffers; ++i) {
            slots_[i].memory = reinterpret_cast<char*>(config.memory) +
                               (std::uint64_t{thread} * config.buffers + i) * config.buffer_bytes;
            if (owner.device_ != nullptr) slots_[i].copied = cuda::Event(owner.device_);
        }
        if (owner.device_ != nullptr) stream_ = owner.device_->copy_stream(thread);
    }

    void make(std::size_t number) {
        const TimedIo& io = owner_.ios_[number];
        if (slots_.empty()) {
            const auto began = Clock::now();
            move_full(io, reinterpret_cast<char*>(io.address), owner_.write_);
            owner_.seconds_[number] = since(began);
            return;
        }
        Slot& slot = slots_[turn_++ % slots_.size()];
        land(slot);
        slot.began = Clock::now();
        slot.number = number;
        if (!owner_.write_) move_full(io, slot.memory, false);
        copy(slot, io);
        // A write has to wait for its bytes; with one buffer, so has the next read.
        if (owner_.write_ || slots_.size() == 1) land(slot);
        if (owner_.write_) {
            move_full(io, slot.memory, true);
            owner_.seconds_[number] = since(slot.began);
        }
    }

    void finish() {
        for (Slot& slot : slots_) land(slot);
    }

    // Behind a failure: nothing may be copied any more when the buffers' owner hears of it. Asks the stream: what
    // failed may be the event that was to tell of a copy.
    void give_up() noexcept {
        for (Slot& slot : slots_) slot.flying = false;
        if (stream_ == nullptr) return;
        try {
            while (!cuda::idle(stream_)) std::this_thread::sleep_for(kPoll);
        } catch (const std::exception&) {
            // The device is lost, its copies with it, and the first failure is told.
        }
    }

  private:
    struct Slot {
        char* memory = nullptr;
        cuda::Event copied;
        Clock::time_point began;
        std::size_t number = 0;
        bool flying = false;
    };

    void copy(Slot& slot, const TimedIo& io) {
        slot.flying = true;
        if (owner_.device_ == nullptr) {
            char* there = reinterpret_cast<char*>(io.address);
            std::memcpy(owner_.write_ ? slot.memory : there, owner_.write_ ? there : slot.memory, io.bytes);
            return;
        }
        const cuda::Driver& driver = *cuda::driver();
        cuda::check(owner_.write_ ? driver.copy_to_host(slot.memory, io.address, io.bytes, stream_)
                                  : driver.copy_to_device(io.address, slot.memory, io.bytes, stream_),
                    "copying an io");
        slot.copied.record(stream_);
    }

    void land(Slot& slot) {
        if (!slot.flying) return;
        if (owner_.device_ != nullptr) slot.copied.synchronize();
        slot.flying = false;
        owner_.seconds_[slot.number] = since(slot.began);
    }

    TimedIos& owner_;
    std::vector<Slot> slots_;
    cuda::StreamHandle stream_ = nullptr;
    std::size_t turn_ = 0;
};

TimedIos::TimedIos(const TimedIosConfig& config) : config_(config) {
    if (config_.threads == 0) throw Error(ErrorKind::config, "threads is 0; it has to be at least 1");
    if (config_.device >= 0 && config_.buffers == 0) {
        throw Error(ErrorKind::config, "ios to a device need buffers in host memory");
    }
    if (config_.device >= 0) device_ = cuda::Device::open(config_.device, config_.threads);
    threads_.reserve(config_.threads);
    const SignalsBlocked blocked;
    try {
        for (unsigned i = 0; i < config_.threads; ++i) threads_.emplace_back([this, i] { run(i); });
    } catch (const std::exception& error) {
        const std::string count = std::to_string(threads_.size());
        close();
        throw Error(ErrorKind::unavailable, "only " + count + " of " + std::to_string(config_.threads) +
                                                " threads could be started: " + error.what());
    }
}

TimedIos::~TimedIos() { close(); }

void TimedIos::close() {
    {
        // Together: who waits must not find threads that stopped, and no close.
        const std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
        stop_ = true;
    }
    begun_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
}

void TimedIos::begin(std::vector<TimedIo> ios, bool write) {
    for (const TimedIo& io : ios) {
        if (config_.buffers > 0 && io.bytes > config_.buffer_bytes) {
            throw Error(ErrorKind::config, "an io of " + std::to_string(io.bytes) + " bytes is more than a buffer of " +
                                               std::to_string(config_.buffer_bytes));
        }
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closing_) throw Error(ErrorKind::closed, "these threads have ended");
    if (running_ > 0) throw Error(ErrorKind::config, "ios are under way already");
    seconds_.assign(ios.size(), 0.0);
    ios_ = std::move(ios);
    write_ = write;
    next_ = 0;
    stop_ = false;
    failure_.reset();
    running_ = config_.threads;
    ++turn_;
    begun_.notify_all();
}

bool TimedIos::wait(double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!ended_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return running_ == 0; })) return false;
    if (failure_.has_value()) throw *failure_;
    if (closing_ && next_ < ios_.size()) throw Error(ErrorKind::closed, "these threads ended before all ios were made");
    return true;
}

void TimedIos::run(unsigned thread) {
    ::pthread_setname_np(::pthread_self(), "gdsstream");
    std::uint64_t seen = 0;
    std::optional<Lane> lane;
    for (;;) {
        {
            std::unique_lock<std::mutex> lock(mutex_);
            begun_.wait(lock, [&] { return closing_ || turn_ != seen; });
            // What was begun is ended, so that nobody waits for it for ever.
            if (turn_ == seen) return;
            seen = turn_;
        }
        std::optional<Error> failure;
        try {
            if (!lane.has_value()) {
                if (device_ != nullptr) device_->attach_thread();
                lane.emplace(*this, thread);
            }
            take_ios(*lane);
        } catch (const std::exception& error) {
            failure = as_error(error);
            stop_ = true;
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        if (failure.has_value() && !failure_.has_value()) failure_ = failure;
        if (--running_ == 0) ended_.notify_all();
    }
}

void TimedIos::take_ios(Lane& lane) {
    try {
        while (!stop_) {
            const std::size_t number = next_.fetch_add(1, std::memory_order_relaxed);
            if (number >= ios_.size()) break;
            lane.make(number);
        }
        lane.finish();
    } catch (...) {
        lane.give_up();
        throw;
    }
}

}  // namespace gdsstream
