// Products of a few rows: weights stream by once, and every row takes each number as it passes.
//
// Plain vector code: 16 floats are one register with AVX-512, and several on other machines.
#pragma once

#include <type_traits>

#include "product_forms.h"
#include "scratch.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed to inlined functions only

namespace mlxtape::products {

using Floats = float __attribute__((vector_size(64)));
using Words = int32_t __attribute__((vector_size(64)));
using Shorts = uint16_t __attribute__((vector_size(32)));

inline constexpr size_t kAhead = 4096;  // bytes of weights to ask memory for in advance

template <class Vector>
inline Vector load(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

inline Floats spread(float number) { return number - Floats{}; }

inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

inline void prefetch(const uint8_t* from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at);
}

// A form's numbers: those of a panel at one of eight places of the width, which lie in kBytes.
struct FloatNumbers {
  static constexpr long kBytes = 512;
  static Floats at(const uint8_t* eight, int place) { return load<Floats>(eight + place * 64); }
};

struct BfloatNumbers {
  static constexpr long kBytes = 256;
  static Floats at(const uint8_t* eight, int place) {
    const Words pair = load<Words>(eight + place / 2 * 64);
    return reinterpret_cast<Floats>(place % 2 ? pair & ~0xffff : pair << 16);
  }
};

struct ByteNumbers {
  static constexpr long kBytes = 128;
  static constexpr float kCentre = 128;  // what the numbers were before they were made signed
  static Floats at(const uint8_t* eight, int place) {
    const Words four = load<Words>(eight + place / 4 * 64);
    return __builtin_convertvector(four << (24 - place % 4 * 8) >> 24, Floats);
  }
};

struct NibbleNumbers {
  static constexpr long kBytes = 64;
  static constexpr float kCentre = 8;
  static Floats at(const uint8_t* eight, int place) {
    const int bit = place % 2 * 16 + place / 2 * 4;
    const Words word = load<Words>(eight);
#if defined(__AVX512F__)
    // A permutation looks at the lowest four bits only, and converts them at once.
    const Floats table = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
    return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(word >> bit), table);
#else
    return __builtin_convertvector(word << (28 - bit) >> 28, Floats);
#endif
  }
};

struct ScaleAndBias {
  Floats scale, bias;
};

// A cell's scales and biases, for signed numbers: their centre is moved into the bias, which also
// keeps the two parts of a sum from cancelling each other out.
template <class Numbers>
inline ScaleAndBias scales_of(Scales kind, const uint8_t* cell) {
  ScaleAndBias out;
  if (kind == Scales::kFloat) {
    out = {load<Floats>(cell), load<Floats>(cell + 64)};
  } else {
    const Shorts scale = load<Shorts>(cell), bias = load<Shorts>(cell + 32);
#if defined(__AVX512F__)
    if (kind == Scales::kHalf)
      out = {_mm512_cvtph_ps(reinterpret_cast<__m256i>(scale)),
             _mm512_cvtph_ps(reinterpret_cast<__m256i>(bias))};
    else
#endif
      out = {reinterpret_cast<Floats>(__builtin_convertvector(scale, Words) << 16),
             reinterpret_cast<Floats>(__builtin_convertvector(bias, Words) << 16)};
  }
  out.bias = multiply_add(out.scale, spread(Numbers::kCentre), out.bias);
  return out;
}

// The sum of some numbers of a row of x: a group's bias is multiplied by it.
inline float sum_of(const float* x, long count) {
  Floats sums = {};
  for (long i = 0; i < count; i += kLanes) sums += load<Floats>(x + i);
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(sums);
#else
  float total = 0;
  for (long i = 0; i < kLanes; i++) total += sums[i];
  return total;
#endif
}

struct VectorCall {
  Layout layout;
  Scales scales;
  const uint8_t* blob;
  const float* x;
  const float* sums;  // [rows, groups] for affine forms
  float* out;
  long features;
};

// The products of one cell's numbers with kRows rows.
template <class Numbers, int kRows>
inline void multiply_cell(const uint8_t* numbers, long group, const float* x, long width,
                          Floats (&out)[kRows]) {
  // Enough independent sums to hide how long an addition takes.
  constexpr int kChains = kRows == 1 ? 4 : kRows <= 3 ? 2 : 1;
  Floats sums[kRows][kChains] = {};
  for (long k = 0; k < group; k += 8, numbers += Numbers::kBytes) {
#pragma GCC unroll 8
    for (int place = 0; place < 8; place++) {
      const Floats weights = Numbers::at(numbers, place);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; row++) {
        Floats& sum = sums[row][place % kChains];
        sum = multiply_add(weights, spread(x[row * width + k + place]), sum);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < kRows; row++) {
    if constexpr (kChains == 4)
      out[row] = (sums[row][0] + sums[row][1]) + (sums[row][2] + sums[row][3]);
    else
      out[row] = kChains == 2 ? sums[row][0] + sums[row][kChains - 1] : sums[row][0];
  }
}

template <class Numbers>
inline constexpr bool kIsAffine =
    std::is_same_v<Numbers, NibbleNumbers> || std::is_same_v<Numbers, ByteNumbers>;

// Panels [first, first + count) of one block, for kRows rows.
template <class Numbers, int kRows>
void multiply_panels(const VectorCall& call, long block, long first, long count, long row0) {
  const Layout& layout = call.layout;
  const long panels = layout.block_panels(block);
  const uint8_t* cells = call.blob + layout.block_offset(block) + first * layout.cell_bytes;
  const float* x = call.x + row0 * layout.width;
  const float* sums = call.sums + row0 * layout.groups;
  Floats totals[kPanels][kRows] = {};
  for (long group = 0; group < layout.groups; group++, cells += panels * layout.cell_bytes) {
    for (long panel = 0; panel < count; panel++) {
      const uint8_t* cell = cells + panel * layout.cell_bytes;
      prefetch(cell + kAhead, layout.cell_bytes);
      Floats part[kRows];
      multiply_cell<Numbers, kRows>(cell + layout.scale_bytes, layout.group,
                                    x + group * layout.group, layout.width, part);
      if constexpr (kIsAffine<Numbers>) {
        const ScaleAndBias of = scales_of<Numbers>(call.scales, cell);
        for (int row = 0; row < kRows; row++) {
          const Floats sum = spread(sums[row * layout.groups + group]);
          totals[panel][row] += multiply_add(of.scale, part[row], of.bias * sum);
        }
      } else {
        for (int row = 0; row < kRows; row++) totals[panel][row] += part[row];
      }
    }
  }
  float* out = call.out + row0 * call.features + (block * kPanels + first) * kLanes;
  for (int row = 0; row < kRows; row++)
    for (long panel = 0; panel < count; panel++)
      std::memcpy(out + row * call.features + panel * kLanes, &totals[panel][row], 64);
}

// All rows, eight at a time: from the second time on the block's weights come from a cache.
template <class Numbers>
void multiply_rows(const VectorCall& call, long block, long first, long count, long rows) {
  for (long row = 0; row < rows; row += 8) {
    switch (std::min(8L, rows - row)) {
      case 1: multiply_panels<Numbers, 1>(call, block, first, count, row); break;
      case 2: multiply_panels<Numbers, 2>(call, block, first, count, row); break;
      case 3: multiply_panels<Numbers, 3>(call, block, first, count, row); break;
      case 4: multiply_panels<Numbers, 4>(call, block, first, count, row); break;
      case 5: multiply_panels<Numbers, 5>(call, block, first, count, row); break;
      case 6: multiply_panels<Numbers, 6>(call, block, first, count, row); break;
      case 7: multiply_panels<Numbers, 7>(call, block, first, count, row); break;
      default: multiply_panels<Numbers, 8>(call, block, first, count, row);
    }
  }
}

// work(block, first panel, panels) over all blocks. Few blocks are halved, so that threads end
// at about the same time.
template <class Work>
void over_blocks(const Layout& layout, Work&& work) {
  const long pieces = layout.blocks < 16 * Pool::shared().threads() ? 2 : 1;
  const long most = kPanels / pieces;
  parallel(layout.blocks * pieces, [&](long index) {
    const long block = index / pieces, first = index % pieces * most;
    const long count = std::min(most, layout.block_panels(block) - first);
    if (count > 0) work(block, first, count);
  });
}

inline void product_by_vectors(const Form& form, const uint8_t* blob, const float* x, long rows,
                               float* out) {
  const Scales scales = scales_in(blob);
  const Layout layout = layout_of(form, scales);
  float* sums = nullptr;
  if (form.kind == kAffine) {
    static thread_local Scratch scratch;
    sums = scratch.of<float>(rows * layout.groups);
    for (long i = 0; i < rows * layout.groups; i++)
      sums[i] = sum_of(x + i * layout.group, layout.group);
  }
  const VectorCall call{layout, scales, blob, x, sums, out, form.features};
  over_blocks(layout, [&](long block, long first, long count) {
    if (form.kind == kFloat) multiply_rows<FloatNumbers>(call, block, first, count, rows);
    else if (form.kind == kBfloat) multiply_rows<BfloatNumbers>(call, block, first, count, rows);
    else if (form.bits == 8) multiply_rows<ByteNumbers>(call, block, first, count, rows);
    else multiply_rows<NibbleNumbers>(call, block, first, count, rows);
  });
}

}  // namespace mlxtape::products

#pragma GCC diagnostic pop
