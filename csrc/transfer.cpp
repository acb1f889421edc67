#include "transfer.hpp"

#include <thread>
#include <utility>

namespace gdsstream {

namespace {

// Short against a layer's transfer (20 ms), long against the cost of a query (1 us).
constexpr std::chrono::microseconds kPoll{20};

}  // namespace

Transfer::Transfer(std::shared_ptr<Sink> sink, unsigned channel, Lists lists)
    : sink_(std::move(sink)), channel_(channel), lists_(std::move(lists)) {
    groups_.resize(lists_.groups);
    for (const Extent& extent : lists_.extents) bytes_ += extent.bytes;
    for (const bool mapped : lists_.file_mapped) any_mapped_ = any_mapped_ || mapped;
}

Transfer::~Transfer() {
    for (Group& group : groups_) sink_->give_back(std::move(group.event));
    sink_->give_back(std::move(last_));
}

void Transfer::expect(const std::vector<std::uint64_t>& tasks_of_group) {
    std::vector<std::uint32_t> empty;
    {
        std::lock_guard lock(mutex_);
        for (std::uint32_t i = 0; i < groups_.size(); ++i) {
            groups_[i].tasks_left = tasks_of_group[i];
            tasks_left_ += tasks_of_group[i];
            if (tasks_of_group[i] == 0) empty.push_back(i);
        }
    }
    for (const std::uint32_t group : empty) land(group);
}

void Transfer::check_files(bool mapped) const {
    for (std::size_t i = 0; i < lists_.files.size(); ++i) {
        if (lists_.file_mapped[i] == mapped) lists_.files[i]->check_unchanged("read");
    }
}

void Transfer::land(std::uint32_t index) {
    if (!aborted()) {
        try {
            check_files(false);
            cuda::Event event = sink_->mark(channel_);
            std::lock_guard lock(mutex_);
            groups_[index].event = std::move(event);
            groups_[index].verified = !any_mapped_;
            groups_[index].landed = true;
        } catch (const std::exception& error) {
            fail(as_error(error));
        }
    }
    changed_.notify_all();
}

void Transfer::retire(std::uint32_t index) {
    bool group_over = false;
    {
        std::lock_guard lock(mutex_);
        group_over = --groups_[index].tasks_left == 0;
    }
    if (group_over) land(index);
    bool all_over = false;
    {
        std::lock_guard lock(mutex_);
        all_over = tasks_left_ == 1;
        if (!all_over) --tasks_left_;
    }
    if (!all_over) return;
    // The count reaches zero only behind the event: whoever sees zero may ask it.
    cuda::Event last;
    bool marked = true;
    try {
        last = sink_->mark(channel_);
    } catch (const std::exception& error) {
        marked = false;
        fail(as_error(error));
    }
    std::lock_guard lock(mutex_);
    last_ = std::move(last);
    marked_ = marked;
    tasks_left_ = 0;
    changed_.notify_all();
}

void Transfer::fail(Error error) {
    {
        std::lock_guard lock(mutex_);
        if (!failure_) failure_ = std::move(error);
        aborted_.store(true, std::memory_order_release);
    }
    changed_.notify_all();
}

void Transfer::cancel() {
    {
        std::lock_guard lock(mutex_);
        bool all_landed = true;
        for (const Group& group : groups_) all_landed = all_landed && group.landed;
        if (all_landed) return;
    }
    fail(Error(ErrorKind::cancelled, "the transfer of " + std::to_string(bytes_) +
                                         " bytes was cancelled before it was complete; its destination holds "
                                         "undefined bytes: submit it again"));
}

bool Transfer::wait(int index, double seconds) {
    const auto until =
        std::chrono::steady_clock::now() +
        std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
    const std::size_t first = index < 0 ? 0 : static_cast<std::size_t>(index);
    const std::size_t end = index < 0 ? groups_.size() : first + 1;
    for (std::size_t i = first; i < end; ++i) {
        {
            std::unique_lock lock(mutex_);
            const bool settled =
                changed_.wait_until(lock, until, [&] { return groups_[i].landed || failure_.has_value(); });
            if (!settled) return false;
            if (!groups_[i].landed) throw Error(*failure_);
            if (groups_[i].verified) continue;
        }
        if (!verify(groups_[i], until)) return false;
    }
    return true;
}

bool Transfer::verify(Group& group, std::chrono::steady_clock::time_point until) {
    // The event is set once, before `landed`; only this side reads it from then on.
    while (!sink_->complete(group.event)) {
        if (std::chrono::steady_clock::now() >= until) return false;
        std::this_thread::sleep_for(kPoll);
    }
    try {
        check_files(true);
    } catch (const Error& error) {
        fail(error);
        throw;
    }
    std::lock_guard lock(mutex_);
    group.verified = true;
    return true;
}

void Transfer::order_before(int index, std::uintptr_t stream) {
    // The copies are on one stream: the event of the group that landed last stands behind all of them.
    const std::size_t first = index < 0 ? 0 : static_cast<std::size_t>(index);
    const std::size_t end = index < 0 ? groups_.size() : first + 1;
    for (std::size_t i = first; i < end; ++i) {
        if (groups_[i].event.valid()) sink_->order_before(stream, groups_[i].event);
    }
}

bool Transfer::drained() {
    {
        std::lock_guard lock(mutex_);
        if (tasks_left_ > 0) return false;
    }
    try {
        if (marked_) return sink_->complete(last_);
    } catch (const Error&) {
        // The event cannot be asked; whether any copy is left can.
    }
    return sink_->idle();
}

}  // namespace gdsstream
