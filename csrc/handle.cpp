#include "handle.hpp"

#include <unistd.h>

#include <exception>
#include <iterator>
#include <utility>

namespace gdsstream {

Quarantine::Quarantine() : pid_(::getpid()) {}

void Quarantine::take(Entries given_up) noexcept {
    // In a forked child nothing writes, and the locks may be held by threads that do not exist.
    if (::getpid() != pid_) return;
    for (const Entry& entry : given_up) {
        try {
            entry.transfer->cancel();
        } catch (const std::exception&) {
            // No memory for the message: it runs to its end instead.
        }
    }
    given_up.remove_if([](const Entry& entry) { return entry.transfer->drained(); });
    std::lock_guard lock(mutex_);
    entries_.splice(entries_.end(), given_up);
}

void Quarantine::sweep() {
    Entries drained;
    {
        std::lock_guard lock(mutex_);
        for (auto entry = entries_.begin(); entry != entries_.end();) {
            const auto next = std::next(entry);
            if (entry->transfer->drained()) drained.splice(drained.end(), entries_, entry);
            entry = next;
        }
    }
    // Owners go here, without the lock: they may be the last to hold another handle.
}

void Quarantine::clear() {
    Entries all;
    {
        std::lock_guard lock(mutex_);
        all.swap(entries_);
    }
}

std::size_t Quarantine::size() const {
    std::lock_guard lock(mutex_);
    return entries_.size();
}

TransferHandle::TransferHandle(std::shared_ptr<Quarantine> quarantine, std::shared_ptr<void> owner)
    : quarantine_(std::move(quarantine)), entry_(1) {
    entry_.front().owner = std::move(owner);
}

TransferHandle::~TransferHandle() {
    if (quarantine_ == nullptr || entry_.front().transfer == nullptr || entry_.front().owner == nullptr) return;
    quarantine_->take(std::move(entry_));
}

}  // namespace gdsstream
