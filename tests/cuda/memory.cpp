// Memory of the simulated driver: allocations filled with NaN, copies that must stay within one, and host memory that is pinned.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "driver.h"

namespace driver {

namespace {

const size_t ALIGNMENT = 256;
const size_t HOST_PAGE = 4096;
const uint8_t UNWRITTEN = 0xff;  // NaN in every float format, and no index
const uint8_t AFTER = 0xa5;      // between the end of an allocation and the next multiple of ALIGNMENT

size_t up(size_t n, size_t to) { return (n + to - 1) / to * to; }

#ifdef __SANITIZE_ADDRESS__
Allocation take(Device* device, size_t bytes, uint64_t* address) {
    void* p;
    if (posix_memalign(&p, ALIGNMENT, bytes)) return {device, bytes, nullptr, 0};
    *address = (uint64_t)p;
    return {device, bytes, (uint8_t*)p, bytes};
}

void give(uint64_t, const Allocation& a) { free(a.base); }
#else
// Ends at a page that cannot be touched.
Allocation take(Device* device, size_t bytes, uint64_t* address) {
    size_t body = up(bytes, HOST_PAGE), all = body + HOST_PAGE;
    void* base = mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) return {device, bytes, nullptr, 0};
    mprotect((uint8_t*)base + body, HOST_PAGE, PROT_NONE);
    uint8_t* start = (uint8_t*)base + body - up(bytes, ALIGNMENT);
    memset(start + bytes, AFTER, up(bytes, ALIGNMENT) - bytes);
    *address = (uint64_t)start;
    return {device, bytes, (uint8_t*)base, all};
}

void give(uint64_t address, const Allocation& a) {
    for (const uint8_t* p = (const uint8_t*)address + a.bytes; p < a.base + a.base_bytes - HOST_PAGE; p++)
        if (*p != AFTER) {
            fprintf(stderr, "simulated driver: something wrote past the end of %zu bytes at %#llx\n", a.bytes, (unsigned long long)address);
            abort();
        }
    munmap(a.base, a.base_bytes);
}
#endif

bool inside(const Device& device, uint64_t address, size_t bytes) {
    auto& all = the_driver().allocations;
    auto after = all.upper_bound(address);
    if (after == all.begin()) return false;
    auto& a = *--after;
    return a.second.device == &device && bytes <= a.second.bytes && address - a.first <= a.second.bytes - bytes;
}

bool within(const std::map<uint8_t*, size_t>& ranges, const void* address, size_t bytes) {
    auto after = ranges.upper_bound((uint8_t*)address);
    if (after == ranges.begin()) return false;
    --after;
    return (uint8_t*)address + bytes <= after->first + after->second;
}

void require_inside(const Device& device, uint64_t address, size_t bytes) {
    if (inside(device, address, bytes)) return;
    fprintf(stderr, "simulated driver: a copy of %zu bytes at %#llx, issued earlier, touches memory that is gone\n", bytes, (unsigned long long)address);
    abort();
}

// Copies to or from memory that is not pinned happen within the call; others when the stream is waited for.
int copy(Device& d, const char* function, void* stream_handle, uint64_t device_address, void* host, size_t bytes, bool to_host, bool wait) {
    Stream* stream = stream_of(d, stream_handle);
    if (!stream) return refuse(INVALID_HANDLE, "%s: stream", function);
    if (!bytes) return SUCCESS;
    if (!inside(d, device_address, bytes)) return refuse(INVALID_VALUE, "%s: %zu bytes at %#llx", function, bytes, (unsigned long long)device_address);
    Work work = [=, &d] {
        require_inside(d, device_address, bytes);
        if (to_host)
            memcpy(host, (void*)device_address, bytes);
        else
            memcpy((void*)device_address, host, bytes);
    };
    if (wait || !is_pinned(host, bytes)) {
        if (stream->capture) return refuse_in_capture(function);
        if (int code = wait ? refuse_in_capture(function) : 0) return code;
        if (int code = issue(*stream, work)) return code;
        drain(*stream, stream->issued);
        return SUCCESS;
    }
    return issue(*stream, work);
}

int fill(Device& d, const char* function, void* stream_handle, uint64_t address, const void* pattern, size_t width, size_t count) {
    Stream* stream = stream_of(d, stream_handle);
    if (!stream) return refuse(INVALID_HANDLE, "%s: stream", function);
    if (!count) return SUCCESS;
    if (address % width || !inside(d, address, count * width)) return refuse(INVALID_VALUE, "%s: %zu x %zu bytes at %#llx", function, count, width, (unsigned long long)address);
    std::vector<uint8_t> bytes((const uint8_t*)pattern, (const uint8_t*)pattern + width);
    return issue(*stream, [=, &d] {
        require_inside(d, address, count * width);
        for (size_t i = 0; i < count; i++) memcpy((void*)(address + i * width), bytes.data(), width);
    });
}

}  // namespace

bool is_pinned(const void* address, size_t bytes) {
    return within(the_driver().pinned, address, bytes) || within(the_driver().registered, address, bytes);
}

}  // namespace driver

using namespace driver;

API int cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
    return in_context("cuMemGetInfo_v2", [&](Device& d) { return *total = d.total, *free_bytes = d.total - d.used, SUCCESS; });
}

API int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
    return in_context("cuMemAlloc_v2", [&](Device& d) -> int {
        if (int code = refuse_in_capture("cuMemAlloc_v2")) return code;
        if (!bytes) return refuse(INVALID_VALUE, "cuMemAlloc_v2 of nothing");
        if (bytes > d.total || up(bytes, ALIGNMENT) > d.total - d.used) return refuse(OUT_OF_MEMORY, "cuMemAlloc_v2 of %zu bytes, %zu are left", bytes, d.total - d.used);
        Allocation a = take(&d, bytes, address);
        if (!a.base) return OUT_OF_MEMORY;
        memset((void*)*address, UNWRITTEN, bytes);
        the_driver().allocations[*address] = a;
        d.used += up(bytes, ALIGNMENT);
        if (d.peak < d.used) d.peak = d.used;
        return SUCCESS;
    });
}

API int cuMemFree_v2(uint64_t address) {
    return in_context("cuMemFree_v2", [&](Device& d) -> int {
        if (!address) return SUCCESS;
        if (int code = refuse_in_capture("cuMemFree_v2")) return code;
        auto at = the_driver().allocations.find(address);
        if (at == the_driver().allocations.end()) return refuse(INVALID_VALUE, "cuMemFree_v2 of %#llx", (unsigned long long)address);
        drain_all(*at->second.device);
        at->second.device->used -= up(at->second.bytes, ALIGNMENT);
        give(address, at->second);
        the_driver().allocations.erase(at);
        (void)d;
        return SUCCESS;
    });
}

API int cuMemHostAlloc(void** address, size_t bytes, unsigned) {
    return in_context("cuMemHostAlloc", [&](Device&) -> int {
        if (int code = refuse_in_capture("cuMemHostAlloc")) return code;
        if (!bytes || posix_memalign(address, HOST_PAGE, bytes)) return bytes ? OUT_OF_MEMORY : INVALID_VALUE;
        memset(*address, UNWRITTEN, bytes);
        the_driver().pinned[(uint8_t*)*address] = bytes;
        return SUCCESS;
    });
}

API int cuMemFreeHost(void* address) {
    return in_context("cuMemFreeHost", [&](Device&) -> int {
        if (!the_driver().pinned.count((uint8_t*)address)) return refuse(INVALID_VALUE, "cuMemFreeHost of %p", address);
        for (auto& device : the_driver().devices) drain_all(*device);
        the_driver().pinned.erase((uint8_t*)address);
        free(address);
        return SUCCESS;
    });
}

API int cuMemHostRegister_v2(void* address, size_t bytes, unsigned) {
    return in_context("cuMemHostRegister_v2", [&](Device&) -> int {
        if (!bytes) return INVALID_VALUE;
        if (is_pinned(address, 1)) return HOST_MEMORY_ALREADY_REGISTERED;
        the_driver().registered[(uint8_t*)address] = bytes;
        return SUCCESS;
    });
}

API int cuMemHostUnregister(void* address) {
    return in_context("cuMemHostUnregister", [&](Device&) -> int {
        for (auto& device : the_driver().devices) drain_all(*device);
        return the_driver().registered.erase((uint8_t*)address) ? SUCCESS : HOST_MEMORY_NOT_REGISTERED;
    });
}

API int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
    return in_context("cuMemcpyHtoDAsync_v2", [&](Device& d) { return copy(d, "cuMemcpyHtoDAsync_v2", stream, to, (void*)from, bytes, false, false); });
}

API int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
    return in_context("cuMemcpyDtoHAsync_v2", [&](Device& d) { return copy(d, "cuMemcpyDtoHAsync_v2", stream, from, to, bytes, true, false); });
}

API int cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) {
    return in_context("cuMemcpyHtoD_v2", [&](Device& d) { return copy(d, "cuMemcpyHtoD_v2", nullptr, to, (void*)from, bytes, false, true); });
}

API int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) {
    return in_context("cuMemcpyDtoH_v2", [&](Device& d) { return copy(d, "cuMemcpyDtoH_v2", nullptr, from, to, bytes, true, true); });
}

API int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream_handle) {
    return in_context("cuMemcpyDtoDAsync_v2", [&](Device& d) -> int {
        Stream* stream = stream_of(d, stream_handle);
        if (!stream) return INVALID_HANDLE;
        if (!bytes) return SUCCESS;
        if (!inside(d, to, bytes) || !inside(d, from, bytes)) return refuse(INVALID_VALUE, "cuMemcpyDtoDAsync_v2 of %zu bytes", bytes);
        if (to < from + bytes && from < to + bytes) return refuse(INVALID_VALUE, "cuMemcpyDtoDAsync_v2: the ranges overlap");
        return issue(*stream, [=, &d] {
            require_inside(d, to, bytes);
            require_inside(d, from, bytes);
            memcpy((void*)to, (void*)from, bytes);
        });
    });
}

API int cuMemsetD8Async(uint64_t address, unsigned char value, size_t count, void* stream) {
    return in_context("cuMemsetD8Async", [&](Device& d) { return fill(d, "cuMemsetD8Async", stream, address, &value, 1, count); });
}

API int cuMemsetD32Async(uint64_t address, unsigned value, size_t count, void* stream) {
    return in_context("cuMemsetD32Async", [&](Device& d) { return fill(d, "cuMemsetD32Async", stream, address, &value, 4, count); });
}
