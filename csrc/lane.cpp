#include "lane.hpp"

#include <signal.h>

#include <utility>

#include "worker.hpp"

namespace gdsstream {

Lane::Lane(LaneConfig config, CutRules rules, std::shared_ptr<Shared> shared)
    : config_(std::move(config)), rules_(rules), shared_(std::move(shared)) {}

Lane::~Lane() { stop(); }

namespace {

// Signals belong to the interpreter's threads: a worker must not be the one that is interrupted.
class SignalsBlocked {
  public:
    SignalsBlocked() {
        sigset_t all;
        ::sigfillset(&all);
        ::pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

  private:
    sigset_t before_{};
};

}  // namespace

void Lane::enqueue(std::shared_ptr<Transfer> transfer, std::vector<Task> tasks) {
    if (tasks.empty()) return;
    const std::size_t count = tasks.size();
    {
        std::lock_guard lock(mutex_);
        queue_.push_back(Queued{std::move(transfer), std::move(tasks), 0});
        const SignalsBlocked blocked;  // threads inherit the mask
        while (threads_.size() < config_.threads) {
            threads_.emplace_back([this] { Worker(*this, *shared_).run(); });
        }
    }
    if (count < config_.threads) {
        for (std::size_t i = 0; i < count; ++i) arrived_.notify_one();
    } else {
        arrived_.notify_all();
    }
}

bool Lane::claim(Claim& claim, bool wait) {
    std::unique_lock lock(mutex_);
    if (wait) arrived_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return false;
    Queued& front = queue_.front();
    claim.task = front.tasks[front.next++];
    if (front.next == front.tasks.size()) {
        claim.transfer = std::move(front.transfer);
        queue_.pop_front();
    } else {
        claim.transfer = front.transfer;
    }
    return true;
}

void Lane::stop() {
    std::vector<std::thread> threads;
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
        for (Queued& queued : queue_) {
            queued.transfer->fail(Error(ErrorKind::closed, "the engine was closed while a transfer was under way"));
        }
        threads.swap(threads_);
    }
    arrived_.notify_all();
    for (std::thread& thread : threads) thread.join();
}

std::size_t Lane::threads_started() const {
    std::lock_guard lock(mutex_);
    return threads_.size();
}

}  // namespace gdsstream
