#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "error.hpp"
#include "reader.hpp"

namespace gdsstream {

namespace {

// One read at a time, by the thread that starts it; parallelism comes from many workers.
class PreadReader : public Reader {
  public:
    explicit PreadReader(bool direct) : direct_(direct) {}

    std::size_t room() const override { return finished_.empty() ? 1 : 0; }
    std::size_t depth() const override { return 1; }

    void start(ReadOp& op) override {
        read_all(op, direct_ ? op.file->direct_descriptor() : op.file->descriptor());
        finished_.push_back(&op);
    }

    void collect(std::vector<ReadOp*>& finished) override {
        finished.insert(finished.end(), finished_.begin(), finished_.end());
        finished_.clear();
    }

  private:
    void read_all(ReadOp& op, int fd) const {
        while (op.done < op.wanted) {
            // O_DIRECT goes on at a block's boundary only: after an odd partial read the block is read again.
            const std::uint64_t at = direct_ ? align_down(op.done, kPageBytes) : op.done;
            const ssize_t got = ::pread(fd, op.data + at, op.bytes - at, static_cast<off_t>(op.offset + at));
            if (got < 0) {
                if (errno == EINTR || errno == EAGAIN) {
                    ++op.retries;
                    continue;
                }
                op.errnum = errno;
                return;
            }
            const std::uint64_t reached = at + static_cast<std::uint64_t>(got);
            if (reached <= op.done) {
                op.ended = true;
                return;
            }
            op.done = reached;
            if (op.done < op.wanted) ++op.retries;
        }
    }

    const bool direct_;
    std::vector<ReadOp*> finished_;
};

// process_vm_readv on ourselves: the kernel copies, and a page that the file lost is EFAULT instead of a signal.
class MappedReader : public Reader {
  public:
    std::size_t room() const override { return finished_.empty() ? 1 : 0; }
    std::size_t depth() const override { return 1; }

    void start(ReadOp& op) override {
        const pid_t self = ::getpid();
        auto* from = const_cast<std::byte*>(op.file->in_memory(op.offset, op.wanted));
        while (op.done < op.wanted && !op.failed()) {
            iovec target{op.data + op.done, op.wanted - op.done};
            iovec source{from + op.done, op.wanted - op.done};
            const ssize_t got = ::process_vm_readv(self, &target, 1, &source, 1, 0);
            if (got > 0) {
                op.done += static_cast<std::uint64_t>(got);
                if (op.done < op.wanted) ++op.retries;
            } else if (got == 0 || errno == EFAULT) {
                op.ended = true;
            } else if (errno != EINTR) {
                op.errnum = errno;
            } else {
                ++op.retries;
            }
        }
        finished_.push_back(&op);
    }

    void collect(std::vector<ReadOp*>& finished) override {
        finished.insert(finished.end(), finished_.begin(), finished_.end());
        finished_.clear();
    }

  private:
    std::vector<ReadOp*> finished_;
};

}  // namespace

std::unique_ptr<Reader> make_pread_reader(const ReaderOptions& options) {
    return std::make_unique<PreadReader>(options.direct);
}

std::unique_ptr<Reader> make_mapped_reader() { return std::make_unique<MappedReader>(); }

}  // namespace gdsstream
