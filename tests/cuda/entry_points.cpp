// The kernels, compiled for the host, by name. `scripts/simulated-cuda.sh` lists them in entry_points.inc.
#include "kernels.cu"

#include "driver.h"

namespace driver {

namespace {

template <class Arguments>
Arguments arguments_of(void (*)(Arguments));

template <class Arguments, void (*FUNCTION)(Arguments)>
constexpr EntryPoint entry_point(const char* name) {
    return {name, sizeof(Arguments), [](const void* arguments) { FUNCTION(*(const Arguments*)arguments); }};
}

#define ENTRY_POINT(name) entry_point<decltype(arguments_of(&name)), &name>(#name),

// No variables but those of kernels may be in this file: they are filled with garbage.
constexpr EntryPoint ENTRY_POINTS[] = {
#include "entry_points.inc"
};

}  // namespace

std::pair<const EntryPoint*, size_t> entry_points() { return {ENTRY_POINTS, sizeof ENTRY_POINTS / sizeof *ENTRY_POINTS}; }

}  // namespace driver
