// A transfer: bytes under way from files to addresses, in groups that land one by one.
//
// Workers retire its tasks. The one that retires a group's last task checks that the files are still what they were,
// puts the group's event behind its copies and marks it landed. A failure or cancel skips the tasks that have not
// begun; the transfer is drained when none is under way and the copies issued so far are complete. Until then its
// destination may still be written to.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "error.hpp"
#include "file.hpp"
#include "sink.hpp"
#include "task.hpp"

namespace gdsstream {

class Transfer {
  public:
    struct Lists {
        std::vector<std::shared_ptr<File>> files;
        std::vector<std::uint32_t> file_lane;
        std::vector<bool> file_mapped;  // read by DMA from a mapping: checked again when the copies are complete
        std::vector<Extent> extents;
        std::uint32_t groups = 1;
    };

    // `channel` is what Sink::order_after gave for it.
    Transfer(std::shared_ptr<Sink> sink, unsigned channel, Lists lists);
    ~Transfer();
    Transfer(const Transfer&) = delete;
    Transfer& operator=(const Transfer&) = delete;

    // The caller's side. `group` < 0 stands for all groups.

    // Whether the group has landed: its bytes are read, checked and their copies enqueued (and, where a mapped file
    // took part, complete). Waits for at most `seconds`. Throws the transfer's failure.
    bool wait(int group, double seconds);
    // The stream waits for the group's copies. The group has landed.
    void order_before(int group, std::uintptr_t stream);
    void cancel();
    // Whether nothing can write to the destination any more. Never throws.
    bool drained();
    std::uint64_t bytes() const { return bytes_; }

    // The engine's side.

    // Once, before any task is begun: how many tasks each group has, over all lanes.
    void expect(const std::vector<std::uint64_t>& tasks_of_group);
    void retire(std::uint32_t group);
    void fail(Error error);
    bool aborted() const { return aborted_.load(std::memory_order_acquire); }
    const Lists& lists() const { return lists_; }
    unsigned channel() const { return channel_; }

  private:
    struct Group {
        std::uint64_t tasks_left = 0;
        bool landed = false;
        bool verified = true;  // false: mapped files have still to be checked when the copies are complete
        cuda::Event event;
    };

    void land(std::uint32_t group);
    bool verify(Group& group, std::chrono::steady_clock::time_point until);
    void check_files(bool mapped) const;

    const std::shared_ptr<Sink> sink_;
    const unsigned channel_;
    const Lists lists_;
    std::uint64_t bytes_ = 0;
    bool any_mapped_ = false;

    std::atomic<bool> aborted_{false};
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<Group> groups_;
    std::uint64_t tasks_left_ = 0;
    std::optional<Error> failure_;
    cuda::Event last_;    // behind everything, recorded when the last task is retired
    bool marked_ = true;  // false: it could not be recorded
};

}  // namespace gdsstream
