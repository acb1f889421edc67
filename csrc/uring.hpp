// io_uring by its system calls: a ring of one thread's reads. The kernel's ABI, no library.
#pragma once

#include <linux/io_uring.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory.hpp"

namespace gdsstream {

class Uring {
  public:
    // Throws Error(unavailable). To be used by the thread that makes it only.
    explicit Uring(unsigned entries);
    Uring(const Uring&) = delete;
    Uring& operator=(const Uring&) = delete;
    ~Uring();

    unsigned entries() const { return entries_; }
    // Queues a read; `fixed_buffer` < 0: ordinary memory. There has to be room: no more than entries() under way.
    void queue_read(int fd, void* data, std::uint32_t bytes, std::uint64_t offset, std::uint64_t tag, int fixed_buffer);
    // Hands queued reads to the kernel and sleeps until at least `completions` of those under way have completed.
    // Throws Error(read).
    void submit_and_wait(unsigned completions);
    // The same without waiting for any.
    void submit();
    struct Completion {
        std::uint64_t tag;
        std::int32_t result;
    };
    void reap(std::vector<Completion>& completions);

    // An empty table of fixed buffers, to be filled one by one. false where the kernel is too old.
    bool reserve_buffers(unsigned count);
    // 0 or an errno (ENOMEM: the locked-memory limit).
    int set_buffer(unsigned index, void* data, std::size_t bytes);

  private:
    void map_rings(const io_uring_params& params);
    void enter_for(unsigned completions, unsigned flags);

    FileDescriptor fd_;
    unsigned entries_ = 0;
    unsigned queued_ = 0;
    void* ring_memory_ = nullptr;
    std::size_t ring_bytes_ = 0;
    io_uring_sqe* sqes_ = nullptr;
    std::size_t sqes_bytes_ = 0;
    unsigned* sq_tail_ = nullptr;
    unsigned sq_mask_ = 0;
    unsigned* sq_array_ = nullptr;
    unsigned* cq_head_ = nullptr;
    unsigned* cq_tail_ = nullptr;
    unsigned cq_mask_ = 0;
    io_uring_cqe* cqes_ = nullptr;
};

}  // namespace gdsstream
