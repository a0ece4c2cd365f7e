// Block-INT8 Adam and Lion, quantizing, dequantizing and stochastic rounding on the CPU: the bits of the references in
// kernels/*.py. Compiled with -ffp-contract=off, so that every operation is rounded once, as plain torch rounds it.
//
// A thread takes a run of blocks, of whichever parameters they are, and works on one block at a time in scratch of six
// words an element, which stays in its first-level cache. Nothing else is allocated.
#include <algorithm>
#include <memory>

#include "fp8_calls.h"
#include "maps.h"
#include "numbers.h"

namespace graphopt {
namespace {

// One parameter: a row of the table that the caller builds (kernels/cpu_calls.py, ITEM_FIELDS).
struct Item {
    void* parameter;
    const void* gradient;
    int8_t* first_codes;
    float* first_scales;
    uint8_t* second_codes;
    float* second_scales;
    int64_t num_elements;
    int64_t first_block;  // number of blocks of the items before
    int64_t parameter_dtype;
    int64_t gradient_dtype;
    uint64_t key;
    uint64_t offset;
};

struct Options {
    int64_t block;
    int64_t map;
    int64_t decoupled;
    int64_t stochastic_state;
    int64_t stochastic_weight;
};

struct AdamScalars {
    float keep, weight_decay, one_minus_beta1, beta2, one_minus_beta2, root_of_correction2, eps, step_size;
};

struct LionScalars {
    float keep, weight_decay, beta1, one_minus_beta1, beta2, one_minus_beta2, lr;
};

struct Scratch {
    explicit Scratch(int64_t block)
        : words(new float[6 * block]), parameter(words.get()), gradient(parameter + block), first(gradient + block),
          second(first + block), roots(second + block), draws(reinterpret_cast<uint32_t*>(roots + block)) {}
    std::unique_ptr<float[]> words;
    float *parameter, *gradient, *first, *second, *roots;
    uint32_t* draws;
};

// The largest magnitudes of the new moments, as bits.
struct Largest {
    int32_t first, second;
};

template <bool DECOUPLED>
Largest adam_formula(Scratch& scratch, int64_t count, float factor, const AdamScalars& s) {
    float* __restrict parameter = scratch.parameter;
    const float* __restrict gradients = scratch.gradient;
    float* __restrict first = scratch.first;
    float* __restrict second = scratch.second;
    float* __restrict roots = scratch.roots;
    int32_t largest_first = 0, largest_second = 0;
    for (int64_t i = 0; i < count; ++i) {
        float gradient = gradients[i] * factor;
        float wide = parameter[i];
        if (DECOUPLED) {
            wide = wide * s.keep;
        } else {
            gradient = gradient + wide * s.weight_decay;
        }
        const float mean = first[i] + (gradient - first[i]) * s.one_minus_beta1;
        const float square = second[i] * s.beta2 + gradient * s.one_minus_beta2 * gradient;
        const float root = std::sqrt(square);
        parameter[i] = wide - mean * s.step_size / (root / s.root_of_correction2 + s.eps);
        roots[i] = root;
        first[i] = mean;
        second[i] = square;
        largest_first = std::max(largest_first, static_cast<int32_t>(bits_of(mean) & MAGNITUDE));
        largest_second = std::max(largest_second, static_cast<int32_t>(bits_of(square) & MAGNITUDE));
    }
    return {largest_first, largest_second};
}

template <bool DECOUPLED>
Largest lion_formula(Scratch& scratch, int64_t count, float factor, const LionScalars& s) {
    float* __restrict parameter = scratch.parameter;
    const float* __restrict gradients = scratch.gradient;
    float* __restrict first = scratch.first;
    int32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) {
        float gradient = gradients[i] * factor;
        float wide = parameter[i];
        if (DECOUPLED) {
            wide = wide * s.keep;
        } else {
            gradient = gradient + wide * s.weight_decay;
        }
        const float direction = first[i] * s.beta1 + gradient * s.one_minus_beta1;
        const float unit = direction == 0.0f ? 0.0f : std::copysign(1.0f, direction);
        parameter[i] = wide - (direction == direction ? unit : direction) * s.lr;
        first[i] = first[i] * s.beta2 + gradient * s.one_minus_beta2;
        largest = std::max(largest, static_cast<int32_t>(bits_of(first[i]) & MAGNITUDE));
    }
    return {largest, 0};
}

Largest apply(Scratch& scratch, int64_t count, float factor, const AdamScalars& scalars, bool decoupled) {
    return decoupled ? adam_formula<true>(scratch, count, factor, scalars)
                     : adam_formula<false>(scratch, count, factor, scalars);
}

Largest apply(Scratch& scratch, int64_t count, float factor, const LionScalars& scalars, bool decoupled) {
    return decoupled ? lion_formula<true>(scratch, count, factor, scalars)
                     : lion_formula<false>(scratch, count, factor, scalars);
}

template <typename Scalars>
void update_block(const Item& item, int64_t index, Scratch& scratch, float factor, const Scalars& scalars,
                  const Options& options, const Trees& trees) {
    const int64_t start = index * options.block;
    const int64_t count = std::min(options.block, item.num_elements - start);
    const bool has_second = item.second_codes != nullptr;
    load_floats(item.parameter, item.parameter_dtype, start, count, scratch.parameter);
    load_floats(item.gradient, item.gradient_dtype, start, count, scratch.gradient);
    decode_signed(item.first_codes + start, item.first_scales[index], count, options.map, trees, scratch.first);
    if (has_second) {
        decode_unsigned(item.second_codes + start, item.second_scales[index], count, options.map, trees, scratch.second);
    }
    const Largest largest = apply(scratch, count, factor, scalars, options.decoupled);

    const bool draws_weight = options.stochastic_weight && item.parameter_dtype == BFLOAT16;
    const bool draws_state = options.stochastic_state && has_second;
    if (draws_weight || draws_state) random_bits(item.key, item.offset + start, count, scratch.draws);
    store_floats(scratch.parameter, item.parameter, item.parameter_dtype, start, count,
                 draws_weight ? scratch.draws : nullptr);
    const float first_scale = scale_of(largest.first);
    item.first_scales[index] = first_scale;
    encode_signed(scratch.first, first_scale, count, options.map, trees, item.first_codes + start);
    if (!has_second) return;
    const float second_scale = scale_of(largest.second);
    item.second_scales[index] = second_scale;
    uint8_t* codes = item.second_codes + start;
    if (draws_state) {
        encode_unsigned<true>(scratch.second, scratch.roots, second_scale, count, options.map, trees, scratch.draws, codes);
    } else {
        encode_unsigned<false>(scratch.second, scratch.roots, second_scale, count, options.map, trees, nullptr, codes);
    }
}

int64_t num_blocks(int64_t num_elements, int64_t block) { return (num_elements + block - 1) / block; }

// The item that holds a block, counted over all items.
const Item* item_of(const Item* items, int64_t num_items, int64_t block) {
    const auto is_before = [](int64_t wanted, const Item& item) { return wanted < item.first_block; };
    return std::upper_bound(items, items + num_items, block, is_before) - 1;
}

template <typename Scalars>
void update(const Item* items, int64_t num_items, const Scalars& scalars, float factor, const Options& options,
            const float* packed_trees, int64_t num_threads) {
    if (num_items == 0) return;
    const Trees trees = trees_of(packed_trees);
    const Item& last = items[num_items - 1];
    const int64_t total = last.first_block + num_blocks(last.num_elements, options.block);
#pragma omp parallel for num_threads(static_cast<int>(num_threads)) schedule(static, 1)
    for (int64_t part = 0; part < num_threads; ++part) {
        Scratch scratch(options.block);
        const int64_t stop = total * (part + 1) / num_threads;
        for (int64_t block = total * part / num_threads; block < stop; ++block) {
            const Item* item = item_of(items, num_items, block);
            update_block(*item, block - item->first_block, scratch, factor, scalars, options, trees);
        }
    }
}

}  // namespace
}  // namespace graphopt

extern "C" {

void graphopt_block_adam(const graphopt::Item* items, int64_t num_items, const graphopt::AdamScalars* scalars, float factor,
                         const graphopt::Options* options, const float* trees, int64_t num_threads) {
    graphopt::update(items, num_items, *scalars, factor, *options, trees, num_threads);
}

void graphopt_block_lion(const graphopt::Item* items, int64_t num_items, const graphopt::LionScalars* scalars, float factor,
                         const graphopt::Options* options, const float* trees, int64_t num_threads) {
    graphopt::update(items, num_items, *scalars, factor, *options, trees, num_threads);
}

void graphopt_quantize_signed(const float* values, int64_t num_elements, int64_t block, int64_t map, const float* packed,
                              int8_t* codes, float* scales, int64_t num_threads) {
    const graphopt::Trees trees = graphopt::trees_of(packed);
    const int64_t total = graphopt::num_blocks(num_elements, block);
#pragma omp parallel for num_threads(static_cast<int>(num_threads)) schedule(static)
    for (int64_t index = 0; index < total; ++index) {
        const int64_t start = index * block, count = std::min(block, num_elements - start);
        scales[index] = graphopt::scale_of(graphopt::largest_magnitude(values + start, count));
        graphopt::encode_signed(values + start, scales[index], count, map, trees, codes + start);
    }
}

// is_drawn: 0 rounds to nearest, else stochastically by key and offset.
void graphopt_quantize_unsigned(const float* values, int64_t num_elements, int64_t block, int64_t map, const float* packed,
                                uint8_t* codes, float* scales, int64_t is_drawn, uint64_t key, uint64_t offset,
                                int64_t num_threads) {
    const graphopt::Trees trees = graphopt::trees_of(packed);
    const int64_t total = graphopt::num_blocks(num_elements, block);
#pragma omp parallel num_threads(static_cast<int>(num_threads))
    {
        std::unique_ptr<uint32_t[]> draws(new uint32_t[block]);
        std::unique_ptr<float[]> roots(new float[block]);
#pragma omp for schedule(static)
        for (int64_t index = 0; index < total; ++index) {
            const int64_t start = index * block, count = std::min(block, num_elements - start);
            const float* from = values + start;
            scales[index] = graphopt::scale_of(graphopt::largest_magnitude(from, count));
            graphopt::take_roots(from, count, roots.get());
            if (is_drawn) {
                graphopt::random_bits(key, offset + start, count, draws.get());
                graphopt::encode_unsigned<true>(from, roots.get(), scales[index], count, map, trees, draws.get(),
                                                codes + start);
            } else {
                graphopt::encode_unsigned<false>(from, roots.get(), scales[index], count, map, trees, nullptr,
                                                 codes + start);
            }
        }
    }
}

void graphopt_dequantize(const void* codes, int64_t is_signed, const float* scales, int64_t num_elements, int64_t block,
                         int64_t map, const float* packed, float* values, int64_t num_threads) {
    const graphopt::Trees trees = graphopt::trees_of(packed);
    const int64_t total = graphopt::num_blocks(num_elements, block);
#pragma omp parallel for num_threads(static_cast<int>(num_threads)) schedule(static)
    for (int64_t index = 0; index < total; ++index) {
        const int64_t start = index * block, count = std::min(block, num_elements - start);
        if (is_signed) {
            graphopt::decode_signed(static_cast<const int8_t*>(codes) + start, scales[index], count, map, trees,
                                    values + start);
        } else {
            graphopt::decode_unsigned(static_cast<const uint8_t*>(codes) + start, scales[index], count, map, trees,
                                      values + start);
        }
    }
}

void graphopt_round_stochastically(const float* values, int64_t num_elements, uint64_t key, uint64_t offset, uint16_t* rounded,
                                   int64_t num_threads) {
    constexpr int64_t PIECE = 1024;
    const int64_t total = graphopt::num_blocks(num_elements, PIECE);
#pragma omp parallel for num_threads(static_cast<int>(num_threads)) schedule(static)
    for (int64_t index = 0; index < total; ++index) {
        uint32_t draws[PIECE];
        const int64_t start = index * PIECE, count = std::min(PIECE, num_elements - start);
        graphopt::random_bits(key, offset + start, count, draws);
        graphopt::store_floats(values + start, rounded, graphopt::BFLOAT16, start, count, draws);
    }
}

}  // extern "C"
