// State of the simulated driver: what a device, a stream, an event and a graph are. Nothing runs when it is issued: work waits in its
// stream until somebody waits for it, so that a result which is read too early is still the old one.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ptx.h"

#define API extern "C" __attribute__((visibility("default")))

namespace driver {

enum Result : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    STUB_LIBRARY = 34,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    INVALID_PTX = 218,
    UNSUPPORTED_PTX_VERSION = 222,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    NOT_READY = 600,
    LAUNCH_OUT_OF_RESOURCES = 701,
    HOST_MEMORY_ALREADY_REGISTERED = 712,
    HOST_MEMORY_NOT_REGISTERED = 713,
    STREAM_CAPTURE_UNSUPPORTED = 900,
    STREAM_CAPTURE_INVALIDATED = 901,
    STREAM_CAPTURE_UNMATCHED = 903,
    STREAM_CAPTURE_UNJOINED = 904,
    STREAM_CAPTURE_ISOLATION = 905,
    STREAM_CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    STREAM_CAPTURE_WRONG_THREAD = 908,
};

typedef std::function<void()> Work;

struct Object {
    const char* kind;
    explicit Object(const char* kind) : kind(kind) {}
    virtual ~Object() {}
};

struct Graph : Object {
    std::vector<Work> work;
    explicit Graph(const char* kind) : Object(kind) {}
};

// A recording in progress. Streams that wait for an event of it join it.
struct Stream;
struct Capture {
    std::vector<Work> work;
    Stream* origin;
    std::set<Stream*> joined;    // with work that no event of theirs has brought back yet
    int mode;
    std::thread::id thread;
    bool invalid = false;
};

struct Device;
struct Stream : Object {
    Device* device;
    bool blocking;  // waits for the default stream, and the default stream for it
    std::deque<Work> queue;
    uint64_t issued = 0, done = 0;
    std::shared_ptr<Capture> capture;
    Stream(Device* device, bool blocking) : Object("stream"), device(device), blocking(blocking) {}
};

// What work in a queue knows of an event: it may outlive the event's handle.
struct Mark {
    Stream* stream = nullptr;
    uint64_t ticket = 0;
    bool done = true;
    double milliseconds = 0;
};

struct Event : Object {
    Device* device;
    bool timing;
    std::shared_ptr<Mark> mark;  // null = never recorded
    std::shared_ptr<Capture> capture;
    Stream* captured_from = nullptr;
    Event(Device* device, bool timing) : Object("event"), device(device), timing(timing) {}
};

struct Allocation {
    Device* device;
    size_t bytes;
    uint8_t* base;
    size_t base_bytes;
};

struct Device {
    int number = 0;
    size_t total = 0, used = 0, peak = 0;
    unsigned retained = 0;
    std::unique_ptr<Stream> default_stream;
};

struct EntryPoint {
    const char* name;
    size_t argument_bytes;
    void (*call)(const void* arguments);
};

struct Function {
    const EntryPoint* entry_point;
    Device* device;
    size_t static_shared;
    size_t max_dynamic;
    unsigned max_threads;
    std::shared_ptr<const ptx::Kernel> ptx;  // what runs instead of the entry point, with IEC_SIM_PTX
};

struct Module : Object {
    Device* device;
    std::string image;
    std::map<std::string, std::unique_ptr<Function>> functions;
    explicit Module(Device* device) : Object("module"), device(device) {}
};

// Everything, under one lock.
struct Driver {
    std::recursive_mutex lock;
    bool initialized = false;
    std::vector<std::unique_ptr<Device>> devices;
    std::map<void*, std::unique_ptr<Object>> objects;
    std::map<uint64_t, Allocation> allocations;
    std::map<uint8_t*, size_t> pinned;     // what cuMemHostAlloc gave
    std::map<uint8_t*, size_t> registered;  // what cuMemHostRegister pinned
    std::set<Capture*> captures;
    uint64_t launches = 0;
    int capability = 80;
    int version = 12080;
};

Driver& the_driver();
// The kernels: the first one, and how many.
std::pair<const EntryPoint*, size_t> entry_points();
Device*& current_device();

size_t number_from_environment(const char* name, size_t otherwise);
int refuse(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));

// The error that IEC_SIM_FAIL asks this call to give, or 0.
int planted_failure(const char* function);

// Runs an entry of the API under the lock, for the device whose context is current.
template <class Body>
int in_context(const char* function, Body body) {
    Driver& d = the_driver();
    std::lock_guard<std::recursive_mutex> lock(d.lock);
    if (int code = planted_failure(function)) return code;
    if (!d.initialized) return refuse(NOT_INITIALIZED, "%s before cuInit", function);
    if (!current_device()) return refuse(INVALID_CONTEXT, "%s: this thread has no current context", function);
    return body(*current_device());
}

template <class T>
T* find(void* handle) {
    auto at = the_driver().objects.find(handle);
    return at == the_driver().objects.end() ? nullptr : dynamic_cast<T*>(at->second.get());
}

template <class T>
T* add(T* object) {
    the_driver().objects[object].reset(object);
    return object;
}

// The stream of a handle of this device, or null. Handles 0, 1 and 2 are the default stream.
Stream* stream_of(Device& device, void* handle);
// Appends work to a stream, or to what it records.
int issue(Stream& stream, Work work);
void drain(Stream& stream, uint64_t ticket);
void drain_all(Device& device);
// For calls that wait or allocate: an error while something is recorded, which it spoils.
int refuse_in_capture(const char* function);

bool is_pinned(const void* address, size_t bytes);

}  // namespace driver
