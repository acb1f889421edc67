// What the caller holds of a transfer: the transfer, and what owns the memory that it writes to. A handle that is
// dropped too early leaves both in its engine's quarantine until nothing can be written any more. All of it happens
// in the destructor, which no signal can interrupt: what the interpreter does in its place can be ended by Ctrl-C
// between any two steps, and the memory would be freed under the readers.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <list>
#include <memory>
#include <mutex>

#include "transfer.hpp"

namespace gdsstream {

// Transfers that were given up, and what they may still write to.
class Quarantine {
  public:
    struct Entry {
        std::shared_ptr<Transfer> transfer;
        std::shared_ptr<void> owner;
    };
    // A list of one: it moves here without needing memory.
    using Entries = std::list<Entry>;

    Quarantine();
    // Cancels the transfer, where that has not happened yet, and keeps it until it has drained. Owners may need a lock
    // of the caller's (the interpreter's) to go: the functions here let go of them, and no worker calls those.
    void take(Entries given_up) noexcept;
    // Lets go of what has drained.
    void sweep();
    // After the engine was closed, when nothing writes any more.
    void clear();
    std::size_t size() const;

  private:
    const pid_t pid_;
    mutable std::mutex mutex_;
    Entries entries_;
};

class TransferHandle {
  public:
    // Before the transfer begins. `owner` may be null: the caller sees to the memory by itself then.
    TransferHandle(std::shared_ptr<Quarantine> quarantine, std::shared_ptr<void> owner);
    ~TransferHandle();
    TransferHandle(TransferHandle&&) = default;
    TransferHandle& operator=(TransferHandle&&) = delete;

    void begin(std::shared_ptr<Transfer> transfer) { entry_.front().transfer = std::move(transfer); }
    // The bytes have landed, and whoever frees the memory now orders that behind the copies: the owner goes.
    void complete() { entry_.front().owner.reset(); }

    const std::shared_ptr<Transfer>& transfer() const { return entry_.front().transfer; }
    Transfer* operator->() const { return entry_.front().transfer.get(); }

  private:
    std::shared_ptr<Quarantine> quarantine_;  // null: moved away
    Quarantine::Entries entry_;
};

}  // namespace gdsstream
