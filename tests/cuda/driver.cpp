// A `libcuda.so.1` for tests: the driver calls that iec makes, with kernels run by emulator.cpp. It tests the host's side, not speed,
// and refuses what a driver refuses or leaves undefined. The environment shapes it:
//   IEC_SIM_DEVICES=1  IEC_SIM_MEMORY=bytes of each (8 GiB)  IEC_SIM_CAPABILITY=8.0  IEC_SIM_VERSION=12080
//   IEC_SIM_INIT=what cuInit answers  IEC_SIM_FAIL=function:n:code, what the n-th call of a function answers
//   IEC_SIM_STRICT=1: what was not given back is told at exit; 2: and the status is 70 then
//   IEC_SIM_LOSE=kernel: the last blocks along x of its launches are not run
//   IEC_SIM_VERBOSE=1: says why calls are refused  IEC_SIM_TRACE=file: a line for each launch
//   IEC_SIM_PTX=1: interprets the PTX that was loaded, instead of running the kernels compiled for the host
// This file: start, devices, modules and launches.
#include "driver.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>

#include "emulator.h"

namespace driver {

namespace {

thread_local Device* current = nullptr;

void report_at_exit() {
    Driver& d = the_driver();
    bool leaks = !d.allocations.empty() || !d.pinned.empty() || !d.registered.empty() || !d.objects.empty();
    for (auto& device : d.devices)
        if (device->peak) fprintf(stderr, "simulated driver: device %d held at most %zu bytes\n", device->number, device->peak);
    fprintf(stderr, "simulated driver: %llu launches\n", (unsigned long long)d.launches);
    for (auto& a : d.allocations) fprintf(stderr, "simulated driver: %zu bytes at %#llx were not freed\n", a.second.bytes, (unsigned long long)a.first);
    for (auto& p : d.pinned) fprintf(stderr, "simulated driver: %zu bytes of pinned memory were not freed\n", p.second);
    for (auto& p : d.registered) fprintf(stderr, "simulated driver: %zu bytes of host memory are still registered\n", p.second);
    for (auto& o : d.objects) fprintf(stderr, "simulated driver: a %s was not destroyed\n", o.second->kind);
    if (leaks && number_from_environment("IEC_SIM_STRICT", 0) > 1) _exit(70);
}

int start() {
    Driver& d = the_driver();
    d.initialized = true;
    d.version = number_from_environment("IEC_SIM_VERSION", 12080);
    if (const char* text = getenv("IEC_SIM_CAPABILITY")) {
        int major = 8, minor = 0;
        sscanf(text, "%d.%d", &major, &minor);
        d.capability = major * 10 + minor;
    }
    size_t n = number_from_environment("IEC_SIM_DEVICES", 1);
    for (size_t i = 0; i < n; i++) {
        Device* device = new Device;
        device->number = i;
        device->total = number_from_environment("IEC_SIM_MEMORY", (size_t)8 << 30);
        device->default_stream.reset(new Stream(device, true));
        d.devices.emplace_back(device);
    }
    if (number_from_environment("IEC_SIM_STRICT", 0)) atexit(report_at_exit);
    return n ? SUCCESS : NO_DEVICE;
}

// Shared memory that a block may have when the function's limit is raised to it.
size_t most_shared() {
    switch (the_driver().capability) {
        case 75: return 64 << 10;
        case 80: case 87: return 163 << 10;
        case 86: case 89: case 120: return 99 << 10;
        default: return 227 << 10;
    }
}

int attribute(const Device& device, int which) {
    int capability = the_driver().capability;
    switch (which) {
        case 1: return 1024;                          // threads of a block
        case 2: case 3: return 1024;                  // block x, y
        case 4: return 64;                            // block z
        case 5: return 0x7fffffff;                    // grid x
        case 6: case 7: return 65535;                 // grid y, z
        case 8: return 48 << 10;                      // shared memory of a block
        case 10: return 32;                           // warp
        case 12: case 82: return 65536;               // registers of a block, of a multiprocessor
        case 13: return 1980000;                      // clock, kHz
        case 16: return 4;                            // multiprocessors
        case 19: case 31: case 41: return 1;          // maps host memory, concurrent kernels, unified addresses
        case 33: return device.number + 1;            // PCI bus
        case 36: return 3201000;                      // clock of the memory, kHz
        case 37: return 6144;                         // width of its bus
        case 38: return 4 << 20;                      // L2
        case 39: return 2048;                         // threads of a multiprocessor
        case 40: return 2;                            // copy engines
        case 75: return capability / 10;
        case 76: return capability % 10;
        case 81: return most_shared() + 1024;         // shared memory of a multiprocessor
        case 97: return most_shared();
        case 106: return 32;                          // blocks of a multiprocessor
        case 111: return 1024;                        // shared memory that the driver keeps
        default: return 0;
    }
}

}  // namespace

Driver& the_driver() {
    static Driver* driver = new Driver;  // alive while the process exits
    return *driver;
}

Device*& current_device() { return current; }

size_t number_from_environment(const char* name, size_t otherwise) {
    const char* text = getenv(name);
    return text && *text ? strtoull(text, nullptr, 0) : otherwise;
}

int refuse(int code, const char* format, ...) {
    if (number_from_environment("IEC_SIM_VERBOSE", 0)) {
        va_list arguments;
        va_start(arguments, format);
        fprintf(stderr, "simulated driver: error %d: ", code);
        vfprintf(stderr, format, arguments);
        fputc('\n', stderr);
        va_end(arguments);
    }
    return code;
}

int planted_failure(const char* function) {
    static const char* plan = getenv("IEC_SIM_FAIL");
    if (!plan) return 0;
    static char name[64] = "";
    static int left = 0, code = 0;
    if (!*name && sscanf(plan, "%63[^:]:%d:%d", name, &left, &code) != 3) name[0] = '?';
    if (strcmp(name, function) || --left) return 0;
    return refuse(code, "%s: as IEC_SIM_FAIL says", function);
}

}  // namespace driver

using namespace driver;

API int cuInit(unsigned flags) {
    Driver& d = the_driver();
    std::lock_guard<std::recursive_mutex> lock(d.lock);
    if (flags) return INVALID_VALUE;
    if (size_t code = number_from_environment("IEC_SIM_INIT", 0)) return code;
    return d.initialized ? d.devices.empty() ? NO_DEVICE : SUCCESS : start();
}

API int cuDriverGetVersion(int* version) {
    *version = number_from_environment("IEC_SIM_VERSION", 12080);
    return SUCCESS;
}

// The calls below need no context.
template <class Body>
static int with_device(int number, Body body) {
    Driver& d = the_driver();
    std::lock_guard<std::recursive_mutex> lock(d.lock);
    if (!d.initialized) return NOT_INITIALIZED;
    if (number < 0 || (size_t)number >= d.devices.size()) return INVALID_DEVICE;
    return body(*d.devices[number]);
}

API int cuDeviceGetCount(int* n) {
    Driver& d = the_driver();
    std::lock_guard<std::recursive_mutex> lock(d.lock);
    if (!d.initialized) return NOT_INITIALIZED;
    *n = d.devices.size();
    return SUCCESS;
}

API int cuDeviceGet(int* device, int number) {
    return with_device(number, [&](Device&) { return *device = number, SUCCESS; });
}

API int cuDeviceGetName(char* name, int bytes, int number) {
    return with_device(number, [&](Device&) { return snprintf(name, bytes, "Simulated GPU (host CPU)"), SUCCESS; });
}

API int cuDeviceTotalMem_v2(size_t* bytes, int number) {
    return with_device(number, [&](Device& d) { return *bytes = d.total, SUCCESS; });
}

API int cuDeviceGetAttribute(int* value, int which, int number) {
    return with_device(number, [&](Device& d) { return *value = attribute(d, which), SUCCESS; });
}

API int cuDeviceGetPCIBusId(char* text, int bytes, int number) {
    return with_device(number, [&](Device&) { return snprintf(text, bytes, "0000:%02x:00.0", number + 1), SUCCESS; });
}

API int cuDeviceGetUuid(uint8_t* uuid, int number) {
    return with_device(number, [&](Device&) {
        for (int i = 0; i < 16; i++) uuid[i] = 0x10 * number + i;
        return SUCCESS;
    });
}

API int cuDeviceGetUuid_v2(uint8_t* uuid, int number) { return cuDeviceGetUuid(uuid, number); }

API int cuDevicePrimaryCtxRetain(void** context, int number) {
    return with_device(number, [&](Device& d) { return d.retained++, *context = &d, SUCCESS; });
}

API int cuDevicePrimaryCtxRelease_v2(int number) {
    return with_device(number, [&](Device& d) { return d.retained ? (d.retained--, SUCCESS) : INVALID_CONTEXT; });
}

API int cuCtxSetCurrent(void* context) {
    if (context && !((Device*)context)->retained) return refuse(INVALID_CONTEXT, "cuCtxSetCurrent: a context that was released");
    current_device() = (Device*)context;
    return SUCCESS;
}

API int cuCtxGetCurrent(void** context) {
    *context = current_device();
    return SUCCESS;
}

API int cuCtxGetDevice(int* number) {
    return in_context("cuCtxGetDevice", [&](Device& d) { return *number = d.number, SUCCESS; });
}

// The highest .version that a driver of this CUDA version takes, times ten.
static int newest_ptx(int version) {
    int major = version / 1000, minor = version % 1000 / 10;
    return (major - 4) * 10 + std::min(minor, 9);
}

static int load(Device& device, void** handle, const void* image) {
    if (int code = refuse_in_capture("cuModuleLoadData")) return code;
    std::string text = (const char*)image;
    int major = 0, minor = 0, target = 0;
    size_t version = text.find(".version"), sm = text.find(".target");
    if (version == text.npos || sscanf(&text[version], ".version %d.%d", &major, &minor) != 2) return refuse(INVALID_IMAGE, "cuModuleLoadData: no PTX");
    if (sm == text.npos || sscanf(&text[sm], ".target sm_%d", &target) != 1) return refuse(INVALID_PTX, "cuModuleLoadData: no .target");
    if (major * 10 + minor > newest_ptx(the_driver().version)) return refuse(UNSUPPORTED_PTX_VERSION, "PTX %d.%d", major, minor);
    if (target > the_driver().capability) return refuse(NO_BINARY_FOR_GPU, "PTX for sm_%d", target);
    Module* module = add(new Module(&device));
    module->image = text;
    *handle = module;
    return SUCCESS;
}

API int cuModuleLoadData(void** module, const void* image) {
    return in_context("cuModuleLoadData", [&](Device& d) { return load(d, module, image); });
}

API int cuModuleLoadDataEx(void** module, const void* image, unsigned, int*, void**) {
    return in_context("cuModuleLoadDataEx", [&](Device& d) { return load(d, module, image); });
}

API int cuModuleUnload(void* handle) {
    return in_context("cuModuleUnload", [&](Device& d) -> int {
        if (!find<Module>(handle)) return INVALID_HANDLE;
        drain_all(d);
        the_driver().objects.erase(handle);
        return SUCCESS;
    });
}

// Reads from the PTX of a function what the launch must respect, and compares the size of its argument with ours.
static int describe(Function& f, const std::string& ptx, size_t at) {
    size_t body = ptx.find("\n{", at), end = ptx::end_of_body(ptx, body + 1);
    std::string head = ptx.substr(at, body - at), inside = ptx.substr(body, end - body);
    int bytes = 0, threads = 0;
    size_t param = head.find("_param_0[");
    if (param != head.npos) sscanf(&head[param], "_param_0[%d]", &bytes);
    if (bytes != (int)f.entry_point->argument_bytes) {
        fprintf(stderr, "simulated driver: %s takes %d bytes in the PTX, %zu in the sources\n", f.entry_point->name, bytes, f.entry_point->argument_bytes);
        return INVALID_IMAGE;
    }
    size_t most = head.find(".maxntid");
    if (most != head.npos && sscanf(&head[most], ".maxntid %d", &threads) == 1) f.max_threads = threads;
    // Variables of inlined functions lie outside.
    for (size_t i = ptx.find(".shared .align"); i != ptx.npos; i = ptx.find(".shared .align", i + 1)) {
        char name[512];
        size_t size;
        if (i >= 8 && ptx.compare(i - 8, 8, ".extern ") == 0) continue;  // dynamic
        int width, found = sscanf(&ptx[i], ".shared .align %*d .%*c%d %511[^[;][%zu]", &width, name, &size);
        if (found < 2) continue;
        size = found == 2 ? width / 8 : size * width / 8;
        if (inside.find(name) != inside.npos) f.static_shared += size;
    }
    return SUCCESS;
}

API int cuModuleGetFunction(void** function, void* handle, const char* name) {
    return in_context("cuModuleGetFunction", [&](Device& d) -> int {
        Module* module = find<Module>(handle);
        if (!module) return INVALID_HANDLE;
        std::unique_ptr<Function>& f = module->functions[name];
        if (!f) {
            const EntryPoint* ours = entry_points().first;
            const EntryPoint* end = ours + entry_points().second;
            while (ours < end && strcmp(ours->name, name)) ours++;
            // A module without any entry point stands for all of them.
            size_t at = module->image.find(std::string(".entry ") + name + "(");
            bool any = module->image.find(".entry ") == std::string::npos;
            if (ours == end || (at == std::string::npos && !any)) {
                module->functions.erase(name);
                return refuse(NOT_FOUND, "cuModuleGetFunction: %s is not in the %s", name, ours == end ? "sources" : "PTX");
            }
            f.reset(new Function{ours, &d, 0, 48 << 10, 1024, nullptr});
            if (!any)
                if (int code = describe(*f, module->image, at)) return code;
            if (!any && number_from_environment("IEC_SIM_PTX", 0)) f->ptx = ptx::read(module->image, name);
        }
        *function = f.get();
        return SUCCESS;
    });
}

API int cuFuncSetAttribute(void* function, int which, int value) {
    return in_context("cuFuncSetAttribute", [&](Device&) -> int {
        Function* f = (Function*)function;
        if (which != 8) return SUCCESS;  // only the limit of dynamic shared memory has an effect
        if (value < 0 || value + f->static_shared > most_shared()) return refuse(INVALID_VALUE, "%s: %d bytes of shared memory", f->entry_point->name, value);
        f->max_dynamic = value;
        return SUCCESS;
    });
}

API int cuFuncGetAttribute(int* value, int which, void* function) {
    return in_context("cuFuncGetAttribute", [&](Device&) {
        Function* f = (Function*)function;
        switch (which) {
            case 0: *value = f->max_threads; break;
            case 1: *value = f->static_shared; break;
            case 4: *value = 64; break;  // registers
            case 5: *value = 80; break;  // PTX version
            case 6: *value = the_driver().capability; break;
            case 8: *value = f->max_dynamic; break;
            default: *value = 0;
        }
        return SUCCESS;
    });
}

API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* function, int threads, size_t dynamic_bytes) {
    return in_context("cuOccupancyMaxActiveBlocksPerMultiprocessor", [&](Device&) {
        size_t shared = ((Function*)function)->static_shared + dynamic_bytes + 1024;
        *blocks = std::min<size_t>(2048 / threads, (most_shared() + 1024) / shared);
        return SUCCESS;
    });
}

static void trace(const EntryPoint& e, dim3 grid, dim3 block, size_t shared, bool captured) {
    static const char* path = getenv("IEC_SIM_TRACE");
    if (!path) return;
    static FILE* file = fopen(path, "a");
    if (!file) return;
    fprintf(file, "%s grid %u %u %u block %u %u %u shared %zu%s\n", e.name, grid.x, grid.y, grid.z, block.x, block.y, block.z, shared,
            captured ? " captured" : "");
    fflush(file);
}

static bool is_lossy(const char* kernel) {
    static const char* lossy = getenv("IEC_SIM_LOSE");
    return lossy && !strcmp(lossy, kernel);
}

API int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                       void* stream_handle, void** parameters, void** extra) {
    return in_context("cuLaunchKernel", [&](Device& d) -> int {
        Function& f = *(Function*)function;
        const EntryPoint* e = f.entry_point;
        Stream* stream = stream_of(d, stream_handle);
        if (!stream || f.device != &d) return refuse(INVALID_HANDLE, "%s: its stream or module belongs to another device", e->name);
        if (extra || !parameters || !parameters[0]) return refuse(INVALID_VALUE, "%s: parameters", e->name);
        uint64_t threads = (uint64_t)bx * by * bz;
        if (!gx || !gy || !gz || gx > 0x7fffffff || gy > 65535 || gz > 65535 || !threads || bx > 1024 || by > 1024 || bz > 64 || threads > 1024)
            return refuse(INVALID_VALUE, "%s: a grid of %u x %u x %u blocks of %u x %u x %u threads", e->name, gx, gy, gz, bx, by, bz);
        if (threads > f.max_threads) return refuse(INVALID_VALUE, "%s: %llu threads, bounds %u", e->name, (unsigned long long)threads, f.max_threads);
        // Unless the limit was raised, it holds for both together.
        size_t together = f.max_dynamic == 48 << 10 ? 48 << 10 : f.max_dynamic + f.static_shared;
        if (shared > f.max_dynamic || shared + f.static_shared > together)
            return refuse(INVALID_VALUE, "%s: %u bytes of dynamic shared memory and %zu others", e->name, shared, f.static_shared);
        trace(*e, dim3(gx, gy, gz), dim3(bx, by, bz), shared, stream->capture != nullptr);
        std::vector<uint64_t> arguments((e->argument_bytes + 7) / 8);
        memcpy(arguments.data(), parameters[0], e->argument_bytes);
        unsigned lost = is_lossy(e->name);
        std::shared_ptr<const ptx::Kernel> interpreted = f.ptx;
        return issue(*stream, [=] {
            the_driver().launches++;
            if (gx == lost) return;
            const dim3 grid(gx - lost, gy, gz);
            if (interpreted)
                emulator::launch(e->name, grid, dim3(bx, by, bz), shared + ptx::static_shared(*interpreted),
                                 [&] { ptx::run(*interpreted, arguments.data()); });
            else
                emulator::launch(e->name, grid, dim3(bx, by, bz), shared, [&] { e->call(arguments.data()); });
        });
    });
}
