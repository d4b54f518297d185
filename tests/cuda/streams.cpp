// Streams, events and graphs of the simulated driver.
#include <string.h>
#include <time.h>

#include <algorithm>

#include "driver.h"

namespace driver {

namespace {

const size_t LONGEST_QUEUE = 4096;

double now_ms() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

template <class F>
void for_each_stream(Device& device, F f) {
    f(*device.default_stream);
    for (auto& o : the_driver().objects)
        if (Stream* s = dynamic_cast<Stream*>(o.second.get()))
            if (s->device == &device) f(*s);
}

void run_one(Stream& stream) {
    Work work = std::move(stream.queue.front());
    stream.queue.pop_front();
    work();
    stream.done++;
}

void wait_for(const Mark& mark) {
    if (!mark.done && mark.stream) drain(*mark.stream, mark.ticket);
}

}  // namespace

void drain(Stream& stream, uint64_t ticket) {
    while (stream.done < ticket && !stream.queue.empty()) run_one(stream);
}

void drain_all(Device& device) {
    for_each_stream(device, [](Stream& s) { drain(s, s.issued); });
}

Stream* stream_of(Device& device, void* handle) {
    if ((uintptr_t)handle <= 2) return device.default_stream.get();
    Stream* stream = find<Stream>(handle);
    return stream && stream->device == &device ? stream : nullptr;
}

int issue(Stream& stream, Work work) {
    if (stream.capture) {
        if (stream.capture->invalid) return STREAM_CAPTURE_INVALIDATED;
        if (&stream != stream.capture->origin) stream.capture->joined.insert(&stream);
        stream.capture->work.push_back(std::move(work));
        return SUCCESS;
    }
    Stream& default_stream = *stream.device->default_stream;
    if (&stream == &default_stream) {
        int code = SUCCESS;
        for_each_stream(*stream.device, [&](Stream& s) {
            if (&s == &default_stream || !s.blocking) return;
            if (s.capture) s.capture->invalid = true, code = STREAM_CAPTURE_IMPLICIT;
            drain(s, s.issued);
        });
        if (code) return refuse(code, "work for the default stream while a stream that waits for it is recorded");
    } else if (stream.blocking) {
        drain(default_stream, default_stream.issued);
    }
    stream.queue.push_back(std::move(work));
    stream.issued++;
    if (stream.queue.size() > LONGEST_QUEUE) drain(stream, stream.issued);
    return SUCCESS;
}

int refuse_in_capture(const char* function) {
    for (Capture* c : the_driver().captures) {
        bool concerned = c->mode == 0 || (c->mode == 1 && c->thread == std::this_thread::get_id());
        if (!concerned) continue;
        c->invalid = true;
        return refuse(STREAM_CAPTURE_UNSUPPORTED, "%s while a stream is recorded", function);
    }
    return SUCCESS;
}

static void end(const std::shared_ptr<Capture>& capture) {
    the_driver().captures.erase(capture.get());
    for (auto& o : the_driver().objects)
        if (Stream* s = dynamic_cast<Stream*>(o.second.get()))
            if (s->capture == capture) s->capture.reset();
}

}  // namespace driver

using namespace driver;

API int cuStreamCreate(void** handle, unsigned flags) {
    return in_context("cuStreamCreate", [&](Device& d) -> int {
        if (flags > 1) return INVALID_VALUE;
        *handle = add(new Stream(&d, flags == 0));
        return SUCCESS;
    });
}

API int cuStreamDestroy_v2(void* handle) {
    return in_context("cuStreamDestroy_v2", [&](Device&) -> int {
        Stream* stream = find<Stream>(handle);
        if (!stream) return refuse(INVALID_HANDLE, "cuStreamDestroy_v2");
        if (stream->capture) stream->capture->invalid = true, end(std::shared_ptr<Capture>(stream->capture));
        drain(*stream, stream->issued);
        the_driver().objects.erase(handle);
        return SUCCESS;
    });
}

API int cuStreamSynchronize(void* handle) {
    return in_context("cuStreamSynchronize", [&](Device& d) -> int {
        Stream* stream = stream_of(d, handle);
        if (!stream) return refuse(INVALID_HANDLE, "cuStreamSynchronize");
        if (stream->capture) stream->capture->invalid = true;
        if (int code = refuse_in_capture("cuStreamSynchronize")) return code;
        if (stream->capture) return STREAM_CAPTURE_UNSUPPORTED;
        drain(*stream, stream->issued);
        return SUCCESS;
    });
}

// Says "not ready" once, then catches up: a loop that asks comes to an end.
API int cuStreamQuery(void* handle) {
    return in_context("cuStreamQuery", [&](Device& d) -> int {
        Stream* stream = stream_of(d, handle);
        if (!stream) return INVALID_HANDLE;
        if (int code = refuse_in_capture("cuStreamQuery")) return code;
        if (stream->done == stream->issued) return SUCCESS;
        drain(*stream, stream->issued);
        return NOT_READY;
    });
}

API int cuCtxSynchronize() {
    return in_context("cuCtxSynchronize", [&](Device& d) -> int {
        if (int code = refuse_in_capture("cuCtxSynchronize")) return code;
        drain_all(d);
        return SUCCESS;
    });
}

API int cuStreamWaitEvent(void* stream_handle, void* event_handle, unsigned) {
    return in_context("cuStreamWaitEvent", [&](Device& d) -> int {
        Stream* stream = stream_of(d, stream_handle);
        Event* event = find<Event>(event_handle);
        if (!stream || !event) return refuse(INVALID_HANDLE, "cuStreamWaitEvent");
        if (event->capture) {
            std::shared_ptr<Capture> capture = event->capture;
            if (!the_driver().captures.count(capture.get())) return refuse(CAPTURED_EVENT, "cuStreamWaitEvent: an event of a recording that has ended");
            if (stream->capture && stream->capture != capture) return STREAM_CAPTURE_ISOLATION;
            if (!stream->capture) stream->capture = capture, capture->joined.insert(stream);
            if (event->captured_from != stream) capture->joined.erase(event->captured_from);
            return SUCCESS;
        }
        if (stream->capture) return stream->capture->invalid = true, refuse(STREAM_CAPTURE_ISOLATION, "cuStreamWaitEvent: an event from outside the recording");
        if (!event->mark) return SUCCESS;
        std::shared_ptr<Mark> mark = event->mark;
        return issue(*stream, [mark] { wait_for(*mark); });
    });
}

API int cuEventCreate(void** handle, unsigned flags) {
    return in_context("cuEventCreate", [&](Device& d) { return *handle = add(new Event(&d, !(flags & 2))), SUCCESS; });
}

API int cuEventDestroy_v2(void* handle) {
    return in_context("cuEventDestroy_v2", [&](Device&) -> int {
        if (!find<Event>(handle)) return refuse(INVALID_HANDLE, "cuEventDestroy_v2");
        the_driver().objects.erase(handle);
        return SUCCESS;
    });
}

API int cuEventRecord(void* event_handle, void* stream_handle) {
    return in_context("cuEventRecord", [&](Device& d) -> int {
        Stream* stream = stream_of(d, stream_handle);
        Event* event = find<Event>(event_handle);
        if (!stream || !event || event->device != &d) return refuse(INVALID_HANDLE, "cuEventRecord");
        event->capture = stream->capture;
        event->captured_from = stream->capture ? stream : nullptr;
        if (stream->capture) return SUCCESS;
        std::shared_ptr<Mark> mark = event->mark = std::make_shared<Mark>();
        mark->done = false;
        int code = issue(*stream, [mark] { mark->done = true, mark->stream = nullptr, mark->milliseconds = now_ms(); });
        if (!mark->done) mark->stream = stream;
        mark->ticket = stream->issued;
        return code;
    });
}

API int cuEventQuery(void* handle) {
    return in_context("cuEventQuery", [&](Device&) -> int {
        Event* event = find<Event>(handle);
        if (!event) return INVALID_HANDLE;
        if (event->capture) return CAPTURED_EVENT;
        if (!event->mark || event->mark->done) return SUCCESS;
        wait_for(*event->mark);
        return NOT_READY;
    });
}

API int cuEventSynchronize(void* handle) {
    return in_context("cuEventSynchronize", [&](Device&) -> int {
        Event* event = find<Event>(handle);
        if (!event) return refuse(INVALID_HANDLE, "cuEventSynchronize");
        if (event->capture) return refuse(CAPTURED_EVENT, "cuEventSynchronize: an event that was recorded while capturing");
        if (int code = refuse_in_capture("cuEventSynchronize")) return code;
        if (event->mark) wait_for(*event->mark);
        return SUCCESS;
    });
}

API int cuEventElapsedTime(float* milliseconds, void* from, void* to) {
    return in_context("cuEventElapsedTime", [&](Device&) -> int {
        Event *a = find<Event>(from), *b = find<Event>(to);
        if (!a || !b || !a->timing || !b->timing || !a->mark || !b->mark) return refuse(INVALID_HANDLE, "cuEventElapsedTime");
        if (!a->mark->done || !b->mark->done) return refuse(NOT_READY, "cuEventElapsedTime: the events were not waited for");
        *milliseconds = (float)std::max(0.001, b->mark->milliseconds - a->mark->milliseconds);
        return SUCCESS;
    });
}

API int cuStreamBeginCapture_v2(void* handle, int mode) {
    return in_context("cuStreamBeginCapture_v2", [&](Device& d) -> int {
        Stream* stream = stream_of(d, handle);
        if (!stream || stream == d.default_stream.get()) return refuse(STREAM_CAPTURE_UNSUPPORTED, "cuStreamBeginCapture_v2 of the default stream");
        if (stream->capture || mode < 0 || mode > 2) return refuse(stream->capture ? ILLEGAL_STATE : INVALID_VALUE, "cuStreamBeginCapture_v2");
        stream->capture = std::make_shared<Capture>();
        stream->capture->origin = stream;
        stream->capture->mode = mode;
        stream->capture->thread = std::this_thread::get_id();
        the_driver().captures.insert(stream->capture.get());
        return SUCCESS;
    });
}

API int cuStreamEndCapture(void* handle, void** graph_handle) {
    return in_context("cuStreamEndCapture", [&](Device& d) -> int {
        Stream* stream = stream_of(d, handle);
        *graph_handle = nullptr;
        if (!stream || !stream->capture) return refuse(ILLEGAL_STATE, "cuStreamEndCapture: nothing is recorded");
        std::shared_ptr<Capture> capture = stream->capture;
        if (capture->origin != stream) return refuse(STREAM_CAPTURE_UNMATCHED, "cuStreamEndCapture: recording began in another stream");
        if (capture->mode != 2 && capture->thread != std::this_thread::get_id()) return STREAM_CAPTURE_WRONG_THREAD;
        end(capture);
        if (capture->invalid) return refuse(STREAM_CAPTURE_INVALIDATED, "cuStreamEndCapture");
        if (!capture->joined.empty()) return refuse(STREAM_CAPTURE_UNJOINED, "cuStreamEndCapture: other streams were not joined");
        Graph* graph = add(new Graph("graph"));
        graph->work = std::move(capture->work);
        *graph_handle = graph;
        return SUCCESS;
    });
}

API int cuStreamIsCapturing(void* handle, int* status) {
    return in_context("cuStreamIsCapturing", [&](Device& d) -> int {
        Stream* stream = stream_of(d, handle);
        if (!stream) return INVALID_HANDLE;
        *status = !stream->capture ? 0 : stream->capture->invalid ? 2 : 1;
        return SUCCESS;
    });
}

static bool is_graph(void* handle, const char* kind) {
    Graph* graph = find<Graph>(handle);
    return graph && !strcmp(graph->kind, kind);
}

API int cuGraphInstantiateWithFlags(void** executable, void* handle, unsigned long long) {
    return in_context("cuGraphInstantiateWithFlags", [&](Device&) -> int {
        if (int code = refuse_in_capture("cuGraphInstantiateWithFlags")) return code;
        if (!is_graph(handle, "graph")) return refuse(INVALID_VALUE, "cuGraphInstantiateWithFlags");
        Graph* copy = add(new Graph("executable graph"));
        copy->work = find<Graph>(handle)->work;
        *executable = copy;
        return SUCCESS;
    });
}

API int cuGraphLaunch(void* executable, void* stream_handle) {
    return in_context("cuGraphLaunch", [&](Device& d) -> int {
        Stream* stream = stream_of(d, stream_handle);
        if (!stream || !is_graph(executable, "executable graph")) return refuse(INVALID_HANDLE, "cuGraphLaunch");
        if (stream->capture) return refuse(STREAM_CAPTURE_UNSUPPORTED, "cuGraphLaunch into a recording");
        for (const Work& work : find<Graph>(executable)->work)
            if (int code = issue(*stream, work)) return code;
        return SUCCESS;
    });
}

static int destroy_graph(const char* function, void* handle, const char* kind) {
    return in_context(function, [&](Device&) -> int {
        if (!is_graph(handle, kind)) return refuse(INVALID_VALUE, "%s", function);
        the_driver().objects.erase(handle);
        return SUCCESS;
    });
}

API int cuGraphExecDestroy(void* handle) { return destroy_graph("cuGraphExecDestroy", handle, "executable graph"); }
API int cuGraphDestroy(void* handle) { return destroy_graph("cuGraphDestroy", handle, "graph"); }

static const struct {
    int code;
    const char* name;
    const char* text;
} ERRORS[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {STUB_LIBRARY, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {UNSUPPORTED_PTX_VERSION, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
    {STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
    {STREAM_CAPTURE_UNJOINED, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {STREAM_CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream"},
    {STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing blocking stream"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

API int cuGetErrorName(int code, const char** name) {
    *name = nullptr;
    for (auto& e : ERRORS)
        if (e.code == code) *name = e.name;
    return *name ? SUCCESS : INVALID_VALUE;
}

API int cuGetErrorString(int code, const char** text) {
    *text = nullptr;
    for (auto& e : ERRORS)
        if (e.code == code) *text = e.text;
    return *text ? SUCCESS : INVALID_VALUE;
}
