#include "engine.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace gdsstream {

namespace {

// Smaller slots would be spent on widening and bookkeeping.
constexpr std::uint64_t kMinSlotBytes = 64 << 10;
// A mapped copy is cut so that groups and cancels do not wait for more than about 5 ms of one copy.
constexpr std::uint64_t kMappedTaskBytes = 256 << 20;

// Enough small copies to bridge the time in which the first full slot is read.
constexpr unsigned kRampTasks = 4;

// Transfers that wait for their destinations: more than this at once stand behind each other.
constexpr unsigned kCopyStreams = 4;

CutRules rules_for(const LaneConfig& lane, std::uint64_t slot_bytes, bool gpu) {
    CutRules rules;
    rules.task_bytes = lane.reader == ReaderKind::mapped && gpu ? kMappedTaskBytes : slot_bytes;
    // A page satisfies O_DIRECT on every device with blocks up to 4 KiB; storage.py keeps larger ones off this lane.
    rules.alignment = lane.direct ? kPageBytes : 1;
    rules.read_bytes = align_down(std::clamp<std::uint64_t>(lane.read_bytes, kPageBytes, slot_bytes), kPageBytes);
    // Full slots at once would leave the link idle until the first of them is full.
    rules.ramp_tasks = lane.reader == ReaderKind::pread && gpu ? kRampTasks : 0;
    return rules;
}

void check_slot(std::uint64_t bytes) {
    if (bytes >= kMinSlotBytes && bytes % kPageBytes == 0) return;
    throw Error(ErrorKind::config,
                "a slot has " + std::to_string(bytes) + " bytes; it has to be a multiple of 4096, at least 65536");
}

void check_extents(const std::vector<std::shared_ptr<File>>& files, const std::vector<Extent>& extents,
                   std::uint32_t groups) {
    for (std::size_t i = 0; i < extents.size(); ++i) {
        const Extent& extent = extents[i];
        if (extent.file >= files.size() || extent.group >= groups) {
            throw Error(ErrorKind::config, "extent " + std::to_string(i) + " names file " +
                                               std::to_string(extent.file) + " of " + std::to_string(files.size()) +
                                               " or group " + std::to_string(extent.group) + " of " +
                                               std::to_string(groups));
        }
        const File& file = *files[extent.file];
        if (extent.offset > file.size() || extent.bytes > file.size() - extent.offset) {
            throw Error(ErrorKind::config, file.path() + ": extent " + std::to_string(i) + " wants " +
                                               std::to_string(extent.bytes) + " bytes at offset " +
                                               std::to_string(extent.offset) + ", past the file's end at " +
                                               std::to_string(file.size()));
        }
    }
}

// A lane without reads has no way to fail later than here.
void check_in_memory(const std::vector<std::shared_ptr<File>>& files, const std::vector<bool>& mapped,
                     const std::vector<Extent>& extents, bool gpu) {
    for (const Extent& extent : extents) {
        if (!mapped[extent.file] || extent.bytes == 0) continue;
        const File& file = *files[extent.file];
        file.in_memory(extent.offset, extent.bytes);
        if (gpu && !file.windows()->registered()) {
            throw Error(ErrorKind::config, file.path() +
                                               ": is held in host memory by an engine on the CPU, which no GPU "
                                               "can copy from; open it with this engine");
        }
    }
}

}  // namespace

Engine::Engine(EngineConfig config) : config_(std::move(config)), pid_(::getpid()) {
    if (config_.lanes.empty()) throw Error(ErrorKind::config, "an engine needs at least one lane");
    check_slot(config_.slot_bytes);
    if (config_.device >= 0) device_ = cuda::Device::open(config_.device, kCopyStreams);
    const bool gpu = device_ != nullptr;
    shared_ = std::make_shared<Shared>(config_.process);
    shared_->sink = gpu ? make_cuda_sink(device_) : make_cpu_sink();
    const auto add_ring = [this](std::uint64_t slot_bytes, std::uint64_t limit_bytes) -> StagingRing& {
        shared_->rings.push_back(std::make_shared<StagingRing>(device_, slot_bytes, limit_bytes, config_.numa_node,
                                                               shared_->counters.ring_wait_us));
        return *shared_->rings.back();
    };
    StagingRing& common = add_ring(config_.slot_bytes, config_.staging_bytes);
    shared_->cpus = config_.cpus;
    shared_->note = [this](const std::string& text) { note(text); };
    for (const LaneConfig& lane : config_.lanes) {
        if (lane.slot_bytes > 0) check_slot(lane.slot_bytes);
        StagingRing& ring = lane.slot_bytes > 0 ? add_ring(lane.slot_bytes, lane.staging_bytes) : common;
        lanes_.push_back(std::make_unique<Lane>(lane, rules_for(lane, ring.slot_bytes(), gpu), shared_, ring));
    }
}

Engine::~Engine() {
    if (forked()) {
        // The parent's threads do not exist here; joining them or calling its driver would hang or crash.
        for (std::unique_ptr<Lane>& lane : lanes_) static_cast<void>(lane.release());
        new std::shared_ptr<Shared>(shared_);
        new std::shared_ptr<cuda::Device>(device_);
        return;
    }
    close();
}

bool Engine::forked() const { return ::getpid() != pid_; }

void Engine::check_usable() const {
    if (forked()) {
        throw Error(ErrorKind::forked, "this engine belongs to process " + std::to_string(pid_) +
                                           "; in the forked child open another one (its threads were not inherited)");
    }
    std::lock_guard lock(mutex_);
    if (closed_) throw Error(ErrorKind::closed, "the engine is closed; open another one");
}

TransferHandle Engine::submit(Request request, std::uintptr_t stream, std::shared_ptr<void> owner) {
    check_usable();
    auto& [files, file_lane, extents, groups] = request;
    if (groups == 0 || file_lane.size() != files.size()) {
        throw Error(ErrorKind::config, "a transfer needs at least one group, and a lane for each of its files");
    }
    check_extents(files, extents, groups);
    Transfer::Lists lists;
    lists.groups = groups;
    std::vector<bool> mapped_files;
    for (std::size_t i = 0; i < files.size(); ++i) {
        if (file_lane[i] >= lanes_.size()) {
            throw Error(ErrorKind::config, "lane " + std::to_string(file_lane[i]) + " does not exist");
        }
        files[i]->check_unchanged("submitted");
        const bool mapped = lanes_[file_lane[i]]->config().reader == ReaderKind::mapped;
        mapped_files.push_back(mapped);
        lists.file_mapped.push_back(mapped && device_ != nullptr);
    }
    check_in_memory(files, mapped_files, extents, device_ != nullptr);
    lists.files = std::move(files);
    lists.file_lane = std::move(file_lane);
    lists.extents = std::move(extents);

    const unsigned channel = shared_->sink->order_after(stream);
    TransferHandle handle(quarantine_, std::move(owner));
    auto transfer = std::make_shared<Transfer>(shared_->sink, channel, std::move(lists));
    std::vector<std::vector<Task>> tasks(lanes_.size());
    std::vector<std::uint64_t> tasks_of_group(groups, 0);
    for (std::uint32_t i = 0; i < lanes_.size(); ++i) {
        CutRules rules = lanes_[i]->rules();
        // Behind other work there is no idle link to hurry for.
        if (lanes_[i]->busy()) rules.ramp_tasks = 0;
        tasks[i] = cut_tasks(transfer->lists().extents, transfer->lists().file_lane, i, rules);
        for (const Task& task : tasks[i]) ++tasks_of_group[task.group];
    }
    if (device_ == nullptr) {
        for (const Extent& extent : transfer->lists().extents) prefer_huge_pages(extent.target, extent.bytes);
    }
    transfer->expect(tasks_of_group);
    // From here on bytes may arrive: where memory runs out between two lanes, the handle leaves it to the quarantine.
    handle.begin(transfer);
    ++shared_->counters.transfers;
    for (std::uint32_t i = 0; i < lanes_.size(); ++i) lanes_[i]->enqueue(transfer, std::move(tasks[i]));
    return handle;
}

void Engine::map(File& file, const std::optional<std::vector<Range>>& windows, bool allow_copy) {
    check_usable();
    const std::vector<Range> all{Range{0, file.size()}};
    const HostTier tier{device_, config_.numa_node, allow_copy, shared_->held_bytes};
    const std::string& because = file.map(windows.has_value() ? *windows : all, tier).copied_because();
    if (!because.empty()) note("files in host memory are pinned copies beside the page cache: " + because);
}

void Engine::prepare(std::uint32_t lane) {
    check_usable();
    if (lane >= lanes_.size()) throw Error(ErrorKind::config, "lane " + std::to_string(lane) + " does not exist");
    lanes_[lane]->start_threads();
    const bool staged = lanes_[lane]->config().reader != ReaderKind::mapped;
    std::shared_ptr<StagingRing> ring;
    {
        std::lock_guard lock(mutex_);
        for (const auto& each : shared_->rings) {
            if (each.get() == &lanes_[lane]->ring()) ring = each;
        }
    }
    if (ring != nullptr && staged && (device_ != nullptr || lanes_[lane]->config().direct)) ring->grow_to_limit();
}

void Engine::close() {
    if (forked()) return;
    {
        std::lock_guard lock(mutex_);
        if (closed_) return;
        closed_ = true;
    }
    for (std::unique_ptr<Lane>& lane : lanes_) lane->stop();
    // Copies may still read the ring: it must not be unregistered under them.
    while (!shared_->sink->idle()) std::this_thread::sleep_for(std::chrono::microseconds(50));
    std::lock_guard lock(mutex_);  // counters() may be looking at it
    shared_->rings.clear();
}

void Engine::note(const std::string& text) {
    std::lock_guard lock(mutex_);
    if (std::find(all_notes_.begin(), all_notes_.end(), text) != all_notes_.end()) return;
    all_notes_.push_back(text);
    notes_.push_back(text);
}

std::vector<std::string> Engine::take_notes() {
    std::lock_guard lock(mutex_);
    for (const auto& ring : shared_->rings) {
        if (shortfall_noted_ || !ring->fell_short()) continue;
        shortfall_noted_ = true;
        notes_.push_back("the staging ring stays smaller than staging_bytes: " + ring->shortfall());
    }
    return std::exchange(notes_, {});
}

std::map<std::string, std::uint64_t> Engine::counters() const {
    const Counters& c = shared_->counters;
    std::map<std::string, std::uint64_t> result{{"transfers", c.transfers},
                                                {"reads", c.reads},
                                                {"read_bytes", c.read_bytes},
                                                {"copies", c.copies},
                                                {"copied_bytes", c.copied_bytes},
                                                {"tasks", c.tasks},
                                                {"failed_tasks", c.failures},
                                                {"threads", 0},
                                                {"staging_bytes", 0},
                                                {"staging_slots", 0},
                                                {"staging_slots_held", 0},
                                                {"ring_wait_us", c.ring_wait_us},
                                                {"active_us", shared_->activity.microseconds()},
                                                {"mapped_bytes", shared_->held_bytes->load()}};
    for (const std::unique_ptr<Lane>& lane : lanes_) result["threads"] += lane->threads_started();
    std::lock_guard lock(mutex_);
    for (const auto& ring : shared_->rings) {
        const std::size_t slots = ring->slots_total();
        result["staging_bytes"] += ring->bytes();
        result["staging_slots"] += slots;
        result["staging_slots_held"] += slots - ring->slots_not_held();
    }
    return result;
}

}  // namespace gdsstream
