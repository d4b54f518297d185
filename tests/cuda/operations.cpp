// What PTX instructions do, as the PTX ISA says.
#include "operations.h"

#include <stdlib.h>

#include <algorithm>

namespace ptx {

namespace {

typedef const Instruction& I;
typedef Machine& M;

template <class T>
T get(M m, I i, size_t k) {
    T value;
    memcpy(&value, &m.r[i.operands[k]], sizeof value);
    return value;
}

template <class T>
void set(M m, I i, size_t k, T value) {
    uint64_t wide = 0;
    memcpy(&wide, &value, sizeof value);
    m.r[i.operands[k]] = wide;
}

// Calls `f` with a value of the type that the suffix names; what it returns is the operation.
template <class F>
Operation integers(const std::string& type, F f) {
    if (type == "u16" || type == "b16") return f(uint16_t());
    if (type == "u32" || type == "b32") return f(uint32_t());
    if (type == "u64" || type == "b64") return f(uint64_t());
    if (type == "s16") return f(int16_t());
    if (type == "s32") return f(int32_t());
    if (type == "s64") return f(int64_t());
    return nullptr;
}

template <class F>
Operation numbers(const std::string& type, F f) {
    return type == "f32" ? f(float()) : integers(type, f);
}

template <class F>
Operation memory_types(const std::string& type, F f) {
    if (type == "u8" || type == "b8") return f(uint8_t());
    if (type == "s8") return f(int8_t());
    return numbers(type, f);
}

bool is_one_of(const std::string& s, std::initializer_list<const char*> all) {
    return std::any_of(all.begin(), all.end(), [&](const char* a) { return s == a; });
}

#define OPERATION(...) Operation([](I i, M m) { __VA_ARGS__; })
#define TYPED(kind, type, ...)                            \
    kind(type, [](auto sample) {                          \
        typedef decltype(sample) T;                       \
        (void)sample;                                     \
        return Operation([](I i, M m) { __VA_ARGS__; }); \
    })
#define A get<T>(m, i, 1)
#define B get<T>(m, i, 2)
#define C get<T>(m, i, 3)

template <class T>
typename std::make_unsigned<T>::type bits_of(T value) {
    return value;
}
inline float bits_of(float value) { return value; }

Operation arithmetic(const std::string& name, const std::vector<std::string>& parts) {
    const std::string& type = parts.back();
    if (name == "add") return TYPED(numbers, type, set<T>(m, i, 0, T(bits_of(A) + bits_of(B))));
    if (name == "sub") return TYPED(numbers, type, set<T>(m, i, 0, T(bits_of(A) - bits_of(B))));
    if (name == "neg") return TYPED(numbers, type, set<T>(m, i, 0, T(-bits_of(A))));
    if (name == "min") return TYPED(numbers, type, set<T>(m, i, 0, T(::min(A, B))));
    if (name == "max") return TYPED(numbers, type, set<T>(m, i, 0, T(::max(A, B))));
    if (name == "selp") return TYPED(numbers, type, set<T>(m, i, 0, m.r[i.operands[3]] & 1 ? A : B));
    if (name == "abs" && type == "f32") return OPERATION(set(m, i, 0, fabsf(get<float>(m, i, 1))));
    if (name == "mul" && type == "f32") return OPERATION(set(m, i, 0, get<float>(m, i, 1) * get<float>(m, i, 2)));
    if (name == "mul" && parts[1] == "lo") return TYPED(integers, type, set<T>(m, i, 0, T((uint64_t)A * (uint64_t)B)));
    if (name == "mul" && parts[1] == "hi" && type == "u32") return OPERATION(set(m, i, 0, __umulhi(get<uint32_t>(m, i, 1), get<uint32_t>(m, i, 2))));
    if (name == "mad" && parts[1] == "lo") return TYPED(integers, type, set<T>(m, i, 0, T((uint64_t)A * (uint64_t)B + (uint64_t)C)));
    if (name == "mul" && parts[1] == "wide" && type == "u32") return OPERATION(set(m, i, 0, (uint64_t)get<uint32_t>(m, i, 1) * get<uint32_t>(m, i, 2)));
    if (name == "mul" && parts[1] == "wide" && type == "s32") return OPERATION(set(m, i, 0, (int64_t)get<int32_t>(m, i, 1) * get<int32_t>(m, i, 2)));
    if (name == "mul" && parts[1] == "wide" && type == "u16") return OPERATION(set(m, i, 0, (uint32_t)get<uint16_t>(m, i, 1) * get<uint16_t>(m, i, 2)));
    if (name == "mad" && parts[1] == "wide" && type == "u32") return OPERATION(set(m, i, 0, (uint64_t)get<uint32_t>(m, i, 1) * get<uint32_t>(m, i, 2) + get<uint64_t>(m, i, 3)));
    if (name == "mad" && parts[1] == "wide" && type == "s32") return OPERATION(set(m, i, 0, (int64_t)get<int32_t>(m, i, 1) * get<int32_t>(m, i, 2) + get<int64_t>(m, i, 3)));
    if (name == "div" && type == "f32") return OPERATION(set(m, i, 0, get<float>(m, i, 1) / get<float>(m, i, 2)));
    // A GPU divides by zero without complaint.
    if (name == "div") return TYPED(integers, type, set<T>(m, i, 0, B ? T(A / B) : T(-1)));
    if (name == "rem") return TYPED(integers, type, set<T>(m, i, 0, B ? T(A % B) : A));
    return nullptr;
}

// a * b + c rounded down.
float fma_down(float a, float b, float c) {
    double exact = (double)a * b + c;
    float f = (float)exact;
    return (double)f > exact ? nextafterf(f, -INFINITY) : f;
}

float flushed(float f) { return fabsf(f) < 0x1p-126f ? copysignf(0.0f, f) : f; }

Operation functions(const std::string& name, const std::vector<std::string>& parts) {
    bool f32 = parts.back() == "f32";
    if (name == "fma" && parts[1] == "rn" && f32) return OPERATION(set(m, i, 0, fmaf(get<float>(m, i, 1), get<float>(m, i, 2), get<float>(m, i, 3))));
    if (name == "fma" && parts[1] == "rm" && f32) return OPERATION(set(m, i, 0, fma_down(get<float>(m, i, 1), get<float>(m, i, 2), get<float>(m, i, 3))));
    if (name == "fma" && parts.back() == "bf16x2")
        return OPERATION(uint32_t d = 0; for (int k = 0; k < 32; k += 16) {
            auto part = [&](size_t at) { return __ushort_as_bfloat16(get<uint32_t>(m, i, at) >> k); };
            d |= (uint32_t)__bfloat16_as_ushort(__hfma(part(1), part(2), part(3))) << k;
        } set(m, i, 0, d));
    if (name == "ex2" && parts[1] == "approx") return OPERATION(set(m, i, 0, flushed(exp2f(flushed(get<float>(m, i, 1))))));
    if (name == "lg2" && parts[1] == "approx") return OPERATION(set(m, i, 0, log2f(flushed(get<float>(m, i, 1)))));
    if (name == "rcp" && parts[1] == "approx") return OPERATION(set(m, i, 0, flushed(1.0f / flushed(get<float>(m, i, 1)))));
    if (name == "rcp" && parts[1] == "rn") return OPERATION(set(m, i, 0, 1.0f / get<float>(m, i, 1)));
    if (name == "sqrt" && parts[1] == "rn") return OPERATION(set(m, i, 0, sqrtf(get<float>(m, i, 1))));
    if (name == "rsqrt" && parts[1] == "approx") return OPERATION(set(m, i, 0, 1.0f / sqrtf(get<float>(m, i, 1))));
    return nullptr;
}

template <class T>
T shifted(T value, uint32_t by, bool left) {
    if (by >= 8 * sizeof(T)) return !left && value < 0 ? T(-1) : T(0);
    return left ? T((uint64_t)value << by) : T(value >> by);
}

// The bits of three numbers combined as `table` says.
uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
    uint32_t d = 0;
    for (int k = 0; k < 8; k++)
        if (table >> k & 1) d |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
    return d;
}

template <class T>
T inserted(T a, T b, uint32_t from, uint32_t length) {
    const uint32_t width = 8 * sizeof(T);
    from &= 255, length &= 255;
    if (from >= width || !length) return b;
    length = std::min(length, width - from);
    T mask = (length == width ? ~T(0) : ((T(1) << length) - 1)) << from;
    return (b & ~mask) | (a << from & mask);
}

template <class T>
T extracted(T a, uint32_t from, uint32_t length) {
    const uint32_t width = 8 * sizeof(T);
    from &= 255, length &= 255;
    if (from >= width || !length) return 0;
    length = std::min(length, width - from);
    return a >> from & (length == width ? ~T(0) : (T(1) << length) - 1);
}

Operation bits(const std::string& name, const std::string& type) {
    if (type == "pred") {
        if (name == "and") return OPERATION(set<uint64_t>(m, i, 0, m.r[i.operands[1]] & m.r[i.operands[2]] & 1));
        if (name == "or") return OPERATION(set<uint64_t>(m, i, 0, (m.r[i.operands[1]] | m.r[i.operands[2]]) & 1));
        if (name == "xor") return OPERATION(set<uint64_t>(m, i, 0, (m.r[i.operands[1]] ^ m.r[i.operands[2]]) & 1));
        if (name == "not") return OPERATION(set<uint64_t>(m, i, 0, ~m.r[i.operands[1]] & 1));
        return nullptr;
    }
    if (name == "and") return TYPED(integers, type, set<T>(m, i, 0, A & B));
    if (name == "or") return TYPED(integers, type, set<T>(m, i, 0, A | B));
    if (name == "xor") return TYPED(integers, type, set<T>(m, i, 0, A ^ B));
    if (name == "not") return TYPED(integers, type, set<T>(m, i, 0, T(~A)));
    if (name == "shl") return TYPED(integers, type, set<T>(m, i, 0, shifted(A, get<uint32_t>(m, i, 2), true)));
    if (name == "shr") return TYPED(integers, type, set<T>(m, i, 0, shifted(A, get<uint32_t>(m, i, 2), false)));
    if (name == "lop3") return OPERATION(set(m, i, 0, lop3(get<uint32_t>(m, i, 1), get<uint32_t>(m, i, 2), get<uint32_t>(m, i, 3), get<uint32_t>(m, i, 4))));
    if (name == "prmt") return OPERATION(set(m, i, 0, __byte_perm(get<uint32_t>(m, i, 1), get<uint32_t>(m, i, 2), get<uint32_t>(m, i, 3))));
    if (name == "popc" && type == "b32") return OPERATION(set(m, i, 0, __popc(get<uint32_t>(m, i, 1))));
    if (name == "clz" && type == "b32") return OPERATION(set(m, i, 0, __clz(get<uint32_t>(m, i, 1))));
    if (name == "brev" && type == "b32") return OPERATION(set(m, i, 0, __brev(get<uint32_t>(m, i, 1))));
    if (name == "bfi" && type == "b32") return OPERATION(set(m, i, 0, inserted(get<uint32_t>(m, i, 1), get<uint32_t>(m, i, 2), get<uint32_t>(m, i, 3), get<uint32_t>(m, i, 4))));
    if (name == "bfi" && type == "b64") return OPERATION(set(m, i, 0, inserted(get<uint64_t>(m, i, 1), get<uint64_t>(m, i, 2), get<uint32_t>(m, i, 3), get<uint32_t>(m, i, 4))));
    if (name == "bfe" && type == "u32") return OPERATION(set(m, i, 0, extracted(get<uint32_t>(m, i, 1), get<uint32_t>(m, i, 2), get<uint32_t>(m, i, 3))));
    return nullptr;
}

// setp.COMPARISON[.and|.or|.xor].TYPE p, a, b[, c]
enum Comparison { EQ, NE, LT, LE, GT, GE, NUM, NAN_ };

template <class T>
bool compare(uint32_t how, T a, T b) {
    bool unordered = a != a || b != b, or_unordered = how & 8;
    if ((how & 7) == NUM) return !unordered;
    if ((how & 7) == NAN_) return unordered;
    if (unordered) return or_unordered || how == NE + 16;
    switch (how & 7) {
        case EQ: return a == b;
        case NE: return a != b;
        case LT: return a < b;
        case LE: return a <= b;
        case GT: return a > b;
        default: return a >= b;
    }
}

// Comparison in bits 0 to 2, "or unordered" in bit 3, what is done with the fourth operand in bits 4 and 5.
int how_to_compare(const std::string& name) {
    static const char* const NAMES[] = {"eq", "ne", "lt", "le", "gt", "ge", "num", "nan"};
    for (int k = 0; k < 8; k++) {
        if (name == NAMES[k]) return k;
        if (name == std::string(NAMES[k]) + "u") return k | 8;
    }
    static const char* const UNSIGNED[] = {"lo", "ls", "hi", "hs"};
    for (int k = 0; k < 4; k++)
        if (name == UNSIGNED[k]) return LT + k;
    return -1;
}

Operation set_predicate(const std::vector<std::string>& parts, Instruction& i) {
    int how = how_to_compare(parts[1]);
    if (how < 0) return nullptr;
    i.immediate = how;
    if (parts.size() == 4) {
        if (!is_one_of(parts[2], {"and", "or", "xor"})) return nullptr;
        i.immediate |= (parts[2] == "and" ? 1 : parts[2] == "or" ? 2 : 3) << 4;
    }
    return TYPED(numbers, parts.back(), bool p = compare<T>(i.immediate & 15, A, B);
                 if (uint32_t join = i.immediate >> 4) {
                     bool q = m.r[i.operands[3]] & 1;
                     p = join == 1 ? p && q : join == 2 ? p || q : p != q;
                 } set<uint64_t>(m, i, 0, p));
}

Operation move(const std::string& type, I i) {
    size_t width = type == "b64" || type == "u64" || type == "s64" ? 64 : type == "b32" || type == "u32" ? 32 : 16;
    if (i.groups.size() == 2 && i.groups[0] == 0 && i.operands.size() == 3)
        return width == 64 ? OPERATION(uint64_t v = get<uint64_t>(m, i, 2); set(m, i, 0, (uint32_t)v); set(m, i, 1, (uint32_t)(v >> 32)))
                           : OPERATION(uint32_t v = get<uint32_t>(m, i, 2); set(m, i, 0, (uint16_t)v); set(m, i, 1, (uint16_t)(v >> 16)));
    if (i.groups.size() == 2 && i.groups[0] == 1 && i.operands.size() == 3)
        return width == 64 ? OPERATION(set(m, i, 0, (uint64_t)get<uint32_t>(m, i, 2) << 32 | get<uint32_t>(m, i, 1)))
                           : OPERATION(set(m, i, 0, (uint32_t)get<uint16_t>(m, i, 2) << 16 | get<uint16_t>(m, i, 1)));
    if (!i.groups.empty()) return nullptr;
    if (type == "pred") return OPERATION(set<uint64_t>(m, i, 0, m.r[i.operands[1]] & 1));
    return TYPED(numbers, type, set<T>(m, i, 0, A));
}

// cvt.[rounding.][sat.]TO.FROM
Operation convert(const std::vector<std::string>& parts) {
    const std::string &to = parts[parts.size() - 2], &from = parts.back();
    std::string mode = parts.size() > 3 ? parts[1] : "";
    if (to == "bf16x2") return OPERATION(set(m, i, 0, (uint32_t)emulator::float_to_bfloat(get<float>(m, i, 1)) << 16 | emulator::float_to_bfloat(get<float>(m, i, 2))));
    if (to == "f16x2") return OPERATION(set(m, i, 0, (uint32_t)emulator::float_to_half(get<float>(m, i, 1)) << 16 | emulator::float_to_half(get<float>(m, i, 2))));
    if (to == "bf16" && from == "f32") return OPERATION(set(m, i, 0, emulator::float_to_bfloat(get<float>(m, i, 1))));
    if (to == "f16" && from == "f32") return OPERATION(set(m, i, 0, emulator::float_to_half(get<float>(m, i, 1))));
    if (to == "f32" && from == "f16") return OPERATION(set(m, i, 0, emulator::half_to_float(get<uint16_t>(m, i, 1))));
    if (to == "f32" && from == "f32" && mode == "sat") return OPERATION(set(m, i, 0, fminf(fmaxf(get<float>(m, i, 1), 0.0f), 1.0f)));
    if (to == "f32" && from == "f32" && mode == "rni") return OPERATION(set(m, i, 0, nearbyintf(get<float>(m, i, 1))));
    if (to == "f32" && from == "f32" && mode == "rzi") return OPERATION(set(m, i, 0, truncf(get<float>(m, i, 1))));
    if (to == "f32" && from == "f32" && mode == "rmi") return OPERATION(set(m, i, 0, floorf(get<float>(m, i, 1))));
    if (to == "s32" && from == "f32" && mode == "rni") return OPERATION(set(m, i, 0, (int32_t)nearbyintf(get<float>(m, i, 1))));
    if (to == "s32" && from == "f32" && mode == "rzi") return OPERATION(set(m, i, 0, (int32_t)get<float>(m, i, 1)));
    if (to == "u32" && from == "f32" && mode == "rzi") return OPERATION(set(m, i, 0, (uint32_t)get<float>(m, i, 1)));
    if (to == "f32" && mode == "rn") return TYPED(memory_types, from, set(m, i, 0, (float)A));
    if (to[0] == 'f' || from[0] == 'f' || !mode.empty()) return nullptr;
    // Registers may be wider than `to`: the result is extended as `to` says.
    bool narrow_signed = to[0] == 's';
    if (narrow_signed) return TYPED(memory_types, from, set<int64_t>(m, i, 0, (int64_t)A));
    if (to == "u8") return OPERATION(set(m, i, 0, get<uint8_t>(m, i, 1)));
    if (to == "u16") return TYPED(memory_types, from, set<uint16_t>(m, i, 0, (uint16_t)(int64_t)A));
    if (to == "u32") return TYPED(memory_types, from, set<uint32_t>(m, i, 0, (uint32_t)(int64_t)A));
    return TYPED(memory_types, from, set<uint64_t>(m, i, 0, (uint64_t)(int64_t)A));
}

enum Space : uint32_t { GENERIC, GLOBAL, SHARED_SPACE, PARAMETERS };

uint8_t* locate(M m, I i, uint32_t space, uint64_t at, size_t bytes) {
    if (at % bytes) emulator::fail("%s:%d: %zu bytes at %#llx are not aligned", m.kernel, i.line, bytes, (unsigned long long)at);
    if (space == SHARED_SPACE) {
        if (at > m.shared_bytes || bytes > m.shared_bytes - at) emulator::fail("%s:%d: byte %llu of %zu of shared memory", m.kernel, i.line, (unsigned long long)at, m.shared_bytes);
        return m.shared + at;
    }
    if (space == PARAMETERS) {
        if (at > m.parameter_bytes || bytes > m.parameter_bytes - at) emulator::fail("%s:%d: byte %llu of the parameters", m.kernel, i.line, (unsigned long long)at);
        return m.parameters + at;
    }
    return (uint8_t*)at;
}

template <class T>
void load(I i, M m) {
    size_t n = i.operands.size();
    const uint8_t* p = locate(m, i, i.immediate, m.r[i.address] + i.offset, n * sizeof(T));
    for (size_t k = 0; k < n; k++) {
        T value;
        memcpy(&value, p + k * sizeof(T), sizeof(T));
        if (std::is_signed<T>::value && std::is_integral<T>::value)
            set(m, i, k, (int64_t)value);
        else
            set(m, i, k, value);
    }
}

template <class T>
void store(I i, M m) {
    size_t n = i.operands.size();
    uint8_t* p = locate(m, i, i.immediate, m.r[i.address] + i.offset, n * sizeof(T));
    for (size_t k = 0; k < n; k++) {
        T value = get<T>(m, i, k);
        memcpy(p + k * sizeof(T), &value, sizeof(T));
    }
}

uint32_t space_of(const std::vector<std::string>& parts) {
    for (const std::string& p : parts) {
        if (p == "global") return GLOBAL;
        if (p == "shared") return SHARED_SPACE;
        if (p == "param") return PARAMETERS;
    }
    return GENERIC;
}

Operation memory(const std::string& name, const std::vector<std::string>& parts, Instruction& i) {
    i.immediate = space_of(parts);
    if (name == "ld") return memory_types(parts.back(), [](auto sample) { return Operation(load<decltype(sample)>); });
    if (name == "st") return memory_types(parts.back(), [](auto sample) { return Operation(store<decltype(sample)>); });
    if (name == "atom" && parts.back() == "u32" && parts[parts.size() - 2] == "add")
        return OPERATION(uint32_t* p = (uint32_t*)locate(m, i, i.immediate, m.r[i.address] + i.offset, 4); uint32_t old = *p; *p = old + get<uint32_t>(m, i, 1); set(m, i, 0, old));
    if (name == "cvta" && i.immediate == SHARED_SPACE)
        return parts[1] == "to" ? OPERATION(set(m, i, 0, m.r[i.operands[1]] - (uint64_t)m.shared)) : OPERATION(set(m, i, 0, m.r[i.operands[1]] + (uint64_t)m.shared));
    if (name == "cvta" && i.immediate == GLOBAL) return OPERATION(set(m, i, 0, m.r[i.operands[1]]));
    return nullptr;
}

// shfl.sync.MODE.b32 d|p, a, b, c, mask
template <char MODE>
void shuffle(I i, M m) {
    uint32_t b = get<uint32_t>(m, i, 3), c = get<uint32_t>(m, i, 4), lane = emulator::lane();
    uint32_t segment = c >> 8 & 31, clamp = c & 31, last = (lane & segment) | (clamp & ~segment), first = lane & segment;
    int source = MODE == 'u' ? (int)(lane - b) : MODE == 'd' ? (int)(lane + b) : MODE == 'b' ? (int)(lane ^ b) : (int)(first | (b & 31 & ~segment));
    bool inside = MODE == 'u' ? source >= (int)last : source <= (int)last;
    uint32_t value = emulator::shuffle<uint32_t>(get<uint32_t>(m, i, 5), get<uint32_t>(m, i, 2), inside ? source : lane, m.kernel, i.line);
    set(m, i, 0, value);
    set<uint64_t>(m, i, 1, inside);
}

uint32_t lanes_with(uint32_t value, uint32_t mask, M m, I i) {
    uint32_t all = 0;
    for (uint32_t lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) all |= (uint32_t)(emulator::shuffle(mask, value, lane, m.kernel, i.line) == value) << lane;
    return all;
}

uint32_t largest(uint32_t value, uint32_t mask, M m, I i) {
    uint32_t most = 0;
    for (uint32_t lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) most = std::max(most, emulator::shuffle(mask, value, lane, m.kernel, i.line));
    return most;
}

Operation together(const std::string& name, const std::vector<std::string>& parts) {
    if (name == "bar" && parts[1] == "sync") return OPERATION(emulator::barrier(m.kernel, i.line, true));
    if (name == "barrier" && parts[1] == "sync") return OPERATION(emulator::barrier(m.kernel, i.line, true));
    if (name == "bar" && parts[1] == "warp") return OPERATION(__syncwarp(get<uint32_t>(m, i, 0), m.kernel, i.line));
    if (name == "shfl") return parts[2] == "bfly" ? shuffle<'b'> : parts[2] == "up" ? shuffle<'u'> : parts[2] == "down" ? shuffle<'d'> : shuffle<'i'>;
    if (name == "vote" && parts[2] == "any") return OPERATION(set<uint64_t>(m, i, 0, emulator::vote(get<uint32_t>(m, i, 2), m.r[i.operands[1]] & 1, m.kernel, i.line) != 0));
    if (name == "vote" && parts[2] == "all") return OPERATION(uint32_t mask = get<uint32_t>(m, i, 2); set<uint64_t>(m, i, 0, emulator::vote(mask, m.r[i.operands[1]] & 1, m.kernel, i.line) == mask));
    if (name == "vote" && parts[2] == "ballot") return OPERATION(set(m, i, 0, emulator::vote(get<uint32_t>(m, i, 2), m.r[i.operands[1]] & 1, m.kernel, i.line)));
    if (name == "match" && parts[1] == "any") return OPERATION(set(m, i, 0, lanes_with(get<uint32_t>(m, i, 1), get<uint32_t>(m, i, 2), m, i)));
    if (name == "redux" && parts[2] == "max" && parts[3] == "u32") return OPERATION(set(m, i, 0, largest(get<uint32_t>(m, i, 1), get<uint32_t>(m, i, 2), m, i)));
    if (is_one_of(name, {"membar", "fence", "prefetch"})) return OPERATION((void)i; (void)m);
    return nullptr;
}

// mma d{4}, a{4}, b{2}, c{4}
template <void (*MULTIPLY)(float*, const uint32_t*, const uint32_t*, const char*, int)>
void multiply(I i, M m) {
    float d[4];
    uint32_t a[4], b[2];
    for (int k = 0; k < 4; k++) a[k] = get<uint32_t>(m, i, 4 + k);
    for (int k = 0; k < 2; k++) b[k] = get<uint32_t>(m, i, 8 + k);
    for (int k = 0; k < 4; k++) d[k] = get<float>(m, i, 10 + k);
    MULTIPLY(d, a, b, m.kernel, i.line);
    for (int k = 0; k < 4; k++) set(m, i, k, d[k]);
}

template <void (*LOAD)(uint32_t*, SharedAddress, const char*, int)>
void load_matrices(I i, M m) {
    uint32_t r[4];
    LOAD(r, (SharedAddress)locate(m, i, SHARED_SPACE, (uint32_t)m.r[i.address] + i.offset, 16), m.kernel, i.line);
    for (int k = 0; k < 4; k++) set(m, i, k, r[k]);
}

// cp.async.cg.shared.global [to], [from], 16, bytes that are read
void copy_later(I i, M m) {
    uint32_t wanted = i.operands.size() > 1 ? get<uint32_t>(m, i, 1) : 16;
    if (get<uint32_t>(m, i, 0) != 16 || (wanted != 0 && wanted != 16)) emulator::fail("%s:%d: cp.async of %u bytes", m.kernel, i.line, wanted);
    uint8_t* to = locate(m, i, SHARED_SPACE, (uint32_t)m.r[i.address] + i.offset, 16);
    emulator::copy_async(to, (const void*)(m.r[i.second_address] + i.second_offset), wanted == 16, m.kernel, i.line);
}

Operation tensors(const std::string& name, const std::vector<std::string>& parts) {
    auto all = [&] {
        std::string joined;
        for (const std::string& p : parts) joined += p + ".";
        return joined;
    };
    if (name == "mma") {
        if (all() == "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32.") return multiply<mma_bf16_16x8x16>;
        if (all() == "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32.") return multiply<mma_f16_16x8x16>;
    }
    if (all() == "ldmatrix.sync.aligned.m8n8.x4.shared.b16.") return load_matrices<ldmatrix_x4>;
    if (all() == "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16.") return load_matrices<ldmatrix_x4_trans>;
    if (all() == "cp.async.cg.shared.global.") return copy_later;
    if (all() == "cp.async.commit_group.") return OPERATION((void)i; (void)m; emulator::commit_copies());
    if (all() == "cp.async.wait_group.") return OPERATION(emulator::wait_for_copies(get<uint32_t>(m, i, 0)));
    return nullptr;
}

}  // namespace

Operation special(const std::string& name) {
    if (name == "%tid.x") return OPERATION(set(m, i, 0, threadIdx.x));
    if (name == "%tid.y") return OPERATION(set(m, i, 0, threadIdx.y));
    if (name == "%ctaid.x") return OPERATION(set(m, i, 0, blockIdx.x));
    if (name == "%ctaid.y") return OPERATION(set(m, i, 0, blockIdx.y));
    if (name == "%ctaid.z") return OPERATION(set(m, i, 0, blockIdx.z));
    if (name == "%ntid.x") return OPERATION(set(m, i, 0, blockDim.x));
    if (name == "%ntid.y") return OPERATION(set(m, i, 0, blockDim.y));
    if (name == "%nctaid.x") return OPERATION(set(m, i, 0, gridDim.x));
    if (name == "%nctaid.y") return OPERATION(set(m, i, 0, gridDim.y));
    if (name == "%nctaid.z") return OPERATION(set(m, i, 0, gridDim.z));
    return nullptr;
}

Operation operation(const std::vector<std::string>& parts, Instruction& i) {
    const std::string& name = parts[0];
    if (name == "mov") return move(parts.back(), i);
    if (name == "cvt") return convert(parts);
    if (name == "setp") return set_predicate(parts, i);
    if (is_one_of(name, {"ld", "st", "atom", "cvta"})) return memory(name, parts, i);
    if (is_one_of(name, {"mma", "ldmatrix", "cp"})) return tensors(name, parts);
    if (Operation found = together(name, parts)) return found;
    if (Operation found = functions(name, parts)) return found;
    if (Operation found = bits(name, parts.back())) return found;
    return arithmetic(name, parts);
}

}  // namespace ptx
