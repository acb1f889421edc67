// What tests ask of the fake driver beyond the driver's own functions: time, faults and counts.
//
// Build:  g++ -std=c++20 -O1 -g -fPIC -shared -pthread -o libfakecuda.so fake_cuda.cpp memory.cpp control.cpp
//         and the -fsanitize= of the program that loads it.
// Use:    GDSSTREAM_LIBCUDA=/path/to/libfakecuda.so; a destination is the address of an ordinary host buffer.
//         ctypes.CDLL of the same path reaches the functions below in the library that the engine loaded.
//
// Environment, read once:
//   FAKE_CUDA_DEVICES   devices, 0 to 16 (2)
//   FAKE_CUDA_DELAY_US  every operation of a stream starts up to this many microseconds late (200)
//   FAKE_CUDA_SEED      of the pseudo-random delays (1)
//
// Harsher than a GPU on purpose: a copy reads its source when it runs, also from pageable memory; the default stream
// is a stream like any other, so it orders nothing by itself; a thread without a current context is refused also where
// a current driver takes the context from the handle; what is leaked stays in the counts when its context is released.
#pragma once

// name, what it counts. The "now" counts go down again; the others only grow.
#define FAKE_CUDA_COUNTERS(X)                                                                   \
    X(streams)               /* now: created and not destroyed; default streams are left out */ \
    X(events)                /* now */                                                          \
    X(registrations)         /* now: host ranges */                                             \
    X(registered_bytes)      /* now */                                                          \
    X(primary_contexts)      /* now: retains not yet released, over all devices */              \
    X(device_allocations)    /* now: cuMemAlloc_v2 */                                           \
    X(device_bytes)          /* now */                                                          \
    X(in_flight_copies)      /* now: enqueued and not finished */                               \
    X(in_flight_operations)  /* now: the same with records, waits and host functions */         \
    X(copies)                /* finished, in both directions */                                 \
    X(copied_bytes)          /* of the finished ones */                                         \
    X(host_functions)        /* finished */                                                     \
    X(unregister_in_use)     /* use error: host memory unregistered under a queued copy */      \
    X(unregister_unmapped)   /* use error: host memory unmapped before it was unregistered */   \
    X(pageable_async_copies) /* HtoDAsync from memory that is not registered */                 \
    X(invalid_handles)       /* use error: a stream or event that is destroyed or never was */

#ifdef __cplusplus
extern "C" {
#endif

#define FAKE_CUDA_FIELD(name) unsigned long name;
struct fake_cuda_stats_t {
    FAKE_CUDA_COUNTERS(FAKE_CUDA_FIELD)
};
#undef FAKE_CUDA_FIELD

// Returns 0. The counts are read one by one: they agree with each other only while nothing runs.
int fake_cuda_stats(struct fake_cuda_stats_t* out);
// A count of the list above, or, for a driver function's symbol, how often it was called; 0 for any other name.
unsigned long fake_cuda_counter(const char* name);

// After `after_n_calls` more calls, the next `times` calls (every one when negative) of the driver function return
// `result` and do nothing. Rules for the same symbol are consumed in the order given. -1 for an unknown symbol.
int fake_cuda_fail(const char* symbol, int result, int after_n_calls, int times);
void fake_cuda_clear_faults(void);

// From now on [address, address + bytes) counts as a device allocation of its own, as if cuMemAlloc_v2 had made it: a
// copy that begins in it and reaches past its end is refused. Memory that nobody told of has no bounds.
int fake_cuda_allocation(unsigned long long address, unsigned long long bytes);

// How far a stream is filled now (0: the default streams of all contexts), by a number; a stream that is not there is
// at its end. And whether that has been reached: 1 once, when the number is forgotten, and ever after.
unsigned long fake_cuda_place(unsigned long stream);
int fake_cuda_reached(unsigned long place);

void fake_cuda_set_delay_us(unsigned microseconds);
// While paused, no operation starts. Returns after the copies that were running are done.
void fake_cuda_pause(int on);
void fake_cuda_resume(void);
// Waits until every queue is empty. -1 at once while paused, since that would never come.
int fake_cuda_drain(void);

#ifdef __cplusplus
}
#endif
