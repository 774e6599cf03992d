// The Adam update for CPUs, in a fixed order of float32 operations (spec.py; numpy_adam.py is the reference),
// and the sums of squares of gradients, in float64.
//
// The loop is written once. The compiler vectorises it for each instruction set, and the best instruction set of
// the CPU is chosen at run time. No operation is fused or reordered (-ffp-contract=off, no -ffast-math), so all
// give the same bits. The interface is plain C without torch's headers: ctypes calls it and releases the GIL, and
// any C++17 compiler builds it in seconds.

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

// Inlined code is compiled again for each instruction set.
#define INLINE inline __attribute__((always_inline))

extern "C" {

// Structs have the same layout in cpp_adam.py.

struct Scalars {
    float grad_scale, beta1, rest1, beta2, rest2, step_size, root_bias2, eps, decay;
    int32_t is_decoupled;
};

// Determines the random numbers of elements with a bf16 moment: `RngCoords` of low_bit_moments.py.
struct RngCoords {
    int64_t first, row, stride, skip;
    uint32_t keys[2];
};

// Inputs and outputs may be the same memory (an in-place update). Index 0 is exp_avg, 1 is exp_avg_sq.
struct UpdateItem {
    const void *grad;
    const void *master_in;  // float, or the int16 low bits of a split master
    const void *moments_in[2];  // with the dtypes of `kinds`
    const uint16_t *param_in;  // bf16; read only if the master is split
    void *master_out;
    void *moments_out[2];
    uint16_t *param_out;  // bf16, or null
    const float *scales_in[2];  // of 8-bit moments
    float *scales_out[2];
    int32_t kinds[2];
    RngCoords draw;
    int64_t numel;
    int32_t has_bf16_grad, is_split;
    Scalars scalars;  // of the item's parameter group
};

struct SquaresItem {
    const void *values;  // float or bf16
    int64_t numel;
    int32_t are_bf16;
};

}  // extern "C"

namespace {

constexpr int64_t kTile = 1 << 16;  // elements that a thread updates at a time
constexpr int64_t kBlock = 256;     // elements that are updated at a time if results need conversion or separate memory
constexpr int64_t kScaled = 64;     // elements that share the scale of an 8-bit moment: MOMENT_BLOCK

enum Form { kMaster, kMasterAndParam, kSplit };
enum Kind { kNone = -1, kFloat, kBf16, kEightBits };  // of a moment: KINDS of low_bit_moments.py
enum Rule { kAdam, kAdamW, kMomentum, kPlain };  // the last two: SGD with and without a moment

inline float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t as_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float widen(float value) { return value; }
inline float widen(uint16_t bf16) { return as_float(static_cast<uint32_t>(bf16) << 16); }

// Rounds to nearest, ties away from zero; the low 16 bits as a signed number undo it. All NaNs become equal.
inline uint32_t bits_to_split(float master) { return master != master ? 0x7fc00000u : as_bits(master); }
inline uint16_t upper(uint32_t bits) { return static_cast<uint16_t>((bits + 0x8000u) >> 16); }
inline float join_split(uint16_t param, int16_t low) {
    return as_float((static_cast<uint32_t>(param) << 16) + static_cast<uint32_t>(low));
}

// Rounds to bf16, up or down by a 16-bit random number.
inline uint16_t round_stochastically(float value, uint32_t number) {
    return static_cast<uint16_t>((bits_to_split(value) + number) >> 16);
}

// Elements with consecutive indices in their whole parameter. Their random numbers are hashes of the indices.
struct Run {
    uint32_t low, first_key, second_key;
    int64_t length;

    // lowbias32, with a second key before the second product.
    INLINE uint32_t number(int64_t i) const {
        uint32_t x = (low + static_cast<uint32_t>(i)) ^ first_key;
        x = (x ^ (x >> 16)) * 0x7feb352du;
        x = ((x ^ (x >> 15)) + second_key) * 0x846ca68bu;
        return x ^ (x >> 16);
    }

    Run from(int64_t i) const { return {low + static_cast<uint32_t>(i), first_key, second_key, length - i}; }
};

// Returns the run at element `begin` of an item, with at most `longest` elements.
Run run_at(const RngCoords &draw, int64_t begin, int64_t longest) {
    const int64_t place = draw.skip + begin, column = place % draw.row;
    const uint64_t number = draw.first + place / draw.row * draw.stride + column;
    const auto low = static_cast<uint32_t>(number);
    const uint32_t high = static_cast<uint32_t>(number >> 32) * 0x9e3779b9u;
    return {low, draw.keys[0] ^ high, draw.keys[1] + high, std::min({longest, draw.row - column, (int64_t{1} << 32) - low})};
}

template <class Moment>
struct Moments {
    const Moment *exp_avg, *exp_avg_sq;
};

template <class Moment>
Moments<Moment> moments_from(const UpdateItem &item, int64_t begin) {
    return {
        static_cast<const Moment *>(item.moments_in[0]) + begin,
        static_cast<const Moment *>(item.moments_in[1]) + begin,
    };
}

template <class Moment>
struct Results {
    void *master;
    Moment *exp_avg, *exp_avg_sq;
    uint16_t *param;
};

template <Form form, class Moment>
Results<Moment> results_from(const UpdateItem &item, int64_t begin) {
    const int64_t master_bytes = form == kSplit ? sizeof(int16_t) : sizeof(float);
    return {
        static_cast<char *>(item.master_out) + begin * master_bytes,
        static_cast<Moment *>(item.moments_out[0]) + begin,
        static_cast<Moment *>(item.moments_out[1]) + begin,
        form == kMaster ? nullptr : item.param_out + begin,
    };
}

// Updates n elements from `begin` on; with bf16 moments they are of one run. Scalars are folded (spec.py) if moments
// have fewer bytes: root_bias2 is 1, and the division by it is left out.
template <class Grad, Form form, Rule rule, class Moment, bool is_folded>
INLINE void update_range(
    const UpdateItem &item, int64_t begin, int64_t n, const Moments<Moment> &moments,
    const Results<Moment> &results, const Run &run) {
    constexpr bool is_bf16 = std::is_same_v<Moment, uint16_t>;
    const Scalars c = item.scalars;
    const auto *grad = static_cast<const Grad *>(item.grad) + begin;
    const auto *master_in = static_cast<const float *>(item.master_in) + begin;
    const auto *low_in = static_cast<const int16_t *>(item.master_in) + begin;
    const uint16_t *param_in = form == kSplit ? item.param_in + begin : nullptr;
    const Moment *exp_avg_in = moments.exp_avg, *exp_avg_sq_in = moments.exp_avg_sq;
    auto *master_out = static_cast<float *>(results.master);
    auto *low_out = static_cast<int16_t *>(results.master);
    uint16_t *param_out = results.param;
    Moment *exp_avg_out = results.exp_avg, *exp_avg_sq_out = results.exp_avg_sq;

    INDEPENDENT
    for (int64_t i = 0; i < n; ++i) {
        float p = form == kSplit ? join_split(param_in[i], low_in[i]) : master_in[i];
        float g = widen(grad[i]) * c.grad_scale;
        if (rule == kAdamW)
            p = p * c.decay;
        else
            g = g + c.decay * p;
        if constexpr (rule == kPlain) {
            p = p - c.step_size * g;
        } else if constexpr (rule == kMomentum) {
            const float m = exp_avg_in[i] * c.beta1 + g;
            p = p - c.step_size * m;
            exp_avg_out[i] = m;
        } else {
            const float m = widen(exp_avg_in[i]) * c.beta1 + g * c.rest1;
            const float v = widen(exp_avg_sq_in[i]) * c.beta2 + (g * c.rest2) * g;
            const float root = is_folded ? std::sqrt(v) : std::sqrt(v) / c.root_bias2;
            p = p - c.step_size * (m / (root + c.eps));
            if constexpr (is_bf16) {
                const uint32_t number = run.number(i);
                exp_avg_out[i] = round_stochastically(m, number & 0xffffu);
                exp_avg_sq_out[i] = round_stochastically(v, number >> 16);
            } else {
                exp_avg_out[i] = m;
                exp_avg_sq_out[i] = v;
            }
        }
        const uint32_t bits = bits_to_split(p);
        if (form == kSplit)
            low_out[i] = static_cast<int16_t>(bits);
        else
            master_out[i] = p;
        if (form != kMaster) param_out[i] = upper(bits);
    }
}

// Stores past the caches, which would first read every overwritten line.
inline void stream(void *to, const void *from, int64_t bytes) {
#if defined(__x86_64__)
    if (reinterpret_cast<uintptr_t>(to) % sizeof(__m128i) == 0 && bytes % sizeof(__m128i) == 0) {
        auto *target = static_cast<__m128i *>(to);
        const auto *source = static_cast<const __m128i *>(from);
        for (int64_t i = 0; i < bytes / int64_t{sizeof(__m128i)}; ++i)
            _mm_stream_si128(target + i, _mm_load_si128(source + i));
        return;
    }
#endif
    std::memcpy(to, from, bytes);
}

// Streamed stores must be visible before other threads learn that the tile is done.
inline void order_stores() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// Updates elements block by block, with results in other memory than the states.
template <class Grad, Form form, Rule rule, class Moment>
INLINE void update_beside(const UpdateItem &item, int64_t begin, int64_t end, const Run &run) {
    alignas(64) float master[kBlock];
    alignas(64) Moment exp_avg[kBlock], exp_avg_sq[kBlock];
    alignas(64) uint16_t param[kBlock];
    for (int64_t at = begin; at < end; at += kBlock) {
        const int64_t n = std::min(kBlock, end - at);
        update_range<Grad, form, rule, Moment, std::is_same_v<Moment, uint16_t>>(
            item, at, n, moments_from<Moment>(item, at), {master, exp_avg, exp_avg_sq, param}, run.from(at - begin));
        const auto results = results_from<form, Moment>(item, at);
        stream(results.master, master, n * (form == kSplit ? sizeof(int16_t) : sizeof(float)));
        if (rule != kPlain) stream(results.exp_avg, exp_avg, n * sizeof(Moment));
        if (rule < kMomentum) stream(results.exp_avg_sq, exp_avg_sq, n * sizeof(Moment));
        if (form != kMaster) stream(results.param, param, n * sizeof(uint16_t));
    }
    order_stores();
}

// Codes and buckets of 8-bit moments, from low_bit_moments.py.
struct Tables {
    const float *codes[2];
    const uint32_t *buckets[2];
};

Tables tables;

#if defined(__x86_64__)
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,prefer-vector-width=512")))

// Like `decode` of 8-bit moments and `encode_block`: compilers do not use the instructions that look up 16 numbers.
AVX512 void decode_avx512(const uint8_t *indices, const float *codes, const float *scales, int64_t n, float *to) {
    for (int64_t i = 0; i < n; i += 16) {
        const __m512i index = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(indices + i)));
        const __m512 code = _mm512_i32gather_ps(index, codes, sizeof(float));
        _mm512_store_ps(to + i, _mm512_mul_ps(code, _mm512_set1_ps(scales[i / kScaled])));
    }
}

template <int which>
AVX512 void encode_avx512(const float *from, int64_t n, uint8_t *to, float *scales) {
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff), unit = _mm512_set1_epi32(1);
    for (int64_t block = 0; block < n; block += kScaled, from += kScaled, to += kScaled) {
        __m512i sizes[4];
        for (int k = 0; k < 4; ++k)
            sizes[k] = _mm512_and_epi32(_mm512_castps_si512(_mm512_load_ps(from + 16 * k)), magnitude);
        const int32_t largest = _mm512_reduce_max_epi32(
            _mm512_max_epi32(_mm512_max_epi32(sizes[0], sizes[1]), _mm512_max_epi32(sizes[2], sizes[3])));
        const bool is_normal = largest >= 0x800000;
        const float scale = is_normal ? as_float(largest) : 0.0f;
        scales[block / kScaled] = scale;
        const __m512 inverse = _mm512_set1_ps(is_normal ? 1.0f / scale : 0.0f);
        for (int k = 0; k < 4; ++k) {
            const __m512i bits = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(from + 16 * k), inverse));
            const __m512i bucket = _mm512_srli_epi32(bits, 16);
            const __m512i entry = _mm512_i32gather_epi32(bucket, tables.buckets[which], sizeof(uint32_t));
            const __m512i ordered = which == 0 ? _mm512_xor_epi32(bits, _mm512_srai_epi32(bits, 31)) : bits;
            const __mmask16 is_above = _mm512_cmpgt_epu32_mask(_mm512_slli_epi32(ordered, 16), entry);
            const __m512i index = _mm512_mask_add_epi32(entry, is_above, entry, unit);
            _mm_storeu_si128(reinterpret_cast<__m128i *>(to + 16 * k), _mm512_cvtepi32_epi8(index));
        }
    }
}
#endif

template <int which, bool has_avx512>
INLINE void decode(const UpdateItem &item, int64_t begin, int64_t n, float *to) {
    if (item.kinds[which] == kBf16) {
        const auto *bits = static_cast<const uint16_t *>(item.moments_in[which]) + begin;
        INDEPENDENT
        for (int64_t i = 0; i < n; ++i) to[i] = widen(bits[i]);
        return;
    }
    const auto *indices = static_cast<const uint8_t *>(item.moments_in[which]) + begin;
    const float *codes = tables.codes[which], *scales = item.scales_in[which] + begin / kScaled;
#if defined(__x86_64__)
    if (has_avx512) return decode_avx512(indices, codes, scales, n, to);
#endif
    for (int64_t block = 0; block < n; block += kScaled) {
        const float scale = scales[block / kScaled];
        INDEPENDENT
        for (int64_t i = block; i < block + kScaled; ++i) to[i] = codes[indices[i]] * scale;
    }
}

// Encodes a block of 8-bit numbers, of exp_avg or exp_avg_sq; returns its scale.
template <int which>
INLINE float encode_block(const float *from, uint8_t *to) {
    int32_t largest = 0;
    for (int64_t i = 0; i < kScaled; ++i)
        largest = std::max(largest, static_cast<int32_t>(as_bits(from[i]) & 0x7fffffffu));
    float scale = as_float(largest), inverse = 1.0f / scale;
    if (largest < 0x800000) scale = inverse = 0;
    const uint32_t *buckets = tables.buckets[which];
    INDEPENDENT
    for (int64_t i = 0; i < kScaled; ++i) {
        const uint32_t bits = as_bits(from[i] * inverse), entry = buckets[bits >> 16];
        const uint32_t ordered = which == 0 && bits >> 31 ? ~bits : bits;
        to[i] = static_cast<uint8_t>(entry + (ordered << 16 > entry));
    }
    return scale;
}

template <int which, bool has_avx512>
INLINE void encode(const float *from, const UpdateItem &item, int64_t begin, int64_t n) {
    if (item.kinds[which] == kBf16) {
        auto *to = static_cast<uint16_t *>(item.moments_out[which]) + begin;
        for (int64_t done = 0; done < n;) {
            const Run run = run_at(item.draw, begin + done, n - done);
            INDEPENDENT
            for (int64_t i = 0; i < run.length; ++i) {
                const uint32_t number = run.number(i);
                to[done + i] = round_stochastically(from[done + i], which == 0 ? number & 0xffffu : number >> 16);
            }
            done += run.length;
        }
        return;
    }
    auto *to = static_cast<uint8_t *>(item.moments_out[which]) + begin;
#if defined(__x86_64__)
    if (has_avx512) return encode_avx512<which>(from, n, to, item.scales_out[which] + begin / kScaled);
#endif
    for (int64_t block = 0; block < n; block += kScaled)
        item.scales_out[which][(begin + block) / kScaled] = encode_block<which>(from + block, to + block);
}

// Updates elements block by block: moments have two dtypes, or 8 bits.
template <class Grad, Form form, Rule rule, bool has_avx512>
INLINE void update_blocks(const UpdateItem &item, int64_t begin, int64_t end, bool is_beside) {
    alignas(64) float master[kBlock], exp_avg[kBlock], exp_avg_sq[kBlock];
    alignas(64) uint16_t param[kBlock];
    const bool has_float[] = {item.kinds[0] == kFloat, item.kinds[1] == kFloat};
    for (; begin < end; begin += kBlock) {
        const int64_t n = std::min(kBlock, end - begin);
        auto moments = moments_from<float>(item, begin);
        auto results = results_from<form, float>(item, begin);
        const auto there = results;
        if (is_beside) results = {master, exp_avg, exp_avg_sq, param};
        if (!has_float[0]) {
            decode<0, has_avx512>(item, begin, n, exp_avg);
            moments.exp_avg = results.exp_avg = exp_avg;
        }
        if (!has_float[1]) {
            decode<1, has_avx512>(item, begin, n, exp_avg_sq);
            moments.exp_avg_sq = results.exp_avg_sq = exp_avg_sq;
        }
        update_range<Grad, form, rule, float, true>(item, begin, n, moments, results, {});
        if (!has_float[0]) encode<0, has_avx512>(exp_avg, item, begin, n);
        if (!has_float[1]) encode<1, has_avx512>(exp_avg_sq, item, begin, n);
        if (!is_beside) continue;
        stream(there.master, master, n * (form == kSplit ? sizeof(int16_t) : sizeof(float)));
        if (has_float[0]) stream(there.exp_avg, exp_avg, n * sizeof(float));
        if (has_float[1]) stream(there.exp_avg_sq, exp_avg_sq, n * sizeof(float));
        if (form != kMaster) stream(there.param, param, n * sizeof(uint16_t));
    }
    order_stores();
}

// Updates elements of one run whose moments have one dtype, float or bf16.
template <class Grad, Form form, Rule rule, class Moment>
INLINE void update_run(const UpdateItem &item, int64_t begin, int64_t end, bool is_beside, const Run &run) {
    if (is_beside) return update_beside<Grad, form, rule, Moment>(item, begin, end, run);
    update_range<Grad, form, rule, Moment, std::is_same_v<Moment, uint16_t>>(
        item, begin, end - begin, moments_from<Moment>(item, begin), results_from<form, Moment>(item, begin), run);
}

template <class Grad, Form form, Rule rule, bool has_avx512>
INLINE void update_tile(const UpdateItem &item, int64_t begin, int64_t end) {
    const bool is_beside = item.moments_out[0] != item.moments_in[0];
    if constexpr (rule >= kMomentum) return update_run<Grad, form, rule, float>(item, begin, end, is_beside, {});
    if (item.kinds[0] != item.kinds[1] || item.kinds[0] == kEightBits)
        return update_blocks<Grad, form, rule, has_avx512>(item, begin, end, is_beside);
    if (item.kinds[0] == kFloat)
        return update_run<Grad, form, rule, float>(item, begin, end, is_beside, {});
    while (begin < end) {
        const Run run = run_at(item.draw, begin, end - begin);
        update_run<Grad, form, rule, uint16_t>(item, begin, begin + run.length, is_beside, run);
        begin += run.length;
    }
}

using Update = void (*)(const UpdateItem &, int64_t, int64_t);

template <class Grad, Form form, Rule rule>
void update_default(const UpdateItem &item, int64_t begin, int64_t end) {
    update_tile<Grad, form, rule, false>(item, begin, end);
}

#if defined(__x86_64__)
template <class Grad, Form form, Rule rule>
__attribute__((target("avx2"))) void update_avx2(
    const UpdateItem &item, int64_t begin, int64_t end) {
    update_tile<Grad, form, rule, false>(item, begin, end);
}

template <class Grad, Form form, Rule rule>
__attribute__((target("avx512f,avx512bw,avx512vl,prefer-vector-width=512"))) void update_avx512(
    const UpdateItem &item, int64_t begin, int64_t end) {
    update_tile<Grad, form, rule, true>(item, begin, end);
}
#endif

// Returns the index of an instruction set in INSTRUCTION_SETS of cpp_adam.py: default, avx2, avx512.
int best_instruction_set() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        return 2;
    if (__builtin_cpu_supports("avx2")) return 1;
#endif
    return 0;
}

template <class Grad, Form form, Rule rule>
Update choose(int instruction_set) {
#if defined(__x86_64__)
    if (instruction_set == 2) return update_avx512<Grad, form, rule>;
    if (instruction_set == 1) return update_avx2<Grad, form, rule>;
#endif
    (void)instruction_set;
    return update_default<Grad, form, rule>;
}

template <class Grad, Rule rule>
Update choose(const UpdateItem &item, int instruction_set) {
    if (item.is_split) return choose<Grad, kSplit, rule>(instruction_set);
    if (item.param_out) return choose<Grad, kMasterAndParam, rule>(instruction_set);
    return choose<Grad, kMaster, rule>(instruction_set);
}

template <class Grad>
Update choose_rule(const UpdateItem &item, int instruction_set) {
    if (item.kinds[0] == kNone) return choose<Grad, kPlain>(item, instruction_set);
    if (item.kinds[1] == kNone) return choose<Grad, kMomentum>(item, instruction_set);
    return item.scalars.is_decoupled ? choose<Grad, kAdamW>(item, instruction_set)
                                     : choose<Grad, kAdam>(item, instruction_set);
}

Update choose(const UpdateItem &item, int instruction_set) {
    return item.has_bf16_grad ? choose_rule<uint16_t>(item, instruction_set)
                              : choose_rule<float>(item, instruction_set);
}

// Sums in float64, where the square of a float is exact. kLanes and kTile fix the order of the sums, so it is the
// same for each instruction set and number of threads.
template <class Value>
INLINE double sum_squares(const Value *values, int64_t n) {
    constexpr int kLanes = 32;
    double sums[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (int lane = 0; lane < kLanes; ++lane) {
            const double value = widen(values[i + lane]);
            sums[lane] += value * value;
        }
    for (int lane = 0; i < n; ++i, ++lane) {
        const double value = widen(values[i]);
        sums[lane] += value * value;
    }
    double total = 0;
    for (const double sum : sums) total += sum;
    return total;
}

INLINE double sum_squares(const SquaresItem &item, int64_t begin, int64_t end) {
    if (item.are_bf16) return sum_squares(static_cast<const uint16_t *>(item.values) + begin, end - begin);
    return sum_squares(static_cast<const float *>(item.values) + begin, end - begin);
}

using SumSquares = double (*)(const SquaresItem &, int64_t, int64_t);

double sum_squares_default(const SquaresItem &item, int64_t begin, int64_t end) {
    return sum_squares(item, begin, end);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) double sum_squares_avx2(
    const SquaresItem &item, int64_t begin, int64_t end) {
    return sum_squares(item, begin, end);
}

__attribute__((target("avx512f,avx512bw,avx512vl,prefer-vector-width=512"))) double sum_squares_avx512(
    const SquaresItem &item, int64_t begin, int64_t end) {
    return sum_squares(item, begin, end);
}
#endif

SumSquares choose_squares(int instruction_set) {
#if defined(__x86_64__)
    if (instruction_set == 2) return sum_squares_avx512;
    if (instruction_set == 1) return sum_squares_avx2;
#endif
    (void)instruction_set;
    return sum_squares_default;
}

// Keeps denormal numbers: the caller's thread may flush them to zero, and new threads inherit this setting.
class Ieee {
#if defined(__x86_64__)
    const unsigned saved_ = _mm_getcsr();

   public:
    Ieee() { _mm_setcsr(0x1f80); }
    ~Ieee() { _mm_setcsr(saved_); }
#endif
};

// All items of one call as one sequence of tiles; each thread takes the next tile until no tile is left.
class Batch {
   public:
    // Processes elements [begin, end) of an item; arguments: item index, tile index, begin, end.
    using Work = std::function<void(int64_t, int64_t, int64_t, int64_t)>;

    template <class Item>
    Batch(const Item *items, int64_t num_items, Work work) : work_(std::move(work)) {
        ends_.reserve(num_items);
        numels_.reserve(num_items);
        int64_t tiles = 0;
        for (int64_t i = 0; i < num_items; ++i) {
            numels_.push_back(items[i].numel);
            ends_.push_back(tiles += (items[i].numel + kTile - 1) / kTile);
        }
    }

    int64_t num_tiles() const { return ends_.empty() ? 0 : ends_.back(); }
    int64_t first_tile(int64_t item) const { return item ? ends_[item - 1] : 0; }

    void work() {
        const Ieee ieee;
        for (int64_t tile; (tile = next_.fetch_add(1, std::memory_order_relaxed)) < num_tiles();) {
            const auto item = std::upper_bound(ends_.begin(), ends_.end(), tile) - ends_.begin();
            const int64_t begin = (tile - first_tile(item)) * kTile;
            work_(item, tile, begin, std::min(begin + kTile, numels_[item]));
        }
    }

   private:
    const Work work_;
    std::vector<int64_t> numels_, ends_;  // ends: number of tiles up to the end of each item
    std::atomic<int64_t> next_{0};
};

// Threads that sleep between batches. The caller works too, and does not wait for helpers that wake too late.
class Pool {
   public:
    void run(Batch &batch, int num_threads) {
        const std::lock_guard<std::mutex> one_at_a_time(calls_);
        const int helpers = grow(static_cast<int>(std::min<int64_t>(num_threads, batch.num_tiles())) - 1);
        if (helpers <= 0) return batch.work();
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            batch_ = &batch;
            open_places_ = helpers;
        }
        wake_.notify_all();
        batch.work();
        std::unique_lock<std::mutex> lock(mutex_);
        open_places_ = 0;
        done_.wait(lock, [this] { return running_ == 0; });
    }

   private:
    // Starts up to `wanted` helpers and returns how many exist: fewer if the system refuses threads.
    int grow(int wanted) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // helpers block signals: Python's threads handle them
        try {
            for (; num_helpers_ < wanted; ++num_helpers_) std::thread([this] { serve(); }).detach();
        } catch (const std::system_error &) {
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return std::min(wanted, num_helpers_);
    }

    void serve() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return open_places_ > 0; });
            --open_places_;
            ++running_;
            Batch *batch = batch_;
            lock.unlock();
            batch->work();
            lock.lock();
            if (--running_ == 0) done_.notify_one();
        }
    }

    std::mutex calls_, mutex_;
    std::condition_variable wake_, done_;
    Batch *batch_ = nullptr;
    int num_helpers_ = 0, open_places_ = 0, running_ = 0;
};

// Never deleted: helpers sleep in it until the process ends. A forked child has no helpers and gets a new pool.
Pool *pool = nullptr;

void renew_pool() { pool = new Pool; }

__attribute__((constructor)) void prepare() {
    renew_pool();
    pthread_atfork(nullptr, nullptr, renew_pool);
}

}  // namespace

extern "C" {

int32_t adam_best_instruction_set() { return best_instruction_set(); }

void adam_set_tables(const Tables *these) { tables = *these; }

void adam_update(
    const UpdateItem *items, int64_t num_items, int32_t num_threads, int32_t set) {
    Batch batch(items, num_items, [=](int64_t item, int64_t, int64_t begin, int64_t end) {
        choose(items[item], set)(items[item], begin, end);
    });
    pool->run(batch, num_threads);
}

// sums: one for each item.
void sums_of_squares(
    const SquaresItem *items, int64_t num_items, double *sums, int32_t num_threads, int32_t set) {
    std::vector<double> by_tile;
    Batch batch(items, num_items, [&](int64_t item, int64_t tile, int64_t begin, int64_t end) {
        by_tile[tile] = choose_squares(set)(items[item], begin, end);
    });
    by_tile.resize(batch.num_tiles());
    pool->run(batch, num_threads);
    for (int64_t item = 0, tile = 0; item < num_items; ++item) {
        sums[item] = 0;
        for (; tile < batch.first_tile(item + 1); ++tile) sums[item] += by_tile[tile];
    }
}

}  // extern "C"
