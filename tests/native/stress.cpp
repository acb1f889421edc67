// The engine under load from many threads, for the sanitizers (make sanitize). Rounds of a fraction of a second, each
// with an engine of its own: every lane, a ring of a few slots, on the CPU and on the stand-in driver's devices, and by
// chance faults under the readers, faults in the driver, files that are touched, and a close in the middle. What
// arrives has to be right; what does not has to fail for a reason that the round has.
//
//   GDSSTREAM_LIBCUDA=/path/to/libfakecuda.so gdsstream_stress [seconds] [seed]
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <random>
#include <thread>

#include "engine.hpp"
#include "stress_ios.hpp"
#include "stress_parts.hpp"
#include "stress_round.hpp"

namespace gdsstream {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kClients = 4;

std::atomic<int> complaints{0};

void complain(const std::string& text) {
    // A thousand of the same say no more than ten.
    if (++complaints <= 10) std::fprintf(stderr, "stress: %s\n", text.c_str());
}

// A transfer with its destination.
struct Job {
    std::unique_ptr<TransferHandle> transfer;
    std::shared_ptr<Bytes> out;
    Bytes expected;
    std::uint32_t groups = 1;
    bool cancelled = false;
    bool dropped = false;  // the engine keeps its destination
};

class Client {
  public:
    Client(const Round& round, Engine& engine, const std::vector<Source>& sources,
           const std::vector<std::shared_ptr<File>>& files, std::uint64_t seed)
        : round_(round), engine_(engine), sources_(sources), files_(files), random_(seed) {}

    void run(Clock::time_point end) {
        while (Clock::now() < end) {
            Job job;
            try {
                job = submit();
            } catch (const Error& error) {
                if (!round_.allows(error)) complain(std::string("submit: ") + error.what());
                if (error.kind() == ErrorKind::closed || error.kind() == ErrorKind::changed) break;
                continue;
            }
            use(job);
            ++jobs_;
            engine_.quarantine().sweep();
            if (job.dropped) continue;
            given_up_.push_back(std::move(job));
            std::erase_if(given_up_, [](const Job& other) { return (*other.transfer)->drained(); });
        }
    }

    // After the engine was closed: nothing is under way any more.
    void finish() {
        for (const Job& job : given_up_) {
            if (!(*job.transfer)->drained()) complain("a transfer is not drained although the engine was closed");
        }
        given_up_.clear();
    }
    int jobs() const { return jobs_; }
    int right() const { return right_; }

  private:
    Job submit() {
        Job job;
        job.groups = 1 + static_cast<std::uint32_t>(random_.below(3));
        std::vector<Extent> extents(random_.below(7));
        std::uint64_t total = 0;
        for (Extent& extent : extents) {
            extent.file = static_cast<std::uint32_t>(random_.below(files_.size()));
            const std::uint64_t size = files_[extent.file]->size();
            constexpr std::array<std::uint64_t, 6> sizes{0, 1, 4096, 10'000, kSlotBytes, 200'000};
            extent.bytes = std::min(size, sizes[random_.below(sizes.size())]);
            extent.offset = random_.below(size - extent.bytes + 1);
            extent.group = static_cast<std::uint32_t>(random_.below(job.groups));
            extent.target = total;
            total += extent.bytes;
        }
        job.out = std::make_shared<Bytes>(total);
        job.expected.resize(total);
        for (Extent& extent : extents) {
            const Bytes& bytes = sources_[extent.file].bytes;
            std::copy_n(bytes.data() + extent.offset, extent.bytes, job.expected.data() + extent.target);
            extent.target += reinterpret_cast<std::uintptr_t>(job.out->data());
        }
        std::vector<std::uint32_t> lanes(files_.size());
        for (std::uint32_t& lane : lanes) lane = static_cast<std::uint32_t>(random_.below(round_.lanes));
        std::vector<std::shared_ptr<File>> files = files_;
        if (random_.chance(25)) {
            // Held for this transfer alone, and no more of it than that reads.
            const auto number = static_cast<std::uint32_t>(random_.below(files.size()));
            std::vector<Range> windows;
            for (const Extent& extent : extents) {
                if (extent.file == number) windows.push_back(Range{extent.offset, extent.bytes});
            }
            files[number] = sources_[number].open();
            engine_.map(*files[number], windows, true);
            lanes[number] = kMappedLane;
        }
        job.transfer = std::make_unique<TransferHandle>(
            engine_.submit(Request{std::move(files), lanes, std::move(extents), job.groups}, 0, job.out));
        return job;
    }

    void use(Job& job) {
        const std::uint64_t act = random_.below(100);
        if (act < 15) {
            job.dropped = true;
            return;
        }
        if (act < 30) {
            std::this_thread::sleep_for(std::chrono::microseconds(random_.below(500)));
            (*job.transfer)->cancel();
            job.cancelled = true;
        }
        std::thread other;
        if (act >= 90) other = std::thread([&job] { wait_quietly(*job.transfer->transfer()); });
        try {
            if (act < 50) {
                for (std::uint32_t group = job.groups; group-- > 0;) wait(job, static_cast<int>(group));
            }
            wait(job, -1);
            (*job.transfer)->order_before(-1, 0);
            check(job);
        } catch (const Error& error) {
            const bool expected = job.cancelled && error.kind() == ErrorKind::cancelled;
            if (!expected && !round_.allows(error)) complain(std::string("wait: ") + error.what());
        }
        if (other.joinable()) other.join();
    }

    void wait(Job& job, int group) {
        const auto limit = Clock::now() + std::chrono::seconds(60);
        while (!(*job.transfer)->wait(group, random_.chance(50) ? 0.0001 : 0.05)) {
            if (Clock::now() < limit) continue;
            complain("neither landed nor failed within a minute: " + round_.text());
            std::abort();
        }
    }

    static void wait_quietly(Transfer& transfer) {
        try {
            transfer.wait(-1, 60);
        } catch (const Error&) {
            // The client itself looks at the reason.
        }
    }

    void check(const Job& job) {
        while (!(*job.transfer)->drained()) std::this_thread::sleep_for(std::chrono::microseconds(20));
        if (*job.out != job.expected) complain("wrong bytes: " + round_.text());
        ++right_;
    }

    const Round& round_;
    Engine& engine_;
    const std::vector<Source>& sources_;
    const std::vector<std::shared_ptr<File>>& files_;
    Random random_;
    std::vector<Job> given_up_;
    int jobs_ = 0;
    int right_ = 0;
};

void inject_driver_faults(const Fake& fake, Random& random) {
    constexpr std::array symbols{"cuEventRecord",     "cuEventQuery",         "cuEventSynchronize",
                                 "cuStreamWaitEvent", "cuMemcpyHtoDAsync_v2", "cuMemHostRegister_v2",
                                 "cuEventCreate"};
    for (int i = 0; i < 4; ++i) {
        const int result = random.chance(50) ? 999 : 2;
        fake.fail(symbols[random.below(symbols.size())], result, static_cast<int>(random.below(200)), 1);
    }
    // Not supported: some windows are copies then.
    for (int i = 0; i < 4; ++i) fake.fail("cuMemHostRegister_v2", 801, static_cast<int>(random.below(20)), 1);
}

// After the engine was closed: nobody writes to the ledger, and nothing was lost or counted twice.
void check_counts(const Round& round) {
    const Counts counts = round.ledger->total();
    if (std::accumulate(counts.sizes.begin(), counts.sizes.end(), std::uint64_t{0}) != counts.operations ||
        std::accumulate(counts.latencies.begin(), counts.latencies.end(), std::uint64_t{0}) != counts.timed) {
        complain("the histograms do not add up: " + round.text());
    }
    const std::uint64_t before = round.process->microseconds();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (round.process->microseconds() != before) complain("active although nothing is under way: " + round.text());
}

struct Totals {
    int rounds = 0;
    int ios_right = 0;
    int jobs = 0;
    int right = 0;
};

void run_round(Random& random, const Fake& fake, const std::vector<Source>& sources, Totals& totals) {
    Round round = Round::make(random, fake);
    if (fake.there()) fake.set_delay_us(static_cast<unsigned>(random.below(3) * 100));
    std::vector<std::shared_ptr<File>> files;
    for (const Source& source : sources) files.push_back(source.open());
    Engine engine(round.config(random));
    // Mapped from several threads at once, as two handles on one engine would.
    {
        std::vector<std::jthread> threads;
        for (int i = 0; i < 2; ++i) {
            threads.emplace_back([&] {
                for (const auto& file : files) engine.map(*file);
            });
        }
    }
    if (round.driver_faults) inject_driver_faults(fake, random);

    const auto now = Clock::now();
    const auto end = now + std::chrono::milliseconds(150 + random.below(300));
    std::vector<std::unique_ptr<Client>> clients;
    for (int i = 0; i < kClients; ++i) {
        clients.push_back(std::make_unique<Client>(round, engine, sources, files, random.engine()()));
    }
    {
        std::vector<std::jthread> threads;
        for (const auto& client : clients) threads.emplace_back([&client, end] { client->run(end); });
        threads.emplace_back([&engine, &round, end] {
            while (Clock::now() < end) {
                engine.counters();
                round.ledger->total();
                round.process->microseconds();
                engine.take_notes();
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
        });
        if (round.close_early) {
            const auto early = now + std::chrono::milliseconds(random.below(150));
            for (int i = 0; i < 2; ++i) {
                threads.emplace_back([&engine, early] {
                    std::this_thread::sleep_until(early);
                    engine.close();
                });
            }
        }
        if (round.touch) {
            threads.emplace_back([&] {
                std::this_thread::sleep_for(std::chrono::milliseconds(50));
                sources.front().touch();
            });
        }
    }
    if (fake.there()) fake.clear_faults();
    engine.close();
    check_counts(round);
    for (const auto& client : clients) {
        client->finish();
        totals.jobs += client->jobs();
        totals.right += client->right();
    }
    ++totals.rounds;
}

void check_nothing_left(const Fake& fake) {
    for (const char* name : {"streams", "events", "registrations", "primary_contexts", "in_flight_copies",
                             "unregister_in_use", "unregister_unmapped", "pageable_async_copies", "invalid_handles"}) {
        const unsigned long count = fake.counter(name);
        if (count != 0) complain(std::string(name) + " is " + std::to_string(count) + " in the end");
    }
}

int stress(double seconds, std::uint64_t seed) {
    const char* base = std::getenv("TMPDIR");
    std::string folder = std::string(base != nullptr ? base : "/tmp") + "/gdsstream-stress-XXXXXX";
    if (::mkdtemp(folder.data()) == nullptr) {
        std::perror(folder.c_str());
        return 1;
    }
    const Fake fake = Fake::load();
    std::printf("seed %llu, %s, %s\n", static_cast<unsigned long long>(seed),
                fake.there() ? "CPU and stand-in driver" : "CPU only (GDSSTREAM_LIBCUDA names no stand-in driver)",
                uring_unavailable_reason().empty() ? "io_uring" : "no io_uring");
    std::fflush(stdout);
    Totals totals;
    {
        Random random(seed);
        const std::vector<Source> sources = make_sources(folder, random);
        const auto end = Clock::now() + std::chrono::duration<double>(seconds);
        while (Clock::now() < end && complaints == 0) {
            run_round(random, fake, sources, totals);
            for (int i = 0; i < 5; ++i) {
                const IosRound ios = run_ios_round(random, fake, sources);
                if (!ios.wrong.empty()) complain(ios.wrong);
                totals.ios_right += ios.right;
            }
        }
    }
    std::filesystem::remove_all(folder);
    if (fake.there()) {
        fake.drain();
        check_nothing_left(fake);
    }
    std::printf("%d rounds, %d transfers, %d of them complete and right, %d rounds of ios right, %d complaint(s)\n",
                totals.rounds, totals.jobs, totals.right, totals.ios_right, complaints.load());
    return complaints == 0 && totals.right > 0 && totals.ios_right > 0 ? 0 : 1;
}

}  // namespace
}  // namespace gdsstream

int main(int argc, char** argv) {
    const double seconds = argc > 1 ? std::atof(argv[1]) : 20;
    const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device{}();
    return gdsstream::stress(seconds, seed);
}
