// Readers: how bytes get from storage into memory. One contract for all routes, so that a worker (engine.cpp) knows
// none of them: start reads while there is room, collect those that finished.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "file.hpp"

namespace gdsstream {

struct Work;

struct ReadOp {
    File* file = nullptr;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;    // to ask for; O_DIRECT widens it past what is wanted
    std::uint64_t wanted = 0;   // bytes that have to arrive; fewer is an error
    std::uint64_t place = 0;    // in its work's slot, or the address itself where there is none
    std::byte* data = nullptr;  // known when the read is started
    Work* owner = nullptr;
    unsigned segment = 0;          // of the staging ring, for fixed buffers
    bool staged = false;           // data lies in the staging ring
    std::uint64_t done = 0;        // bytes that have arrived
    int errnum = 0;                // the system's reason for a failure
    bool ended = false;            // the file ended before `wanted`
    unsigned retries = 0;          // calls beyond the first: interrupted, or come back with a part
    std::uint64_t started_ns = 0;  // 0: nobody wants to know

    bool failed() const { return errnum != 0 || ended; }
};

class Reader {
  public:
    virtual ~Reader() = default;
    // How many more reads can be started now.
    virtual std::size_t room() const = 0;
    // How many reads are worth having under way.
    virtual std::size_t depth() const = 0;
    // What throws is not under way.
    virtual void start(ReadOp& op) = 0;
    // Lets the system begin with what was started; collect() does it, too. Never throws or waits.
    virtual void submit() {}
    // Appends finished reads; waits for at least one if any is under way. Never throws: a reader that breaks down
    // reports what it had under way as failed, and `finished` has room for depth() reads.
    virtual void collect(std::vector<ReadOp*>& finished) = 0;
};

struct ReaderOptions {
    bool direct = false;
    std::size_t depth = 1;
    // io_uring only: the staging memory whose segments may be registered as fixed buffers, and whom to tell if not.
    std::size_t max_segments = 0;
    std::size_t segment_bytes = 0;
    std::function<std::byte*(unsigned)> segment_data;
    std::function<void(const std::string&)> note;
};

std::unique_ptr<Reader> make_pread_reader(const ReaderOptions& options);
// Throws Error(unavailable) where io_uring is forbidden or too old.
std::unique_ptr<Reader> make_uring_reader(const ReaderOptions& options);
// Copies out of a file's windows through the kernel, which reports a page that went away where a touch is SIGBUS.
std::unique_ptr<Reader> make_mapped_reader();

// "" where io_uring can be used, else why not.
std::string uring_unavailable_reason();

// Faults for tests, injected where storage would make them: "eio@N" and "short@N" fail the N-th read (from 1) of the
// reader, "nomem@N" finds no memory to start it with, "delay_us=N" slows every read down; separated by commas. Throws
// Error(config).
std::unique_ptr<Reader> with_faults(std::unique_ptr<Reader> reader, const std::string& faults);

}  // namespace gdsstream
