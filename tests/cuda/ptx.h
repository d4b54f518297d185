// An interpreter of the PTX that the program carries: what inline assembly and the compiler have made of the kernels, run by the
// emulator's threads in place of the kernels compiled for the host (IEC_SIM_PTX=1).
#pragma once
#include <memory>
#include <string>

namespace ptx {

struct Kernel;

// Reads the entry point of this name; aborts at what it does not know.
std::shared_ptr<const Kernel> read(const std::string& module, const std::string& name);
// Bytes of shared memory that it declares.
size_t static_shared(const Kernel& kernel);
// Where the brace at `open` is closed.
size_t end_of_body(const std::string& module, size_t open);
// Runs one thread, in a launch with `static_shared` + dynamic bytes.
void run(const Kernel& kernel, const void* arguments);

}  // namespace ptx
