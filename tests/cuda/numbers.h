// Number types and arithmetic of CUDA for emulator.h.
#pragma once

struct __align__(8) uint2 { unsigned x, y; };
struct __align__(16) uint4 { unsigned x, y, z, w; };
struct __align__(8) int2 { int x, y; };
struct __align__(16) int4 { int x, y, z, w; };
struct __align__(8) float2 { float x, y; };
struct __align__(16) float4 { float x, y, z, w; };
struct __align__(4) ushort2 { uint16_t x, y; };
struct __align__(8) ushort4 { uint16_t x, y, z, w; };
struct __align__(4) uchar4 { uint8_t x, y, z, w; };
struct __align__(4) char4 { int8_t x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline ushort2 make_ushort2(uint16_t x, uint16_t y) { return {x, y}; }
inline ushort4 make_ushort4(uint16_t x, uint16_t y, uint16_t z, uint16_t w) { return {x, y, z, w}; }

namespace emulator {
template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

// The float next to `d`, odd where inexact, so that rounding it again to fewer digits rounds as from `d`.
inline float round_to_odd(double d) {
    float f = (float)d;
    if (f != f || (double)f == d) return f;
    if (bits<uint32_t>(f) & 1) return f;
    return nextafterf(f, (double)f < d ? INFINITY : -INFINITY);
}

inline float half_to_float(uint16_t h) {
    uint32_t digits = h & 0x7fff;
    float f = bits<float>(digits << 13) * 0x1p112f;
    uint32_t u = bits<uint32_t>(f) | (uint32_t)(h & 0x8000) << 16;
    return bits<float>(digits >= 0x7c00 ? u | 0x7f800000 : u);
}

// To the nearest, ties to even; every NaN becomes 0x7fff, as `cvt.rn.f16.f32` has it.
inline uint16_t float_to_half(float f) {
    uint32_t u = bits<uint32_t>(f), sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u > 0x7f800000) return 0x7fff;
    if (u >= 0x477ff000) return sign | 0x7c00;
    if (u < 0x38800000) return sign | (bits<uint32_t>(bits<float>(u) + 0.5f) - bits<uint32_t>(0.5f));
    return sign | (u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13;
}

inline float bfloat_to_float(uint16_t h) { return bits<float>((uint32_t)h << 16); }

inline uint16_t float_to_bfloat(float f) {
    uint32_t u = bits<uint32_t>(f);
    if ((u & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}
}  // namespace emulator

struct __half {
    uint16_t x;
};
struct __nv_bfloat16 {
    uint16_t x;
};
struct __align__(4) __half2 { __half x, y; };
struct __align__(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
typedef __half half;
typedef __half2 half2;
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

inline float __half2float(__half h) { return emulator::half_to_float(h.x); }
inline __half __float2half_rn(float f) { return {emulator::float_to_half(f)}; }
inline __half __float2half(float f) { return __float2half_rn(f); }
inline uint16_t __half_as_ushort(__half h) { return h.x; }
inline __half __ushort_as_half(uint16_t u) { return {u}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__float2half_rn(x), __float2half_rn(y)}; }
inline __half2 __float22half2_rn(float2 f) { return __floats2half2_rn(f.x, f.y); }
inline float2 __half22float2(__half2 h) { return {__half2float(h.x), __half2float(h.y)}; }
inline __half __low2half(__half2 h) { return h.x; }
inline __half __high2half(__half2 h) { return h.y; }
inline float __low2float(__half2 h) { return __half2float(h.x); }
inline float __high2float(__half2 h) { return __half2float(h.y); }

inline float __bfloat162float(__nv_bfloat16 h) { return emulator::bfloat_to_float(h.x); }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return {emulator::float_to_bfloat(f)}; }
inline __nv_bfloat16 __float2bfloat16(float f) { return __float2bfloat16_rn(f); }
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 h) { return h.x; }
inline __nv_bfloat16 __ushort_as_bfloat16(uint16_t u) { return {u}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 f) { return __floats2bfloat162_rn(f.x, f.y); }
inline float2 __bfloat1622float2(__nv_bfloat162 h) { return {__bfloat162float(h.x), __bfloat162float(h.y)}; }
inline float __low2float(__nv_bfloat162 h) { return __bfloat162float(h.x); }
inline float __high2float(__nv_bfloat162 h) { return __bfloat162float(h.y); }

// Rounded once: products of two halves and their sum with a third are exact in double, or nearly, and made odd before rounding.
inline __half __hfma(__half a, __half b, __half c) {
    return __float2half_rn(emulator::round_to_odd((double)__half2float(a) * __half2float(b) + __half2float(c)));
}
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
    return __float2bfloat16_rn(emulator::round_to_odd((double)__bfloat162float(a) * __bfloat162float(b) + __bfloat162float(c)));
}
inline __half __hmul(__half a, __half b) { return __float2half_rn(__half2float(a) * __half2float(b)); }
inline __half __hadd(__half a, __half b) { return __float2half_rn(__half2float(a) + __half2float(b)); }
inline __half __hsub(__half a, __half b) { return __float2half_rn(__half2float(a) - __half2float(b)); }
inline __nv_bfloat16 __hmul(__nv_bfloat16 a, __nv_bfloat16 b) { return __float2bfloat16_rn(__bfloat162float(a) * __bfloat162float(b)); }
inline __nv_bfloat16 __hadd(__nv_bfloat16 a, __nv_bfloat16 b) {
    return __float2bfloat16_rn(emulator::round_to_odd((double)__bfloat162float(a) + __bfloat162float(b)));
}
inline __nv_bfloat16 __hsub(__nv_bfloat16 a, __nv_bfloat16 b) {
    return __float2bfloat16_rn(emulator::round_to_odd((double)__bfloat162float(a) - __bfloat162float(b)));
}
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
inline __half2 __hmul2(__half2 a, __half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
inline __half2 __hadd2(__half2 a, __half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline __half2 __hsub2(__half2 a, __half2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
inline __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }

inline uint32_t __float_as_uint(float f) { return emulator::bits<uint32_t>(f); }
inline int32_t __float_as_int(float f) { return emulator::bits<int32_t>(f); }
inline float __uint_as_float(uint32_t u) { return emulator::bits<float>(u); }
inline float __int_as_float(int32_t i) { return emulator::bits<float>(i); }

template <class T>
T __ldg(const T* p) { return *p; }
template <class T>
T __ldcs(const T* p) { return *p; }
template <class T>
T __ldcg(const T* p) { return *p; }
template <class T>
T __ldca(const T* p) { return *p; }
template <class T>
void __stcs(T* p, T v) { *p = v; }
template <class T>
void __stcg(T* p, T v) { *p = v; }

inline int __popc(uint32_t u) { return __builtin_popcount(u); }
inline int __ffs(int i) { return __builtin_ffs(i); }
inline int __clz(int i) { return i ? __builtin_clz(i) : 32; }
inline uint32_t __brev(uint32_t u) {
    uint32_t r = 0;
    for (int i = 0; i < 32; i++) r |= (u >> i & 1) << (31 - i);
    return r;
}
// Byte i of the result is the byte of y:x that nibble i of `selector` names; bit 3 of the nibble spreads its sign.
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
    uint64_t both = (uint64_t)y << 32 | x;
    uint32_t r = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t nibble = selector >> 4 * i & 15, byte = both >> 8 * (nibble & 7) & 255;
        if (nibble & 8) byte = byte & 128 ? 255 : 0;
        r |= byte << 8 * i;
    }
    return r;
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t by) { return ((uint64_t)high << 32 | low) >> (by & 31); }
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t by) { return ((uint64_t)high << 32 | low) << (by & 31) >> 32; }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint64_t)a * b >> 32; }

inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 32; i += 8) c += (int)(int8_t)(a >> i) * (int8_t)(b >> i);
    return c;
}

template <class A, class B>
typename std::common_type<A, B>::type min(A a, B b) {
    typedef typename std::common_type<A, B>::type T;
    if (std::is_floating_point<T>::value) return (T)fmin((T)a, (T)b);
    return (T)a < (T)b ? (T)a : (T)b;
}
template <class A, class B>
typename std::common_type<A, B>::type max(A a, B b) {
    typedef typename std::common_type<A, B>::type T;
    if (std::is_floating_point<T>::value) return (T)fmax((T)a, (T)b);
    return (T)a < (T)b ? (T)b : (T)a;
}

inline float rsqrtf(float f) { return 1.0f / sqrtf(f); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frsqrt_rn(float a) { return (float)(1.0 / sqrt((double)a)); }
inline float __expf(float a) { return expf(a); }
inline int __float2int_rn(float a) { return (int)nearbyintf(a); }
inline int __float2int_rz(float a) { return (int)a; }
inline float __int2float_rn(int a) { return (float)a; }
inline float __uint2float_rn(unsigned a) { return (float)a; }
