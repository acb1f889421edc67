// The one exception type of the native engine. It crosses threads inside a Transfer and becomes a Python exception
// of gdsstream.errors in the bindings; nowhere else is it translated.
#pragma once

#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>

namespace gdsstream {

enum class ErrorKind {
    config,      // ConfigError
    read,        // ReadError
    short_read,  // ShortReadError
    changed,     // FileChangedError
    cuda,        // CudaError
    cancelled,   // TransferCancelledError
    closed,      // EngineClosedError
    forked,      // ForkedProcessError
    memory,      // MemoryBudgetError
    unavailable  // BackendUnavailableError
};

// A runtime_error, whose copies share the text: handing an error on needs no memory.
class Error : public std::runtime_error {
  public:
    Error(ErrorKind kind, const std::string& message, int errnum = 0)
        : std::runtime_error(message), kind_(kind), errnum_(errnum) {}

    ErrorKind kind() const { return kind_; }
    // The system's errno, or 0 where the failure did not come from a system call.
    int errnum() const { return errnum_; }

  private:
    ErrorKind kind_;
    int errnum_;
};

inline std::string errno_text(int errnum) { return std::string(std::strerror(errnum)); }

// Made in advance: when it is needed, there is no memory to make it with.
inline const Error kNoMemory(ErrorKind::memory,
                             "no memory left for the engine's own lists; free some, or submit less at once");

// Whatever a worker meets becomes its transfer's failure: no exception leaves a thread.
inline Error as_error(const std::exception& exception) noexcept {
    if (const auto* error = dynamic_cast<const Error*>(&exception)) return *error;
    if (dynamic_cast<const std::bad_alloc*>(&exception) != nullptr) return kNoMemory;
    try {
        return Error(ErrorKind::read, std::string("unexpected failure in a reader thread: ") + exception.what());
    } catch (const std::bad_alloc&) {
        return kNoMemory;
    }
}

}  // namespace gdsstream
