// What the stress program is made of: chance, the stand-in driver's controls, and files whose bytes are known.
#pragma once

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "file.hpp"

namespace gdsstream {

using Bytes = std::vector<std::byte>;

class Random {
  public:
    explicit Random(std::uint64_t seed) : engine_(seed) {}
    std::uint64_t below(std::uint64_t limit) { return engine_() % limit; }
    bool chance(unsigned percent) { return below(100) < percent; }
    std::mt19937_64& engine() { return engine_; }

  private:
    std::mt19937_64 engine_;
};

// The controls of fake_cuda.h; without a stand-in driver only the CPU is stressed.
struct Fake {
    unsigned long (*counter)(const char*) = nullptr;
    int (*fail)(const char*, int, int, int) = nullptr;
    void (*clear_faults)() = nullptr;
    void (*set_delay_us)(unsigned) = nullptr;
    int (*drain)() = nullptr;

    static Fake load() {
        Fake fake;
        const char* name = std::getenv("GDSSTREAM_LIBCUDA");
        void* library = name != nullptr ? ::dlopen(name, RTLD_NOW | RTLD_LOCAL) : nullptr;
        if (library == nullptr) return fake;
        const auto find = [library](auto& function, const char* symbol) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, symbol));
        };
        find(fake.counter, "fake_cuda_counter");
        find(fake.fail, "fake_cuda_fail");
        find(fake.clear_faults, "fake_cuda_clear_faults");
        find(fake.set_delay_us, "fake_cuda_set_delay_us");
        find(fake.drain, "fake_cuda_drain");
        return fake;
    }
    bool there() const { return drain != nullptr; }
};

struct Source {
    std::string path;
    Bytes bytes;

    std::shared_ptr<File> open() const {
        struct stat st{};
        if (::stat(path.c_str(), &st) != 0) std::abort();
        const Stamp stamp{static_cast<std::uint64_t>(st.st_dev), static_cast<std::uint64_t>(st.st_ino), st.st_size,
                          st.st_mtim.tv_sec * 1000000000LL + st.st_mtim.tv_nsec,
                          st.st_ctim.tv_sec * 1000000000LL + st.st_ctim.tv_nsec};
        return std::make_shared<File>(path, stamp, 0);
    }
    void touch() const { ::utimensat(AT_FDCWD, path.c_str(), nullptr, 0); }
};

inline std::vector<Source> make_sources(const std::string& folder, Random& random) {
    std::vector<Source> sources;
    for (const std::size_t size : {3'000'017UL, 1'048'576UL, 70'001UL, 4'097UL}) {
        Source source{folder + "/" + std::to_string(size), Bytes(size)};
        for (std::byte& byte : source.bytes) byte = static_cast<std::byte>(random.engine()());
        std::ofstream(source.path, std::ios::binary)
            .write(reinterpret_cast<const char*>(source.bytes.data()), static_cast<std::streamsize>(size));
        sources.push_back(std::move(source));
    }
    return sources;
}

}  // namespace gdsstream
