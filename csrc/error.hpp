// The one exception type of the native engine. It crosses threads inside a Transfer and becomes a Python exception
// of gdsstream.errors in the bindings; nowhere else is it translated.
#pragma once

#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <utility>

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

class Error : public std::exception {
  public:
    Error(ErrorKind kind, std::string message, int errnum = 0)
        : kind_(kind), errnum_(errnum), message_(std::move(message)) {}

    const char* what() const noexcept override { return message_.c_str(); }
    ErrorKind kind() const { return kind_; }
    // The system's errno, or 0 where the failure did not come from a system call.
    int errnum() const { return errnum_; }

  private:
    ErrorKind kind_;
    int errnum_;
    std::string message_;
};

inline std::string errno_text(int errnum) { return std::string(std::strerror(errnum)); }

// Whatever a worker meets becomes its transfer's failure: no exception leaves a thread.
inline Error as_error(const std::exception& exception) {
    if (const auto* error = dynamic_cast<const Error*>(&exception)) return *error;
    if (dynamic_cast<const std::bad_alloc*>(&exception) != nullptr) {
        return Error(ErrorKind::memory, "no memory left for the engine's own lists; free some, or submit less at once");
    }
    return Error(ErrorKind::read, std::string("unexpected failure in a reader thread: ") + exception.what());
}

}  // namespace gdsstream
