// The forms of weights that are multiplied on the CPU, and how they lie in memory for it.
//
// A decode step is as fast as its weights are read, so they are read as narrow as they are:
// quantised numbers with their scales and biases, or bfloat16. Nothing is rounded on the way.
//
// Features are taken in panels of 16, one to a lane. A cell is one panel's numbers of one group
// of the width, with the group's scales and biases before them. Four panels make a block, whose
// cells lie group by group: one stream to read, whether panels are taken one by one or together.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AMX_BF16__)
#include <immintrin.h>
#endif

#include "threads.h"

namespace mlxtape {

enum FormKind { kFloat = 0, kBfloat = 1, kAffine = 2 };

struct Form {
  int kind;
  int bits;
  int group;
  long features;
  long width;
};

namespace products {

inline constexpr long kLanes = 16;  // features of a panel
inline constexpr long kPanels = 4;  // panels of a block
inline constexpr long kStep = 32;   // numbers of the width that one tile operation takes
inline constexpr size_t kHeader = 64;

// Scales are float32 to a caller. Most files have narrower ones, which are read as such.
enum class Scales : uint32_t { kNone, kFloat, kHalf, kBfloat };

struct Layout {
  long width = 0;
  long group = 0;   // numbers of the width in a cell
  long groups = 0;  // cells of a panel
  long panels = 0;
  long blocks = 0;
  size_t scale_bytes = 0;  // what a cell's scales and biases take
  size_t cell_bytes = 0;

  // The last block may have fewer panels than the others.
  long block_panels(long block) const { return std::min(kPanels, panels - block * kPanels); }
  size_t block_offset(long block) const { return kHeader + block * kPanels * groups * cell_bytes; }
  size_t bytes() const { return kHeader + panels * groups * cell_bytes; }
};

inline int number_bits(const Form& form) {
  return form.kind == kFloat ? 32 : form.kind == kBfloat ? 16 : form.bits;
}

inline Layout layout_of(const Form& form, Scales scales) {
  Layout layout;
  layout.width = form.width;
  layout.group = form.kind == kAffine ? form.group : kStep;
  layout.groups = form.width / layout.group;
  layout.panels = form.features / kLanes;
  layout.blocks = (layout.panels + kPanels - 1) / kPanels;
  if (form.kind == kAffine) layout.scale_bytes = 2 * kLanes * (scales == Scales::kFloat ? 4 : 2);
  layout.cell_bytes = layout.scale_bytes + kLanes * layout.group * number_bits(form) / 8;
  return layout;
}

inline Scales scales_in(const uint8_t* blob) {
  Scales scales;
  std::memcpy(&scales, blob, sizeof scales);
  return scales;
}

inline bool are_bfloats(const float* numbers, long count) {
  uint32_t low = 0;
  for (long i = 0; i < count; i++) {
    uint32_t bits;
    std::memcpy(&bits, numbers + i, sizeof bits);
    low |= bits & 0xffff;
  }
  return low == 0;
}

inline bool are_halves(const float* numbers, long count) {
#if defined(__AVX512F__)
  __mmask16 same = 0xffff;
  for (long i = 0; i < count; i += kLanes) {
    const __mmask16 some = count - i < kLanes ? (1u << (count - i)) - 1 : 0xffff;
    const __m512 wide = _mm512_maskz_loadu_ps(some, numbers + i);
    const __m512 back = _mm512_cvtph_ps(_mm512_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT));
    same &= _mm512_cmpeq_epi32_mask(_mm512_castps_si512(wide), _mm512_castps_si512(back));
  }
  return same == 0xffff;
#else
  (void)numbers, (void)count;
  return false;  // read back by an AVX-512 instruction only
#endif
}

// The narrowest numbers that hold all scales and biases exactly.
inline Scales narrowest(const Form& form, const float* scales, const float* biases) {
  if (form.kind != kAffine) return Scales::kNone;
  const long groups = form.width / form.group;
  std::atomic<bool> halves{true}, bfloats{true};
  parallel(form.features, [&](long feature) {
    for (const float* row : {scales + feature * groups, biases + feature * groups}) {
      if (halves && !are_halves(row, groups)) halves = false;
      if (bfloats && !are_bfloats(row, groups)) bfloats = false;
    }
  });
  return bfloats ? Scales::kBfloat : halves ? Scales::kHalf : Scales::kFloat;
}

inline void put_scale(Scales scales, float number, long index, uint8_t* cell) {
  if (scales == Scales::kFloat) {
    std::memcpy(cell + index * 4, &number, 4);
    return;
  }
  uint32_t bits;
  std::memcpy(&bits, &number, 4);
  uint16_t narrow = static_cast<uint16_t>(bits >> 16);
#if defined(__AVX512F__)
  if (scales == Scales::kHalf) {
    const __m128i half = _mm_cvtps_ph(_mm_set_ss(number), _MM_FROUND_TO_NEAREST_INT);
    narrow = static_cast<uint16_t>(_mm_cvtsi128_si32(half));
  }
#endif
  std::memcpy(cell + index * 2, &narrow, 2);
}

// Eight 4-bit numbers, made signed. A half of the word has those of even places, the other those
// of odd ones: a shift then brings both numbers of a pair to the bottom of their 16 bits.
inline uint32_t paired_nibbles(uint32_t word) {
  uint32_t out = 0;
  for (int pair = 0; pair < 4; pair++) {
    out |= ((word >> (8 * pair)) & 15) << (4 * pair);
    out |= ((word >> (8 * pair + 4)) & 15) << (4 * pair + 16);
  }
  return out ^ 0x88888888u;
}

// One feature's numbers of one group, into its lane of a cell.
inline void put_numbers(const Form& form, const uint8_t* numbers, long count, long lane,
                        uint8_t* cell) {
  const int bits = number_bits(form);
  const long words = count * bits / 32;
  for (long i = 0; i < words; i++) {
    uint32_t word;
    if (form.kind == kBfloat) {
      uint16_t pair[2];
      std::memcpy(&pair[0], numbers + i * 8 + 2, 2);
      std::memcpy(&pair[1], numbers + i * 8 + 6, 2);
      word = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
    } else {
      std::memcpy(&word, numbers + i * 4, 4);
      if (bits == 4) word = paired_nibbles(word);
      if (bits == 8) word ^= 0x80808080u;
    }
    std::memcpy(cell + (i * kLanes + lane) * 4, &word, 4);
  }
}

inline void pack_block(const Form& form, const Layout& layout, Scales kind, const uint8_t* numbers,
                       const float* scales, const float* biases, long block, uint8_t* blob) {
  const int source_bits = form.kind == kBfloat ? 32 : number_bits(form);
  const size_t row_bytes = form.width * source_bits / 8;
  const size_t group_bytes = layout.group * source_bits / 8;
  uint8_t* cell = blob + layout.block_offset(block);
  for (long group = 0; group < layout.groups; group++) {
    for (long panel = 0; panel < layout.block_panels(block); panel++) {
      for (long lane = 0; lane < kLanes; lane++) {
        const long feature = (block * kPanels + panel) * kLanes + lane;
        const uint8_t* source = numbers + feature * row_bytes + group * group_bytes;
        put_numbers(form, source, layout.group, lane, cell + layout.scale_bytes);
        if (form.kind != kAffine) continue;
        put_scale(kind, scales[feature * layout.groups + group], lane, cell);
        put_scale(kind, biases[feature * layout.groups + group], lane + kLanes, cell);
      }
      cell += layout.cell_bytes;
    }
  }
}

}  // namespace products

inline bool is_taken(const Form& form) {
  if (form.features <= 0 || form.width <= 0) return false;
  if (form.features % products::kLanes != 0 || form.width % products::kStep != 0) return false;
  if (form.kind == kFloat || form.kind == kBfloat) return true;
  if (form.kind != kAffine || (form.bits != 4 && form.bits != 8)) return false;
  if (form.group != 32 && form.group != 64 && form.group != 128) return false;
  return form.width % form.group == 0;
}

// Room enough for any scales. With narrow ones the end of it stays untouched.
inline size_t packed_bytes(const Form& form) {
  return products::layout_of(form, products::Scales::kFloat).bytes();
}

// The bytes that packing these scales and biases really fills.
inline size_t packed_bytes(const Form& form, const float* scales, const float* biases) {
  return products::layout_of(form, products::narrowest(form, scales, biases)).bytes();
}

inline void pack(const Form& form, const void* numbers, const float* scales, const float* biases,
                 uint8_t* blob) {
  const products::Scales kind = products::narrowest(form, scales, biases);
  const products::Layout layout = products::layout_of(form, kind);
  std::memset(blob, 0, products::kHeader);
  std::memcpy(blob, &kind, sizeof kind);
  parallel(layout.blocks, [&](long block) {
    products::pack_block(form, layout, kind, static_cast<const uint8_t*>(numbers), scales, biases,
                         block, blob);
  });
}

}  // namespace mlxtape
