// The Python face of the native engine. Conversions only: every decision is made elsewhere.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "engine.hpp"
#include "fence.hpp"
#include "ledger.hpp"
#include "pace.hpp"
#include "task.hpp"
#include "timed_ios.hpp"

namespace nb = nanobind;

namespace gdsstream {

namespace {

const char* python_name(ErrorKind kind) {
    switch (kind) {
        case ErrorKind::config:
            return "ConfigError";
        case ErrorKind::read:
            return "ReadError";
        case ErrorKind::short_read:
            return "ShortReadError";
        case ErrorKind::changed:
            return "FileChangedError";
        case ErrorKind::cuda:
            return "CudaError";
        case ErrorKind::cancelled:
            return "TransferCancelledError";
        case ErrorKind::closed:
            return "EngineClosedError";
        case ErrorKind::forked:
            return "ForkedProcessError";
        case ErrorKind::memory:
            return "MemoryBudgetError";
        case ErrorKind::unavailable:
            return "BackendUnavailableError";
    }
    return "GdsStreamError";
}

void translate(const std::exception_ptr& pointer, void*) {
    try {
        std::rethrow_exception(pointer);
    } catch (const Error& error) {
        try {
            const nb::object type = nb::module_::import_("gdsstream.errors").attr(python_name(error.kind()));
            nb::object instance = type(error.what());
            if (error.errnum() != 0 && nb::hasattr(instance, "errno")) instance.attr("errno") = error.errnum();
            PyErr_SetObject(type.ptr(), instance.ptr());
        } catch (nb::python_error& interrupt) {
            // Ctrl-C while it was made: it stays what it is.
            interrupt.restore();
        }
    }
}

template <typename T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Stamp to_stamp(std::tuple<std::uint64_t, std::uint64_t, std::int64_t, std::int64_t, std::int64_t> stamp) {
    return std::apply([](auto... fields) { return Stamp{fields...}; }, stamp);
}

std::vector<Extent> to_extents(const Array<std::int32_t>& file, const Array<std::int64_t>& offset,
                               const Array<std::int64_t>& bytes, const Array<std::uint64_t>& target,
                               const Array<std::int32_t>& group) {
    const std::size_t count = file.size();
    if (offset.size() != count || bytes.size() != count || target.size() != count || group.size() != count) {
        throw Error(ErrorKind::config, "the arrays of extents differ in length");
    }
    std::vector<Extent> extents(count);
    for (std::size_t i = 0; i < count; ++i) {
        if (file(i) < 0 || offset(i) < 0 || bytes(i) < 0 || group(i) < 0) {
            throw Error(ErrorKind::config, "extent " + std::to_string(i) + " has a negative number");
        }
        extents[i] = Extent{static_cast<std::uint64_t>(offset(i)), static_cast<std::uint64_t>(bytes(i)), target(i),
                            static_cast<std::uint32_t>(file(i)), static_cast<std::uint32_t>(group(i))};
    }
    return extents;
}

std::vector<Extent> to_records(const Array<std::int32_t>& file, const Array<std::int64_t>& offset,
                               std::uint64_t record_bytes, std::uint64_t target) {
    const std::size_t count = file.size();
    if (offset.size() != count) throw Error(ErrorKind::config, "file and offset arrays differ in length");
    std::vector<Extent> extents(count);
    for (std::size_t i = 0; i < count; ++i) {
        if (file(i) < 0 || offset(i) < 0) {
            throw Error(ErrorKind::config, "record " + std::to_string(i) + " has a negative file or offset");
        }
        extents[i] = Extent{static_cast<std::uint64_t>(offset(i)), record_bytes, target + i * record_bytes,
                            static_cast<std::uint32_t>(file(i)), 0};
    }
    return extents;
}

std::vector<TimedIo> to_ios(const Array<std::int32_t>& descriptor, const Array<std::int64_t>& offset,
                            const Array<std::int64_t>& bytes, const Array<std::uint64_t>& address) {
    const std::size_t count = descriptor.size();
    if (offset.size() != count || bytes.size() != count || address.size() != count) {
        throw Error(ErrorKind::config, "the arrays of ios differ in length");
    }
    std::vector<TimedIo> ios(count);
    for (std::size_t i = 0; i < count; ++i) {
        if (offset(i) < 0 || bytes(i) < 0) {
            throw Error(ErrorKind::config, "io " + std::to_string(i) + " has a negative number");
        }
        ios[i] = TimedIo{descriptor(i), static_cast<std::uint64_t>(offset(i)), static_cast<std::uint64_t>(bytes(i)),
                         address(i)};
    }
    return ios;
}

// Goes with the interpreter's lock held, which is why Quarantine lets go of owners only where it is told to.
std::shared_ptr<void> to_owner(nb::object keep) {
    if (keep.is_none()) return nullptr;
    return std::make_shared<nb::object>(std::move(keep));
}

ReaderKind to_reader(const std::string& name) {
    if (name == "pread") return ReaderKind::pread;
    if (name == "io_uring") return ReaderKind::uring;
    if (name == "mapped") return ReaderKind::mapped;
    throw Error(ErrorKind::config, "reader \"" + name + "\" is unknown: pread, io_uring or mapped");
}

using Spans = std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>>;

// For tests of the cutting: each task as (group, reads, copies).
std::vector<std::tuple<std::uint32_t, Spans, Spans>> cut(std::vector<Extent> extents, std::uint64_t task_bytes,
                                                         std::uint64_t alignment, std::uint64_t read_bytes,
                                                         unsigned ramp_tasks) {
    std::uint32_t files = 0;
    for (const Extent& extent : extents) files = std::max(files, extent.file + 1);
    const CutRules rules{task_bytes, alignment, read_bytes, ramp_tasks};
    std::vector<std::tuple<std::uint32_t, Spans, Spans>> result;
    for (const Task& task : cut_tasks(extents, std::vector<std::uint32_t>(files, 0), 0, rules)) {
        std::vector<ReadSpan> reads;
        std::vector<CopySpan> copies;
        expand_staged(extents, task, rules, reads, copies);
        Spans read_tuples;
        Spans copy_tuples;
        for (const ReadSpan& r : reads) read_tuples.emplace_back(r.file, r.offset, r.bytes, r.wanted, r.place);
        for (const CopySpan& c : copies) copy_tuples.emplace_back(c.source, c.target, c.bytes, c.file, 0);
        result.emplace_back(task.group, std::move(read_tuples), std::move(copy_tuples));
    }
    return result;
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The native engine of gdsstream: readers, staging ring, copies and fences.";
    nb::register_exception_translator(translate);
    using Release = nb::call_guard<nb::gil_scoped_release>;

    m.def(
        "cuda_reason", [] { return cuda::unavailable_reason(); },
        "Why the CUDA driver cannot be used, or an empty string.");
    m.def("io_uring_reason", &uring_unavailable_reason, "Why io_uring cannot be used, or an empty string.");
    m.def("file_alignment", &direct_alignment_of, nb::arg("path"),
          "(memory, offset) alignment in bytes that O_DIRECT needs, by statx; (0, 0) where untold.");
    m.def("direct_io_works", &direct_io_works, nb::arg("path"), Release(), "Whether one O_DIRECT read succeeds.");
    m.def("resident_bytes", &resident_bytes, nb::arg("path"), nb::arg("offset"), nb::arg("nbytes"), Release(),
          "How many of the bytes are in the page cache, by mincore.");
    m.def("unevictable_bytes", &unevictable_bytes,
          "Page cache that this process has registered, which the kernel counts as available and cannot evict.");
    m.def("pci_bus_id", &cuda::pci_bus_id, nb::arg("ordinal"));
    m.def("size_bucket", &size_bucket, nb::arg("nbytes"), "Which of Counts.sizes an operation is counted in.");
    m.def("latency_bucket", &latency_bucket, nb::arg("ns"), "Which of Counts.latencies.");
    m.def("cut_for_tests",
          [](const Array<std::int32_t>& file, const Array<std::int64_t>& offset, const Array<std::int64_t>& bytes,
             const Array<std::uint64_t>& target, const Array<std::int32_t>& group, std::uint64_t task_bytes,
             std::uint64_t alignment, std::uint64_t read_bytes, unsigned ramp_tasks) {
              return cut(to_extents(file, offset, bytes, target, group), task_bytes, alignment, read_bytes, ramp_tasks);
          });

    // Torch never frees an autograd graph that is alive when the interpreter exits, nor what it refers to.
    nb::set_leak_warnings(false);

    nb::class_<File>(m, "File", nb::is_weak_referenceable())
        .def(nb::new_([](std::string path,
                         std::tuple<std::uint64_t, std::uint64_t, std::int64_t, std::int64_t, std::int64_t> stamp,
                         int interrupt_cpu) {
                 return std::make_shared<File>(std::move(path), to_stamp(stamp), interrupt_cpu);
             }),
             nb::arg("path"), nb::arg("stamp"), nb::arg("interrupt_cpu") = -1)
        .def_prop_ro("path", &File::path)
        .def_prop_ro("nbytes", &File::size)
        .def("resident_fraction", &File::resident_fraction, Release(),
             "The share of the file in the page cache, from windows spread over it.")
        .def_prop_ro("mapped", [](const File& file) { return file.windows() != nullptr; })
        .def_prop_ro("mapped_bytes",
                     [](const File& file) { return file.windows() != nullptr ? file.windows()->bytes() : 0; })
        .def_prop_ro("host_copy", [](const File& file) {
            return file.windows() != nullptr && !file.windows()->copied_because().empty();
        });

    nb::class_<FenceStream>(m, "FenceStream")
        .def(nb::init<int>(), nb::arg("ordinal"), Release())
        .def_prop_ro("handle", &FenceStream::handle);

    nb::class_<Fence>(m, "Fence")
        .def(nb::init<const FenceStream&, bool>(), nb::arg("stream"), nb::arg("timing") = false)
        .def("record", &Fence::record, nb::arg("stream"))
        .def("order", &Fence::order, nb::arg("stream"))
        .def("done", &Fence::done)
        .def("elapsed_ms", &Fence::elapsed_ms, nb::arg("earlier"));

    nb::class_<Counts>(m, "Counts")
        .def_ro("operations", &Counts::operations)
        .def_ro("bytes", &Counts::bytes)
        .def_ro("errors", &Counts::errors)
        .def_ro("retries", &Counts::retries)
        .def_ro("timed", &Counts::timed)
        .def_ro("latency_ns", &Counts::latency_ns)
        .def_ro("longest_ns", &Counts::longest_ns)
        .def_ro("sizes", &Counts::sizes)
        .def_ro("latencies", &Counts::latencies);

    nb::class_<Ledger>(m, "Ledger")
        .def(nb::new_([](bool histograms) { return std::make_shared<Ledger>(histograms); }), nb::arg("histograms"))
        .def("record", &Ledger::record, nb::arg("nbytes"), nb::arg("ns"), nb::arg("retries") = 0)
        .def("fail", &Ledger::fail)
        .def("total", &Ledger::total);

    nb::class_<Activity>(m, "Activity")
        .def(nb::new_([](std::shared_ptr<Activity> parent) { return std::make_shared<Activity>(std::move(parent)); }),
             nb::arg("parent") = nb::none())
        .def("begin", &Activity::begin, nb::arg("things") = 1)
        .def("end", &Activity::end)
        .def("microseconds", &Activity::microseconds);

    nb::class_<LaneConfig>(m, "Lane").def(
        "__init__",
        [](LaneConfig* self, const std::string& reader, bool direct, unsigned threads, unsigned depth,
           std::uint64_t read_bytes, bool fixed_buffers, std::uint64_t paced_bytes, std::uint64_t near_interrupts_bytes,
           std::uint64_t slot_bytes, std::uint64_t staging_bytes, std::string faults, std::shared_ptr<Ledger> ledger) {
            new (self) LaneConfig{to_reader(reader), direct,        threads,           depth,
                                  read_bytes,        fixed_buffers, paced_bytes,       near_interrupts_bytes,
                                  slot_bytes,        staging_bytes, std::move(faults), std::move(ledger)};
        },
        nb::arg("reader"), nb::kw_only(), nb::arg("direct"), nb::arg("threads"), nb::arg("depth"),
        nb::arg("read_bytes"), nb::arg("fixed_buffers") = false, nb::arg("paced_bytes") = 0,
        nb::arg("near_interrupts_bytes") = 0, nb::arg("slot_bytes") = 0, nb::arg("staging_bytes") = 0,
        nb::arg("faults") = "", nb::arg("ledger") = nb::none());

    nb::class_<Pace>(m, "Pace")
        .def(nb::init<unsigned, std::uint64_t>(), nb::arg("threads"), nb::arg("least_bytes"))
        .def_prop_ro("limit_bytes", &Pace::limit_bytes)
        .def("begin", &Pace::begin, nb::arg("now_ns"))
        .def("arrived", &Pace::arrived, nb::arg("reads"), nb::arg("nbytes"), nb::arg("quickest_ns"), nb::arg("now_ns"));

    nb::class_<TransferHandle>(m, "Transfer")
        .def(
            "wait", [](TransferHandle& self, int group, double seconds) { return self->wait(group, seconds); },
            nb::arg("group"), nb::arg("seconds"), Release())
        .def(
            "order_before",
            [](TransferHandle& self, int group, std::uintptr_t stream) { self->order_before(group, stream); },
            nb::arg("group"), nb::arg("stream"), Release())
        .def(
            "cancel", [](TransferHandle& self) { self->cancel(); }, Release())
        .def(
            "drained", [](TransferHandle& self) { return self->drained(); }, Release())
        .def("complete", &TransferHandle::complete)
        .def_prop_ro("nbytes", [](const TransferHandle& self) { return self->bytes(); });

    nb::class_<TimedIos>(m, "TimedIos")
        .def(
            "__init__",
            [](TimedIos* self, unsigned threads, std::uint64_t memory, std::uint64_t buffer_bytes, unsigned buffers,
               int device) { new (self) TimedIos(TimedIosConfig{threads, memory, buffer_bytes, buffers, device}); },
            nb::arg("threads"), nb::kw_only(), nb::arg("memory") = 0, nb::arg("buffer_bytes") = 0,
            nb::arg("buffers") = 0, nb::arg("device") = -1, Release())
        .def(
            "begin",
            [](TimedIos& self, const Array<std::int32_t>& descriptor, const Array<std::int64_t>& offset,
               const Array<std::int64_t>& bytes, const Array<std::uint64_t>& address,
               bool write) { self.begin(to_ios(descriptor, offset, bytes, address), write); },
            nb::arg("descriptor"), nb::arg("offset"), nb::arg("nbytes"), nb::arg("address"), nb::kw_only(),
            nb::arg("write"))
        .def("wait", &TimedIos::wait, nb::arg("seconds"), Release())
        .def(
            "seconds",
            [](const TimedIos& self, nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu> out) {
                std::copy_n(self.seconds().begin(), std::min(self.seconds().size(), out.size()), out.data());
            },
            nb::arg("out"))
        .def("close", &TimedIos::close, Release());

    nb::class_<Request>(m, "Request")
        .def(
            "__init__",
            [](Request* self, std::vector<std::shared_ptr<File>> files, std::vector<std::uint32_t> file_lane,
               const Array<std::int32_t>& file, const Array<std::int64_t>& offset, const Array<std::int64_t>& bytes,
               const Array<std::uint64_t>& target, const Array<std::int32_t>& group, std::uint32_t groups) {
                new (self) Request{std::move(files), std::move(file_lane),
                                   to_extents(file, offset, bytes, target, group), groups};
            },
            nb::arg("files"), nb::arg("file_lane"), nb::arg("file"), nb::arg("offset"), nb::arg("nbytes"),
            nb::arg("target"), nb::arg("group"), nb::arg("groups"));

    nb::class_<Engine>(m, "Engine")
        .def(
            "__init__",
            [](Engine* self, int device, std::uint64_t slot_bytes, std::uint64_t staging_bytes, int numa_node,
               std::vector<int> cpus, std::vector<LaneConfig> lanes, std::shared_ptr<Activity> process) {
                new (self) Engine(EngineConfig{device, slot_bytes, staging_bytes, numa_node, std::move(cpus),
                                               std::move(lanes), std::move(process)});
            },
            nb::kw_only(), nb::arg("device"), nb::arg("slot_bytes"), nb::arg("staging_bytes"), nb::arg("numa_node"),
            nb::arg("cpus"), nb::arg("lanes"), nb::arg("process") = nb::none())
        .def(
            "submit",
            [](Engine& engine, const Request& request, std::uintptr_t stream, nb::object keep) {
                engine.quarantine().sweep();
                const std::shared_ptr<void> owner = to_owner(std::move(keep));
                const nb::gil_scoped_release release;
                return engine.submit(request, stream, owner);
            },
            nb::arg("request"), nb::arg("stream"), nb::arg("keep").none())
        .def(
            "gather",
            [](Engine& engine, std::vector<std::shared_ptr<File>> files, std::vector<std::uint32_t> file_lane,
               const Array<std::int32_t>& file, const Array<std::int64_t>& offset, std::uint64_t record_bytes,
               std::uint64_t target, std::uintptr_t stream, nb::object keep) {
                engine.quarantine().sweep();
                const std::shared_ptr<void> owner = to_owner(std::move(keep));
                const nb::gil_scoped_release release;
                std::vector<Extent> extents = to_records(file, offset, record_bytes, target);
                return engine.submit(Request{std::move(files), std::move(file_lane), std::move(extents), 1}, stream,
                                     owner);
            },
            nb::arg("files"), nb::arg("file_lane"), nb::arg("file"), nb::arg("offset"), nb::arg("record_bytes"),
            nb::arg("target"), nb::arg("stream"), nb::arg("keep"))
        .def("prepare", &Engine::prepare, nb::arg("lane"), Release())
        .def(
            "map",
            [](Engine& engine, File& file,
               const std::optional<std::vector<std::pair<std::uint64_t, std::uint64_t>>>& windows, bool allow_copy) {
                std::optional<std::vector<Range>> ranges;
                if (windows.has_value()) {
                    ranges.emplace();
                    for (const auto& [offset, bytes] : *windows) ranges->push_back(Range{offset, bytes});
                }
                engine.map(file, ranges, allow_copy);
            },
            nb::arg("file"), nb::arg("windows") = nb::none(), nb::kw_only(), nb::arg("allow_copy") = false, Release())
        .def("close",
             [](Engine& engine) {
                 {
                     const nb::gil_scoped_release release;
                     engine.close();
                 }
                 engine.quarantine().clear();
             })
        .def("quarantined",
             [](Engine& engine) {
                 engine.quarantine().sweep();
                 return engine.quarantine().size();
             })
        .def("idle", &Engine::idle, Release())
        .def("counters", &Engine::counters)
        .def("ring_wait_us", &Engine::ring_wait_us)
        .def("take_notes", &Engine::take_notes)
        .def_prop_ro("device", &Engine::device)
        .def_prop_ro("forked", &Engine::forked);
}

}  // namespace gdsstream
