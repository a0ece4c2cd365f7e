// FP8 casts on the CPU: largest magnitudes of groups, codes, and values of codes, with the bits of kernels/fp8_format.py.
// Rows of x are contiguous; a group is group_rows x group_columns numbers, and its number is (row / group_rows,
// column / group_columns).
#pragma once

#include <algorithm>
#include <vector>

#include "numbers.h"

namespace graphopt {

struct Matrix {
    int64_t num_rows, num_columns, row_stride;
};

struct Groups {
    int64_t rows, columns, num_columns;  // num_columns: how many groups lie beside each other

    int64_t first_of_row(int64_t row) const { return row / rows * num_columns; }
};

// Raises largest[groups of a row] to the magnitudes, as bits, of rows of one row of groups.
template <typename Raw, Raw MAGNITUDE_OF_RAW>
void largest_of_rows(const Raw* x, int64_t num_rows, const Matrix& matrix, const Groups& groups, uint32_t* __restrict largest) {
    for (int64_t row = 0; row < num_rows; ++row, x += matrix.row_stride) {
        if (groups.columns == 1) {
            for (int64_t column = 0; column < matrix.num_columns; ++column) {
                largest[column] = std::max<uint32_t>(largest[column], x[column] & MAGNITUDE_OF_RAW);
            }
            continue;
        }
        for (int64_t group = 0; group < groups.num_columns; ++group) {
            const int64_t stop = std::min(matrix.num_columns, (group + 1) * groups.columns);
            Raw found = 0;
            for (int64_t column = group * groups.columns; column < stop; ++column) {
                found = std::max<Raw>(found, x[column] & MAGNITUDE_OF_RAW);
            }
            largest[group] = std::max<uint32_t>(largest[group], found);
        }
    }
}

inline void largest_of_rows(const void* x, int64_t dtype, int64_t first_row, int64_t num_rows, const Matrix& matrix,
                            const Groups& groups, uint32_t* largest) {
    const int64_t start = first_row * matrix.row_stride;
    if (dtype == FLOAT32) {
        largest_of_rows<uint32_t, 0x7FFFFFFFu>(static_cast<const uint32_t*>(x) + start, num_rows, matrix, groups, largest);
    } else {
        largest_of_rows<uint16_t, 0x7FFFu>(static_cast<const uint16_t*>(x) + start, num_rows, matrix, groups, largest);
    }
}

inline float float_of_raw(uint32_t raw, int64_t dtype) {
    if (dtype == FLOAT32) return float_of(raw);
    return dtype == BFLOAT16 ? from_bfloat16(static_cast<uint16_t>(raw)) : from_float16(static_cast<uint16_t>(raw));
}

// Codes of values times factors; factor_step 0: one factor for all. Nearest, ties to even; saturating; NaN as 0x7F.
template <int MANTISSA_BITS, int BIAS, uint32_t LARGEST>
void encode_fp8(const float* __restrict values, const float* __restrict factors, int64_t factor_step, int64_t count,
                uint8_t* __restrict codes) {
    constexpr int DROPPED = 23 - MANTISSA_BITS;
    constexpr uint32_t SMALLEST_NORMAL = (128u - BIAS) << 23;
    constexpr uint32_t UNIT = (127u + 24u - BIAS - MANTISSA_BITS) << 23;  // its last place is the smallest FP8 number
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t bits = bits_of(values[i] * factors[factor_step == 0 ? 0 : i]);
        const uint32_t magnitude = bits & MAGNITUDE, kept = std::min(magnitude, LARGEST);
        const uint32_t half = (1u << (DROPPED - 1)) - 1u + ((kept >> DROPPED) & 1u);
        const uint32_t normal = (kept + half - ((127u - BIAS) << 23)) >> DROPPED;
        const uint32_t subnormal = bits_of(float_of(kept) + float_of(UNIT)) - UNIT;
        const uint32_t finite = (kept < SMALLEST_NORMAL ? subnormal : normal) | ((bits >> 24) & 0x80u);
        codes[i] = static_cast<uint8_t>(magnitude > INFINITE ? 0x7Fu : finite);
    }
}

inline void encode_fp8(int64_t is_e5m2, const float* values, const float* factors, int64_t factor_step, int64_t count,
                       uint8_t* codes) {
    if (is_e5m2) {
        encode_fp8<2, 15, 0x47600000u>(values, factors, factor_step, count, codes);  // 57344
    } else {
        encode_fp8<3, 7, 0x43E00000u>(values, factors, factor_step, count, codes);  // 448
    }
}

constexpr int64_t TILE_ROWS = 64, TILE_COLUMNS = 256;

// Calls run(start, count, factors, factor_step) for the stretches of columns that share a factor, or have one each.
template <typename Run>
void for_stretches(const float* factors, const Groups& groups, int64_t row, int64_t column, int64_t stop, const Run& run) {
    const float* of_row = factors + groups.first_of_row(row);
    while (column < stop) {
        const int64_t end = groups.columns == 1 ? stop : std::min(stop, (column / groups.columns + 1) * groups.columns);
        run(column, end - column, of_row + column / groups.columns, groups.columns == 1 ? 1 : 0);
        column = end;
    }
}

}  // namespace graphopt
