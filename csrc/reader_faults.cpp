#include <charconv>
#include <chrono>
#include <new>
#include <set>
#include <thread>

#include <cerrno>

#include "error.hpp"
#include "reader.hpp"

namespace gdsstream {

namespace {

class FaultyReader : public Reader {
  public:
    FaultyReader(std::unique_ptr<Reader> inner, const std::string& faults) : inner_(std::move(inner)) {
        std::size_t begin = 0;
        while (begin < faults.size()) {
            const std::size_t end = std::min(faults.find(',', begin), faults.size());
            add(faults.substr(begin, end - begin));
            begin = end + 1;
        }
    }

    std::size_t room() const override { return inner_->room(); }
    std::size_t depth() const override { return inner_->depth(); }

    void start(ReadOp& op) override {
        ++reads_;
        if (delay_.count() > 0) std::this_thread::sleep_for(delay_);
        if (no_memory_.contains(reads_)) throw std::bad_alloc();
        if (fail_.contains(reads_)) failing_.insert(&op);
        if (end_.contains(reads_)) ending_.insert(&op);
        inner_->start(op);
    }

    void submit() override { inner_->submit(); }

    void collect(std::vector<ReadOp*>& finished) override {
        const std::size_t before = finished.size();
        inner_->collect(finished);
        for (std::size_t i = before; i < finished.size(); ++i) {
            ReadOp* op = finished[i];
            if (failing_.erase(op) > 0) op->errnum = EIO;
            if (ending_.erase(op) > 0) {
                op->done = op->wanted / 2;
                op->ended = true;
            }
        }
    }

  private:
    void add(const std::string& fault) {
        std::uint64_t number = 0;
        const std::size_t mark = fault.find_first_of("@=");
        const std::string kind = fault.substr(0, mark);
        const char* first = mark == std::string::npos ? nullptr : fault.data() + mark + 1;
        const char* last = fault.data() + fault.size();
        if (first == nullptr || first == last || std::from_chars(first, last, number).ptr != last) {
            throw Error(ErrorKind::config, "fault \"" + fault + "\" is not kind@number or kind=number");
        }
        if (kind == "eio") {
            fail_.insert(number);
        } else if (kind == "short") {
            end_.insert(number);
        } else if (kind == "nomem") {
            no_memory_.insert(number);
        } else if (kind == "delay_us") {
            delay_ = std::chrono::microseconds(number);
        } else {
            throw Error(ErrorKind::config, "fault \"" + kind + "\" is unknown: eio@N, short@N, nomem@N or delay_us=N");
        }
    }

    std::unique_ptr<Reader> inner_;
    std::set<std::uint64_t> fail_;
    std::set<std::uint64_t> end_;
    std::set<std::uint64_t> no_memory_;
    std::chrono::microseconds delay_{0};
    std::uint64_t reads_ = 0;
    std::set<ReadOp*> failing_;
    std::set<ReadOp*> ending_;
};

}  // namespace

std::unique_ptr<Reader> with_faults(std::unique_ptr<Reader> reader, const std::string& faults) {
    if (faults.empty()) return reader;
    return std::make_unique<FaultyReader>(std::move(reader), faults);
}

}  // namespace gdsstream
