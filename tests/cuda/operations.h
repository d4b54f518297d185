// What PTX instructions do, as the PTX ISA says, for ptx.cpp.
#pragma once
#include <string>
#include <vector>

#include "tensor.cuh"

namespace ptx {

const uint32_t NONE = ~0u;
enum Step : uint8_t { STEP, JUMP, END };

// The state of a thread. Registers are 64 bits wide, and hold narrower values in their low bits.
struct Machine {
    uint64_t* r;
    uint8_t* parameters;
    size_t parameter_bytes;
    uint8_t* shared;
    size_t shared_bytes;
    const char* kernel;
};

struct Instruction {
    Step kind = STEP;
    bool negated = false;
    bool addressed = false;
    bool memory_first = false;  // stores
    uint32_t predicate = NONE;
    uint32_t target = 0;
    uint32_t address = NONE;
    uint32_t second_address = NONE;
    int64_t offset = 0;
    int64_t second_offset = 0;
    int line = 0;
    uint32_t immediate = 0;
    std::vector<uint32_t> operands;
    std::vector<uint32_t> groups;  // where {} begin and end among the operands
    void (*run)(const Instruction&, Machine&) = nullptr;
};

typedef void (*Operation)(const Instruction&, Machine&);

// What reads %tid.x and the like.
Operation special(const std::string& name);
// What does `parts`, an instruction's name cut at its points; null if that is not known.
Operation operation(const std::vector<std::string>& parts, Instruction& i);

}  // namespace ptx
