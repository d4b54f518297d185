// The kernels, compiled for the host, by name. `scripts/simulated-cuda.sh` lists them in entry_points.inc.
#include "kernels.cu"

#include "driver.h"

namespace driver {

namespace {

template <class Arguments>
Arguments arguments_of(void (*)(Arguments));

template <class Arguments, void (*FUNCTION)(Arguments)>
EntryPoint entry_point(const char* name) {
    return {name, sizeof(Arguments), [](const void* arguments) { FUNCTION(*(const Arguments*)arguments); }};
}

#define ENTRY_POINT(name) entry_point<decltype(arguments_of(&name)), &name>(#name),

}  // namespace

const std::vector<EntryPoint>& entry_points() {
    static const std::vector<EntryPoint> all = {
#include "entry_points.inc"
    };
    return all;
}

}  // namespace driver
