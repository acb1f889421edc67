// The engine: a device, its sink, a staging ring (or one more for a lane), and the lanes that feed them.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "cuda.hpp"
#include "handle.hpp"
#include "lane.hpp"
#include "transfer.hpp"

namespace gdsstream {

struct EngineConfig {
    int device = -1;               // CUDA ordinal; < 0: bytes go to CPU memory
    std::uint64_t slot_bytes = 0;  // of its ring: the most that one copy takes
    std::uint64_t staging_bytes = 0;
    int numa_node = -1;
    std::vector<int> cpus;
    std::vector<LaneConfig> lanes;
    std::shared_ptr<Activity> process;  // busy while this engine is; may be null
};

// What one transfer reads. Can be submitted again and again.
struct Request {
    std::vector<std::shared_ptr<File>> files;
    std::vector<std::uint32_t> file_lane;  // the lane that reads files[i]
    std::vector<Extent> extents;
    std::uint32_t groups = 1;
};

class Engine {
  public:
    // Throws Error(config | unavailable | cuda). Starts no thread and pins nothing yet.
    explicit Engine(EngineConfig config);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // One transfer. `stream` is the CUDA stream on which the targets were allocated or last used (ignored on the CPU);
    // `owner` is what owns their memory. Throws Error(config | changed | closed | forked).
    TransferHandle submit(Request request, std::uintptr_t stream, std::shared_ptr<void> owner);
    // Whether nothing that was submitted can still write anywhere.
    bool idle() const { return !shared_->activity.busy() && shared_->sink->idle(); }
    // Where transfers wait that were given up.
    Quarantine& quarantine() { return *quarantine_; }

    // Holds parts of a file in host memory (nullopt: all of it), registered for a GPU; `allow_copy`: as a pinned copy
    // where its own pages cannot be registered. Throws as File::map does.
    void map(File& file, const std::optional<std::vector<Range>>& windows = {}, bool allow_copy = false);

    // Pays now for what the first transfer through `lane` would pay: its threads, and the whole staging ring.
    void prepare(std::uint32_t lane);

    // Stops the workers, waits for the copies under way, and lets go of all memory. Idempotent.
    void close();
    // In a forked child the threads and the driver are the parent's: nothing can be stopped or freed here.
    bool forked() const;

    int device() const { return config_.device; }
    std::map<std::string, std::uint64_t> counters() const;
    // One of the counters, without the locks that the others need: the readers hold those often.
    std::uint64_t ring_wait_us() const { return shared_->counters.ring_wait_us; }
    // What did not go as asked (a smaller ring, no fixed buffers): each reason once.
    std::vector<std::string> take_notes();

  private:
    void check_usable() const;
    void note(const std::string& text);

    const EngineConfig config_;
    const pid_t pid_;
    std::shared_ptr<cuda::Device> device_;
    std::shared_ptr<Shared> shared_;
    const std::shared_ptr<Quarantine> quarantine_ = std::make_shared<Quarantine>();
    std::vector<std::unique_ptr<Lane>> lanes_;

    mutable std::mutex mutex_;
    bool closed_ = false;
    std::vector<std::string> notes_;
    std::vector<std::string> all_notes_;
    bool shortfall_noted_ = false;
};

}  // namespace gdsstream
