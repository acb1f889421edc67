#include <algorithm>
#include <cerrno>
#include <unordered_set>

#include "error.hpp"
#include "reader.hpp"
#include "uring.hpp"

namespace gdsstream {

namespace {

// With many reads under way their completions are taken in batches: the same reads for fewer system calls, while the
// disk's queue never empties.
constexpr std::size_t kWaitShare = 8;

// Many reads of one thread under way at once.
class UringReader : public Reader {
  public:
    explicit UringReader(const ReaderOptions& options)
        : options_(options),
          uring_(std::make_unique<Uring>(static_cast<unsigned>(std::max<std::size_t>(options.depth, 1)))),
          depth_(std::min<std::size_t>(options.depth, uring_->entries())) {
        fixed_ = options.max_segments > 0 && uring_->reserve_buffers(static_cast<unsigned>(options.max_segments));
        registered_.resize(options.max_segments, false);
        completions_.reserve(depth_);  // collect() must not need memory
    }

    std::size_t room() const override { return depth_ - under_way_.size(); }
    std::size_t depth() const override { return depth_; }

    void start(ReadOp& op) override {
        if (uring_ == nullptr) throw Error(ErrorKind::unavailable, "io_uring broke down earlier in this thread");
        // All of these can throw, and what is queued cannot be taken back: that comes last.
        const int fd = descriptor(op);
        const int buffer = fixed_buffer(op);
        under_way_.insert(&op);
        queue(op, fd, buffer);
    }

    void submit() override {
        try {
            if (uring_ != nullptr) uring_->submit();
        } catch (const std::exception&) {
            // What is queued stays so, and collect() meets the same and reports it.
        }
    }

    void collect(std::vector<ReadOp*>& finished) override {
        if (under_way_.empty()) return;
        const std::size_t before = finished.size();
        while (finished.size() == before) {
            completions_.clear();
            try {
                uring_->submit_and_wait(
                    static_cast<unsigned>(std::max<std::size_t>(1, under_way_.size() / kWaitShare)));
            } catch (const std::exception& error) {
                abandon(as_error(error).errnum(), finished);
                return;
            }
            uring_->reap(completions_);
            for (const Uring::Completion& completion : completions_) {
                auto* op = reinterpret_cast<ReadOp*>(completion.tag);
                if (settle(*op, completion.result)) {
                    under_way_.erase(op);
                    finished.push_back(op);
                } else {
                    ++op->retries;
                    queue(*op, descriptor(*op), fixed_buffer(*op));
                }
            }
        }
    }

  private:
    // The kernel takes no calls for this ring any more: closing it cancels what it has, and every read is reported.
    void abandon(int errnum, std::vector<ReadOp*>& finished) {
        uring_.reset();
        for (ReadOp* op : under_way_) {
            op->errnum = errnum != 0 ? errnum : EIO;
            finished.push_back(op);
        }
        under_way_.clear();
    }

    std::uint64_t position(const ReadOp& op) const {
        return options_.direct ? align_down(op.done, kPageBytes) : op.done;
    }

    int descriptor(const ReadOp& op) const {
        return options_.direct ? op.file->direct_descriptor() : op.file->descriptor();
    }

    void queue(ReadOp& op, int fd, int buffer) {
        const std::uint64_t at = position(op);
        const auto bytes = static_cast<std::uint32_t>(std::min<std::uint64_t>(op.bytes - at, 1U << 30));
        uring_->queue_read(fd, op.data + at, bytes, op.offset + at, reinterpret_cast<std::uintptr_t>(&op), buffer);
    }

    // Whether the read is over, well or badly; otherwise the rest has to be queued again.
    bool settle(ReadOp& op, std::int32_t result) const {
        if (result == -EINTR || result == -EAGAIN) return false;
        if (result < 0) {
            op.errnum = -result;
            return true;
        }
        const std::uint64_t reached = position(op) + static_cast<std::uint64_t>(result);
        if (reached <= op.done && op.done < op.wanted) {
            op.ended = true;
            return true;
        }
        op.done = std::max(op.done, reached);
        return op.done >= op.wanted;
    }

    int fixed_buffer(const ReadOp& op) {
        if (!fixed_ || !op.staged) return -1;
        if (!registered_[op.segment]) {
            const int failed =
                uring_->set_buffer(op.segment, options_.segment_data(op.segment), options_.segment_bytes);
            if (failed != 0) {
                fixed_ = false;
                if (options_.note) {
                    options_.note("io_uring reads without fixed buffers: registering staging memory failed (" +
                                  errno_text(failed) + "); a larger locked-memory limit (ulimit -l) allows them");
                }
                return -1;
            }
            registered_[op.segment] = true;
        }
        return static_cast<int>(op.segment);
    }

    const ReaderOptions options_;
    std::unique_ptr<Uring> uring_;
    const std::size_t depth_;
    bool fixed_ = false;
    std::vector<bool> registered_;
    std::unordered_set<ReadOp*> under_way_;
    std::vector<Uring::Completion> completions_;
};

}  // namespace

std::unique_ptr<Reader> make_uring_reader(const ReaderOptions& options) {
    return std::make_unique<UringReader>(options);
}

std::string uring_unavailable_reason() {
    try {
        Uring probe(1);
        return "";
    } catch (const Error& error) {
        return error.what();
    }
}

}  // namespace gdsstream
