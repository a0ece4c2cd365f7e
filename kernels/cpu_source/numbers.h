// Narrow floats and counted random bits, one element at a time, in loops that a compiler turns into vector code.
// Each function gives the bits of its counterpart in plain torch (kernels/counter_random.py, round_weights.py).
#pragma once

#include <cstdint>
#include <cstring>

namespace graphopt {

enum Dtype : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

constexpr uint32_t MAGNITUDE = 0x7FFFFFFFu;
constexpr uint32_t INFINITE = 0x7F800000u;

inline float from_bfloat16(uint16_t narrow) { return float_of(static_cast<uint32_t>(narrow) << 16); }

inline uint16_t to_bfloat16(float value) {  // nearest, ties to even
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>((bits & MAGNITUDE) > INFINITE ? 0x7FC0u : rounded);
}

inline uint16_t to_bfloat16_drawn(float value, uint32_t draw) {  // a neighbour, by the lower 16 bits of the draw
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & MAGNITUDE;
    const uint32_t rounded = (magnitude < INFINITE ? bits + (draw & 0xFFFFu) : bits) >> 16;
    return static_cast<uint16_t>(magnitude > INFINITE ? 0x7FC0u : rounded);
}

inline float from_float16(uint16_t narrow) {
    const uint32_t sign = static_cast<uint32_t>(narrow & 0x8000u) << 16;
    const uint32_t magnitude = static_cast<uint32_t>(narrow & 0x7FFFu) << 13;
    const uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);  // moves the exponent, subnormals included
    const uint32_t wide = magnitude >= 0x0F800000u ? magnitude | INFINITE : finite;
    return float_of(wide | sign);
}

inline uint16_t to_float16(float value) {  // nearest, ties to even
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & MAGNITUDE;
    const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
    const uint32_t normal = rounded >= 0x47800000u ? 0x7C00u : (rounded - 0x38000000u) >> 13;
    // Added to 0.5, whose last place is the smallest float16, the hardware rounds to a multiple of that.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
    uint32_t narrow = magnitude < 0x38800000u ? subnormal : normal;
    narrow = magnitude > INFINITE ? 0x7E00u : narrow;
    return static_cast<uint16_t>(narrow | ((bits >> 16) & 0x8000u));
}

inline void load_floats(const void* source, int64_t dtype, int64_t start, int64_t count, float* __restrict target) {
    if (dtype == FLOAT32) {
        std::memcpy(target, static_cast<const float*>(source) + start, count * sizeof(float));
        return;
    }
    const uint16_t* __restrict narrow = static_cast<const uint16_t*>(source) + start;
    if (dtype == BFLOAT16) {
        for (int64_t i = 0; i < count; ++i) target[i] = from_bfloat16(narrow[i]);
    } else {
        for (int64_t i = 0; i < count; ++i) target[i] = from_float16(narrow[i]);
    }
}

inline void store_floats(const float* __restrict source, void* target, int64_t dtype, int64_t start, int64_t count,
                         const uint32_t* __restrict draws) {  // draws: null rounds to nearest
    if (dtype == FLOAT32) {
        std::memcpy(static_cast<float*>(target) + start, source, count * sizeof(float));
        return;
    }
    uint16_t* __restrict narrow = static_cast<uint16_t*>(target) + start;
    if (dtype == FLOAT16) {
        for (int64_t i = 0; i < count; ++i) narrow[i] = to_float16(source[i]);
    } else if (draws == nullptr) {
        for (int64_t i = 0; i < count; ++i) narrow[i] = to_bfloat16(source[i]);
    } else {
        for (int64_t i = 0; i < count; ++i) narrow[i] = to_bfloat16_drawn(source[i], draws[i]);
    }
}

inline uint32_t mix(uint32_t bits) {
    bits = (bits ^ (bits >> 16)) * 0x21F0AAADu;
    bits = (bits ^ (bits >> 15)) * 0xD35A2D97u;
    return bits ^ (bits >> 15);
}

inline void random_bits(uint64_t key, uint64_t start, int64_t count, uint32_t* __restrict target) {
    const uint32_t key_low = static_cast<uint32_t>(key), key_high = static_cast<uint32_t>(key >> 32);
    const uint32_t start_low = static_cast<uint32_t>(start), start_high = static_cast<uint32_t>(start >> 32);
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t low = start_low + static_cast<uint32_t>(i);
        const uint32_t high = start_high + (low < start_low ? 1u : 0u);
        target[i] = mix(mix((low ^ key_low) + high * 0x9E3779B9u) ^ key_high);
    }
}

inline float uniform(uint32_t draw) { return static_cast<float>(static_cast<int32_t>(draw >> 16)) * 0x1p-16f; }

}  // namespace graphopt
