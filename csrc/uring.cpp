#include "uring.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>

#include "error.hpp"

// Values newer than the headers the build may meet.
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

namespace gdsstream {

namespace {

constexpr unsigned kRegisterBuffers2 = 15;
constexpr unsigned kRegisterBuffersUpdate = 16;
constexpr std::uint32_t kRegisterSparse = 1;

// The kernel's io_uring_rsrc_register and io_uring_rsrc_update2, whose field names changed between header versions.
struct ResourceRegister {
    std::uint32_t count;
    std::uint32_t flags;
    std::uint64_t reserved;
    std::uint64_t data;
    std::uint64_t tags;
};
struct ResourceUpdate {
    std::uint32_t offset;
    std::uint32_t reserved;
    std::uint64_t data;
    std::uint64_t tags;
    std::uint32_t count;
    std::uint32_t reserved2;
};

int setup(unsigned entries, io_uring_params& params) {
    return static_cast<int>(::syscall(SYS_io_uring_setup, entries, &params));
}

int enter(int fd, unsigned submit, unsigned min_complete, unsigned flags) {
    return static_cast<int>(::syscall(SYS_io_uring_enter, fd, submit, min_complete, flags, nullptr, 0));
}

int register_with(int fd, unsigned opcode, void* argument, unsigned bytes) {
    return static_cast<int>(::syscall(SYS_io_uring_register, fd, opcode, argument, bytes));
}

template <typename T>
T* at(void* base, std::uint32_t offset) {
    return reinterpret_cast<T*>(static_cast<std::byte*>(base) + offset);
}

std::string why(int errnum) {
    if (errnum == EPERM) return "io_uring is forbidden here (kernel.io_uring_disabled or a seccomp filter)";
    if (errnum == ENOSYS) return "this kernel or sandbox has no io_uring";
    if (errnum == ENOMEM) return "io_uring's rings do not fit the locked-memory limit (ulimit -l)";
    return "io_uring_setup failed: " + errno_text(errnum);
}

}  // namespace

Uring::Uring(unsigned entries) {
    io_uring_params params{};
    // Completions are then handled by this thread when it asks, not by interrupting it.
    params.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
    int fd = setup(entries, params);
    if (fd < 0 && errno == EINVAL) {
        params = io_uring_params{};
        fd = setup(entries, params);
    }
    if (fd < 0) throw Error(ErrorKind::unavailable, why(errno), errno);
    fd_ = FileDescriptor(fd);
    if ((params.features & IORING_FEAT_SINGLE_MMAP) == 0 || (params.features & IORING_FEAT_RW_CUR_POS) == 0) {
        throw Error(ErrorKind::unavailable, "this kernel's io_uring is too old (Linux 5.6 is needed)", ENOSYS);
    }
    map_rings(params);
}

void Uring::map_rings(const io_uring_params& params) {
    entries_ = params.sq_entries;
    ring_bytes_ = std::max<std::size_t>(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                                        params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    ring_memory_ =
        ::mmap(nullptr, ring_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_.get(), IORING_OFF_SQ_RING);
    if (ring_memory_ == MAP_FAILED) {
        ring_memory_ = nullptr;
        throw Error(ErrorKind::unavailable, "io_uring's rings could not be mapped: " + errno_text(errno), errno);
    }
    sqes_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
    void* sqes =
        ::mmap(nullptr, sqes_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_.get(), IORING_OFF_SQES);
    if (sqes == MAP_FAILED) {
        const int errnum = errno;
        ::munmap(ring_memory_, ring_bytes_);
        ring_memory_ = nullptr;
        throw Error(ErrorKind::unavailable, "io_uring's rings could not be mapped: " + errno_text(errnum), errnum);
    }
    ::madvise(ring_memory_, ring_bytes_, MADV_DONTFORK);
    ::madvise(sqes, sqes_bytes_, MADV_DONTFORK);
    sqes_ = static_cast<io_uring_sqe*>(sqes);
    sq_tail_ = at<unsigned>(ring_memory_, params.sq_off.tail);
    sq_mask_ = *at<unsigned>(ring_memory_, params.sq_off.ring_mask);
    sq_array_ = at<unsigned>(ring_memory_, params.sq_off.array);
    cq_head_ = at<unsigned>(ring_memory_, params.cq_off.head);
    cq_tail_ = at<unsigned>(ring_memory_, params.cq_off.tail);
    cq_mask_ = *at<unsigned>(ring_memory_, params.cq_off.ring_mask);
    cqes_ = at<io_uring_cqe>(ring_memory_, params.cq_off.cqes);
}

Uring::~Uring() {
    if (sqes_ != nullptr) ::munmap(sqes_, sqes_bytes_);
    if (ring_memory_ != nullptr) ::munmap(ring_memory_, ring_bytes_);
}

void Uring::queue_read(int fd, void* data, std::uint32_t bytes, std::uint64_t offset, std::uint64_t tag,
                       int fixed_buffer) {
    std::atomic_ref<unsigned> tail(*sq_tail_);
    const unsigned position = tail.load(std::memory_order_relaxed);
    const unsigned index = position & sq_mask_;
    io_uring_sqe& sqe = sqes_[index];
    std::memset(&sqe, 0, sizeof sqe);
    sqe.opcode = fixed_buffer >= 0 ? IORING_OP_READ_FIXED : IORING_OP_READ;
    sqe.fd = fd;
    sqe.addr = reinterpret_cast<std::uintptr_t>(data);
    sqe.len = bytes;
    sqe.off = offset;
    sqe.user_data = tag;
    if (fixed_buffer >= 0) sqe.buf_index = static_cast<std::uint16_t>(fixed_buffer);
    sq_array_[index] = index;
    tail.store(position + 1, std::memory_order_release);
    ++queued_;
}

void Uring::submit() {
    if (queued_ > 0) enter_for(0, 0);
}

void Uring::submit_and_wait(unsigned completions) { enter_for(completions, IORING_ENTER_GETEVENTS); }

void Uring::enter_for(unsigned completions, unsigned flags) {
    for (;;) {
        const int taken = enter(fd_.get(), queued_, completions, flags);
        if (taken >= 0) {
            queued_ -= static_cast<unsigned>(taken);
            return;
        }
        // The kernel wants completions reaped first, or is short of memory for now: what is queued stays queued.
        if (errno == EBUSY || errno == EAGAIN) return;
        if (errno != EINTR) throw Error(ErrorKind::read, "io_uring_enter failed: " + errno_text(errno), errno);
    }
}

void Uring::reap(std::vector<Completion>& completions) {
    std::atomic_ref<unsigned> head(*cq_head_);
    std::atomic_ref<unsigned> tail(*cq_tail_);
    unsigned position = head.load(std::memory_order_relaxed);
    const unsigned end = tail.load(std::memory_order_acquire);
    for (; position != end; ++position) {
        const io_uring_cqe& cqe = cqes_[position & cq_mask_];
        completions.push_back(Completion{cqe.user_data, cqe.res});
    }
    head.store(position, std::memory_order_release);
}

bool Uring::reserve_buffers(unsigned count) {
    ResourceRegister argument{count, kRegisterSparse, 0, 0, 0};
    return register_with(fd_.get(), kRegisterBuffers2, &argument, sizeof argument) == 0;
}

int Uring::set_buffer(unsigned index, void* data, std::size_t bytes) {
    iovec vector{data, bytes};
    ResourceUpdate argument{index, 0, reinterpret_cast<std::uintptr_t>(&vector), 0, 1, 0};
    return register_with(fd_.get(), kRegisterBuffersUpdate, &argument, sizeof argument) < 0 ? errno : 0;
}

}  // namespace gdsstream
