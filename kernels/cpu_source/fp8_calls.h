// The FP8 casts as functions to call (kernels/cpu_calls.py).
#pragma once

#include "fp8_cast.h"

extern "C" {

// f32 largest[groups]: the largest magnitudes of x; a maximum of bits, the same for every number of threads.
void graphopt_fp8_largest(const void* x, int64_t dtype, const graphopt::Matrix* matrix, const graphopt::Groups* groups,
                          float* largest, int64_t num_threads) {
    const int64_t num_groups = (matrix->num_rows + groups->rows - 1) / groups->rows;
    // Parts of rows that lie in one row of groups: whole such rows, or a thread's share of the only one.
    const int64_t rows_of_a_part = num_groups > 1 ? groups->rows : (matrix->num_rows + num_threads - 1) / num_threads;
    const int64_t num_parts = (matrix->num_rows + rows_of_a_part - 1) / rows_of_a_part;
    std::fill(largest, largest + num_groups * groups->num_columns, 0.0f);
#pragma omp parallel num_threads(static_cast<int>(num_threads))
    {
        std::vector<uint32_t> found(groups->num_columns);
#pragma omp for schedule(static)
        for (int64_t part = 0; part < num_parts; ++part) {
            const int64_t first = part * rows_of_a_part;
            const int64_t count = std::min(rows_of_a_part, matrix->num_rows - first);
            std::fill(found.begin(), found.end(), 0u);
            graphopt::largest_of_rows(x, dtype, first, count, *matrix, *groups, found.data());
            float* target = largest + groups->first_of_row(first);
            const auto raise = [&](int64_t group) {
                const uint32_t bits = graphopt::bits_of(graphopt::float_of_raw(found[group], dtype));
                target[group] = graphopt::float_of(std::max(graphopt::bits_of(target[group]), bits));
            };
            if (num_groups > 1) {
                for (int64_t group = 0; group < groups->num_columns; ++group) raise(group);
            } else {
#pragma omp critical
                for (int64_t group = 0; group < groups->num_columns; ++group) raise(group);
            }
        }
    }
}

// Codes of x times the factors of its groups. turned: codes lie as the transpose, columns contiguous.
void graphopt_fp8_encode(const void* x, int64_t dtype, const graphopt::Matrix* matrix, const graphopt::Groups* groups,
                         const float* factors, int64_t is_e5m2, uint8_t* codes, int64_t turned, int64_t num_threads) {
    using graphopt::TILE_COLUMNS;
    using graphopt::TILE_ROWS;
    const int64_t num_tiles = (matrix->num_rows + TILE_ROWS - 1) / TILE_ROWS;
#pragma omp parallel for num_threads(static_cast<int>(num_threads)) schedule(static)
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
        const int64_t first = tile * TILE_ROWS, last = std::min(matrix->num_rows, first + TILE_ROWS);
        for (int64_t left = 0; left < matrix->num_columns; left += TILE_COLUMNS) {
            const int64_t right = std::min(matrix->num_columns, left + TILE_COLUMNS);
            float values[TILE_COLUMNS];
            uint8_t kept[TILE_ROWS][TILE_COLUMNS];
            for (int64_t row = first; row < last; ++row) {
                uint8_t* target = turned ? kept[row - first] : codes + row * matrix->num_columns + left;
                graphopt::load_floats(x, dtype, row * matrix->row_stride + left, right - left, values);
                graphopt::for_stretches(factors, *groups, row, left, right,
                                        [&](int64_t column, int64_t count, const float* shared, int64_t step) {
                    const int64_t place = column - left;
                    graphopt::encode_fp8(is_e5m2, values + place, shared, step, count, target + place);
                });
            }
            if (!turned) continue;
            for (int64_t column = left; column < right; ++column) {
                uint8_t* target = codes + column * matrix->num_rows + first;
                for (int64_t row = 0; row < last - first; ++row) target[row] = kept[row][column - left];
            }
        }
    }
}

// Values, contiguous, of codes with contiguous rows; table: f32[256], what each code stands for.
void graphopt_fp8_decode(const uint8_t* codes, const graphopt::Matrix* matrix, const graphopt::Groups* groups,
                         const float* scales, const float* table, void* values, int64_t dtype, int64_t num_threads) {
    using graphopt::TILE_COLUMNS;
#pragma omp parallel for num_threads(static_cast<int>(num_threads)) schedule(static)
    for (int64_t row = 0; row < matrix->num_rows; ++row) {
        for (int64_t left = 0; left < matrix->num_columns; left += TILE_COLUMNS) {
            const int64_t right = std::min(matrix->num_columns, left + TILE_COLUMNS);
            float wide[TILE_COLUMNS];
            graphopt::for_stretches(scales, *groups, row, left, right,
                                    [&](int64_t column, int64_t count, const float* shared, int64_t step) {
                const uint8_t* found = codes + row * matrix->row_stride + column;
                float* __restrict target = wide + (column - left);
                for (int64_t i = 0; i < count; ++i) target[i] = table[found[i]] * shared[step == 0 ? 0 : i];
            });
            graphopt::store_floats(wide, values, dtype, row * matrix->num_columns + left, right - left, nullptr);
        }
    }
}

}  // extern "C"
