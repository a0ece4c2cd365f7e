// The maps from a block of float32 moments to 8-bit codes and a scale, and back: the bits of kernels/block_maps.py.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "numbers.h"

namespace graphopt {

enum Map : int64_t { COMPANDED = 0, LINEAR = 1, DYNAMIC = 2 };

// The dynamic tree: 256 values and 255 edges of the signed tree, then of the unsigned one, and its 256 steps.
struct Trees {
    const float* signed_values;
    const float* signed_edges;
    const float* unsigned_values;
    const float* unsigned_edges;
    const float* steps;
};

inline Trees trees_of(const float* packed) {
    return {packed, packed + 256, packed + 511, packed + 767, packed + 1022};
}

constexpr float PER_SIGNED_CODE = 0x1.020408p-7f;     // 1 / 127
constexpr float PER_SIGNED_SQUARE = 0x1.040c2p-14f;   // 1 / 127^2
constexpr float PER_UNSIGNED_CODE = 0x1.010102p-8f;   // 1 / 255
constexpr float PER_UNSIGNED_SQUARE = 0x1.020304p-16f;  // 1 / 255^2

// How many of 255 ascending edges lie below a value (or, inclusive, not above it).
template <bool INCLUSIVE>
inline int32_t count_below(const float* edges, float value) {
    int32_t below = 0;
    for (int32_t width = 128; width > 0; width >>= 1) {
        const float edge = edges[below + width - 1];
        below += (INCLUSIVE ? edge <= value : edge < value) ? width : 0;
    }
    return below;
}

// The scale of a block whose largest magnitude has these bits; NaN where the block is not finite.
inline float scale_of(uint32_t largest) {
    return largest < INFINITE ? float_of(largest) : std::numeric_limits<float>::quiet_NaN();
}

inline uint32_t largest_magnitude(const float* __restrict values, int64_t count) {
    int32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int32_t magnitude = static_cast<int32_t>(bits_of(values[i]) & MAGNITUDE);
        largest = magnitude > largest ? magnitude : largest;
    }
    return static_cast<uint32_t>(largest);
}

inline void decode_signed(const int8_t* __restrict codes, float scale, int64_t count, int64_t map, const Trees& trees,
                          float* __restrict values) {
    if (map == COMPANDED) {
        for (int64_t i = 0; i < count; ++i) {
            const float wide = static_cast<float>(static_cast<int32_t>(codes[i]));
            values[i] = wide * std::fabs(wide) * PER_SIGNED_SQUARE * scale;
        }
    } else if (map == LINEAR) {
        for (int64_t i = 0; i < count; ++i) {
            values[i] = static_cast<float>(static_cast<int32_t>(codes[i])) * PER_SIGNED_CODE * scale;
        }
    } else {
        for (int64_t i = 0; i < count; ++i) values[i] = trees.signed_values[codes[i] + 128] * scale;
    }
}

inline void decode_unsigned(const uint8_t* __restrict codes, float scale, int64_t count, int64_t map, const Trees& trees,
                            float* __restrict values) {
    if (map == COMPANDED) {
        for (int64_t i = 0; i < count; ++i) {
            const float wide = static_cast<float>(static_cast<int32_t>(codes[i]));
            const float root = wide * wide * PER_UNSIGNED_SQUARE;
            values[i] = root * root * scale;
        }
    } else if (map == LINEAR) {
        for (int64_t i = 0; i < count; ++i) {
            values[i] = static_cast<float>(static_cast<int32_t>(codes[i])) * PER_UNSIGNED_CODE * scale;
        }
    } else {
        for (int64_t i = 0; i < count; ++i) values[i] = trees.unsigned_values[codes[i]] * scale;
    }
}

inline void encode_signed(const float* __restrict values, float scale, int64_t count, int64_t map, const Trees& trees,
                          int8_t* __restrict codes) {
    if (!(scale > 0.0f)) {
        std::memset(codes, 0, count);
    } else if (map == COMPANDED) {
        const float per_root = 1.0f / std::sqrt(scale);
        for (int64_t i = 0; i < count; ++i) {
            const float place = std::rint(std::sqrt(std::fabs(values[i])) * per_root * 127.0f);
            codes[i] = static_cast<int8_t>(static_cast<int32_t>(std::copysign(place, values[i])));
        }
    } else if (map == LINEAR) {
        for (int64_t i = 0; i < count; ++i) {
            codes[i] = static_cast<int8_t>(static_cast<int32_t>(std::rint(values[i] / scale * 127.0f)));
        }
    } else {
        for (int64_t i = 0; i < count; ++i) {
            codes[i] = static_cast<int8_t>(count_below<false>(trees.signed_edges, values[i] / scale) - 128);
        }
    }
}

inline void take_roots(const float* __restrict values, int64_t count, float* __restrict roots) {
    for (int64_t i = 0; i < count; ++i) roots[i] = std::sqrt(values[i]);
}

template <bool IS_DRAWN>
inline uint8_t whole_code(float place, uint32_t draw, float least) {
    float code = IS_DRAWN ? std::floor(place + uniform(draw)) : std::rint(place);
    code = code < 255.0f ? code : 255.0f;
    return static_cast<uint8_t>(static_cast<int32_t>(code > least ? code : least));
}

// roots: the square roots of the values, which only the companded map reads.
template <bool IS_DRAWN>
inline void encode_unsigned(const float* __restrict values, const float* __restrict roots, float scale, int64_t count,
                            int64_t map, const Trees& trees, const uint32_t* __restrict draws, uint8_t* __restrict codes) {
    if (!(scale > 0.0f)) {
        std::memset(codes, 0, count);
    } else if (map == COMPANDED) {
        const float per_root = 1.0f / std::sqrt(scale);
        for (int64_t i = 0; i < count; ++i) {
            const float place = std::sqrt(roots[i] * per_root) * 255.0f;
            codes[i] = whole_code<IS_DRAWN>(place, IS_DRAWN ? draws[i] : 0u, roots[i] > 0.0f ? 1.0f : 0.0f);
        }
    } else if (map == LINEAR) {
        for (int64_t i = 0; i < count; ++i) {
            codes[i] = whole_code<IS_DRAWN>(values[i] / scale * 255.0f, IS_DRAWN ? draws[i] : 0u, 0.0f);
        }
    } else {
        for (int64_t i = 0; i < count; ++i) {
            const float ratio = values[i] / scale;
            if (!IS_DRAWN) {
                codes[i] = static_cast<uint8_t>(count_below<false>(trees.unsigned_edges, ratio));
                continue;
            }
            const int32_t below = count_below<true>(trees.unsigned_values + 1, ratio);
            const float way = (ratio - trees.unsigned_values[below]) / trees.steps[below];
            const int32_t code = below + static_cast<int32_t>(std::floor(way + uniform(draws[i])));
            codes[i] = static_cast<uint8_t>(code < 255 ? code : 255);
        }
    }
}

}  // namespace graphopt
