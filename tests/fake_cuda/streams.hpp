// Streams as threads: each runs its queue in order, every operation a little late, so that whatever is missing a fence
// is sooner or later seen without one.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "fake_cuda.h"

// Hidden: a process may hold the real libcuda as well, and nothing but the driver's names may be shared with it.
namespace fake __attribute__((visibility("hidden"))) {

    // Atomic, so that they can be read in any state, also in a forked child where the lock may be held for ever.
    struct Counters {
#define FAKE_CUDA_FIELD(name) std::atomic<unsigned long> name{0};
        FAKE_CUDA_COUNTERS(FAKE_CUDA_FIELD)
#undef FAKE_CUDA_FIELD
    };
    inline Counters counters;

    inline unsigned long environment(const char* name, unsigned long otherwise) {
        const char* text = std::getenv(name);
        return text != nullptr && *text != '\0' ? std::strtoul(text, nullptr, 10) : otherwise;
    }

    // One record of an event. Waiters keep the one that was the latest when they asked, whatever is recorded after it.
    struct Marker {
        bool done = false;
    };

    struct Operation {
        enum class Kind { copy, host_function, record, wait };
        Kind kind;
        std::shared_ptr<Marker> marker;  // what a record sets and a wait waits for
        std::function<void()> run;       // without the lock
        std::function<void()> retire;    // under the lock, right after
    };

    struct Context;

    struct Stream {
        Context* context = nullptr;
        std::deque<Operation> queue;
        unsigned long submitted = 0;
        unsigned long completed = 0;
        bool destroyed = false;
        std::condition_variable work;
        std::minstd_rand random;
    };

    using Lock = std::unique_lock<std::mutex>;

    // All streams of the process, and the one lock of the fake. Never destroyed: the workers outlive static
    // destructors.
    class Scheduler {
      public:
        // Guards everything in the fake that is not atomic.
        std::mutex mutex;

        static Scheduler& instance() {
            static Scheduler* const scheduler = new Scheduler;
            return *scheduler;
        }

        // nullptr when the system has no thread left.
        std::shared_ptr<Stream> start_stream(const Lock&, Context* context) {
            auto stream = std::make_shared<Stream>();
            stream->context = context;
            stream->random.seed(static_cast<unsigned>(seed_ + 7919 * ++started_));
            try {
                std::thread([this, stream] { work(*stream); }).detach();
            } catch (const std::system_error&) {
                return nullptr;
            }
            streams_.push_back(stream);
            return stream;
        }

        void destroy_stream(const Lock&, Stream& stream) {
            stream.destroyed = true;
            stream.work.notify_one();
        }

        void enqueue(const Lock&, Stream& stream, Operation operation) {
            ++stream.submitted;
            ++counters.in_flight_operations;
            if (operation.kind == Operation::Kind::copy) ++counters.in_flight_copies;
            stream.queue.push_back(std::move(operation));
            stream.work.notify_one();
        }

        // False when the process is exiting first.
        template <typename Predicate>
        bool wait(Lock& lock, Predicate predicate) {
            changed_.wait(lock, [&] { return exiting_ || predicate(); });
            return !exiting_;
        }

        // Waits for what was in the streams of `context` when called.
        bool wait_for_context(Lock& lock, const Context* context) {
            std::vector<std::pair<std::shared_ptr<Stream>, unsigned long>> targets;
            for (const auto& stream : streams_) {
                if (stream->context == context) targets.emplace_back(stream, stream->submitted);
            }
            return wait(lock, [&] {
                return std::all_of(targets.begin(), targets.end(),
                                   [](const auto& target) { return target.first->completed >= target.second; });
            });
        }

        void set_delay_us(unsigned microseconds) { delay_us_ = microseconds; }

        void pause(bool on) {
            Lock lock(mutex);
            paused_ = on;
            changed_.notify_all();
            // Host functions are left out: one of them may be waiting for the thread that pauses.
            if (on) wait(lock, [&] { return copies_running_ == 0; });
        }

        bool drain() {
            Lock lock(mutex);
            bool idle = false;
            wait(lock, [&] { return (idle = counters.in_flight_operations == 0) || paused_; });
            return idle;
        }

        bool exiting(const Lock&) const { return exiting_; }

        // From here on nothing touches memory that static destructors may free, and whoever waits is let go.
        void shut_down() {
            Lock lock(mutex);
            exiting_ = true;
            changed_.notify_all();
            changed_.wait(lock, [&] { return copies_running_ == 0; });
        }

      private:
        void work(Stream& stream) {
            Lock lock(mutex);
            for (;;) {
                stream.work.wait(lock, [&] { return !stream.queue.empty() || stream.destroyed; });
                if (stream.queue.empty()) break;
                Operation operation = std::move(stream.queue.front());
                stream.queue.pop_front();
                be_late(lock, stream);
                changed_.wait(lock, [&] {
                    const bool blocked = operation.kind == Operation::Kind::wait && !operation.marker->done;
                    return !exiting_ && !paused_ && !blocked;
                });
                execute(lock, operation);
                ++stream.completed;
                --counters.in_flight_operations;
                changed_.notify_all();
            }
            std::erase_if(streams_, [&](const auto& other) { return other.get() == &stream; });
        }

        void be_late(Lock& lock, Stream& stream) {
            const unsigned limit = delay_us_;
            if (limit == 0) return;
            const unsigned long delay = stream.random() % (limit + 1UL);
            lock.unlock();
            std::this_thread::sleep_for(std::chrono::microseconds(delay));
            lock.lock();
        }

        void execute(Lock& lock, Operation& operation) {
            const bool copies = operation.kind == Operation::Kind::copy;
            if (operation.run) {
                if (copies) ++copies_running_;
                lock.unlock();
                operation.run();
                lock.lock();
                if (copies) --copies_running_;
            }
            if (copies) --counters.in_flight_copies;
            if (operation.retire) operation.retire();
            if (operation.kind == Operation::Kind::record) operation.marker->done = true;
        }

        const unsigned long seed_ = environment("FAKE_CUDA_SEED", 1);
        std::atomic<unsigned> delay_us_{static_cast<unsigned>(environment("FAKE_CUDA_DELAY_US", 200))};
        std::condition_variable changed_;  // anything that somebody other than an idle worker may wait for
        std::vector<std::shared_ptr<Stream>> streams_;
        unsigned long started_ = 0;
        int copies_running_ = 0;
        bool paused_ = false;
        bool exiting_ = false;
    };

}  // namespace fake
