// Products of many rows on AMX, whose tile operations multiply bfloat16 and add in float32.
//
// A float32 number is the sum of three bfloat16 numbers, exactly: 24 bits of it, eight in each.
// So x is split into three parts, and weights that bfloat16 holds (quantised numbers do fit) are
// multiplied with all of them: as exact as float32. Numbers of a group are multiplied as they are,
// and what they sum to is scaled afterwards. float32 weights are split as well.
#pragma once

#include "product_vectors.h"

#if defined(__AMX_BF16__) && defined(__AVX512BW__) && defined(__linux__)
#define MLXTAPE_TILES 1

#include <sys/syscall.h>
#include <unistd.h>

namespace mlxtape::products {

inline constexpr long kTileRows = 16;
inline constexpr size_t kTile = 1024;               // bytes of a tile of weights
inline constexpr long kParts = 3;                   // bfloat16 numbers that make a float32 number
inline constexpr long kRowTiles = 4;                // tiles of rows that take a cell in turn
inline constexpr size_t kKeptRows = 1 << 20;        // bytes of split rows to keep in the L2 cache
inline constexpr size_t kKeptWeights = 512 * 1024;  // and of a block's weights, unpacked

// Linux lends the tiles to a process that asks for them.
inline bool may_use_tiles() {
  static const bool granted = [] {
    constexpr long kAskPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kAskPermission, kTileData) == 0;
  }();
  return granted;
}

// The intrinsics do not tell the compiler which memory they read.
inline void settle_memory(const void* at) { asm volatile("" ::"r"(at) : "memory"); }

// Tiles are set up for one task and let go of after it: nothing else on the thread has to know,
// and the kernel need not save 8 KiB whenever it switches to another thread.
struct Tiles {
  explicit Tiles(long rows) {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t columns[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; tile++) {
      config.columns[tile] = 64;
      config.rows[tile] = static_cast<uint8_t>(tile == 7 ? kTileRows : rows);
    }
    settle_memory(&config);
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
};

// Tiles 0 to 3 hold sums, one for each panel; 4 to 6 the parts of x, highest first; 7 weights.
// Tile numbers are part of the instructions, and so have to be spelled out.
#define MLXTAPE_TILE_PANEL(PANEL)                             \
  struct Panel##PANEL {                                       \
    static void clear() { _tile_zero(PANEL); }                \
    static void store(void* to, size_t line) { _tile_stored(PANEL, to, line); } \
    static void multiply(const uint8_t* weights) {            \
      _tile_loadd(7, weights, 64);                            \
      _tile_dpbf16ps(PANEL, 6, 7);                            \
      _tile_dpbf16ps(PANEL, 5, 7);                            \
      _tile_dpbf16ps(PANEL, 4, 7);                            \
    }                                                         \
    static void multiply_split(const uint8_t* weights) {      \
      _tile_loadd(7, weights + 2 * kTile, 64);                \
      _tile_dpbf16ps(PANEL, 4, 7);                            \
      _tile_loadd(7, weights + kTile, 64);                    \
      _tile_dpbf16ps(PANEL, 5, 7);                            \
      _tile_dpbf16ps(PANEL, 4, 7);                            \
      multiply(weights);                                      \
    }                                                         \
  }
MLXTAPE_TILE_PANEL(0);
MLXTAPE_TILE_PANEL(1);
MLXTAPE_TILE_PANEL(2);
MLXTAPE_TILE_PANEL(3);
#undef MLXTAPE_TILE_PANEL

// work.operator()<Panel>(index) for the first kCount panels.
template <int kCount, class Work>
inline void each_panel(Work&& work) {
  work.template operator()<Panel0>(0);
  if constexpr (kCount > 1) work.template operator()<Panel1>(1);
  if constexpr (kCount > 2) work.template operator()<Panel2>(2);
  if constexpr (kCount > 3) work.template operator()<Panel3>(3);
}

// How a form's numbers become tiles of weights: 16 lines of 16 pairs, a pair being the numbers
// of one feature at two neighboring places of the width. kPieces tiles hold 32 places.
struct NibbleTiles : NibbleNumbers {
  using Numbers = NibbleNumbers;
  static constexpr long kPieces = 1, kCells = 1;
  static constexpr bool kAsTheyLie = false;
  static void unpack(const uint8_t* step, uint8_t* tile) {
    // A permutation of words looks at the lowest five bits: whatever the fifth is, one finds the
    // bfloat16 number that the lower four stand for.
    alignas(64) static constexpr uint16_t kTable[32] = {
        0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0,
        0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
        0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
    const __m512i table = _mm512_load_si512(kTable);
    for (int eight = 0; eight < 4; eight++) {
      const __m512i words = _mm512_loadu_si512(step + eight * 64);
#pragma GCC unroll 4
      for (int pair = 0; pair < 4; pair++)
        _mm512_store_si512(tile + (eight * 4 + pair) * 64,
                           _mm512_permutexvar_epi16(_mm512_srli_epi32(words, pair * 4), table));
    }
  }
};

// The upper halves of two floats, as a pair.
inline Words upper_halves(Floats even, Floats odd) {
  const Words low = reinterpret_cast<Words>(_mm512_srli_epi32(reinterpret_cast<__m512i>(even), 16));
  return low | (reinterpret_cast<Words>(odd) & ~0xffff);
}

struct ByteTiles : ByteNumbers {
  using Numbers = ByteNumbers;
  static constexpr long kPieces = 1, kCells = 1;
  static constexpr bool kAsTheyLie = false;
  static void unpack(const uint8_t* step, uint8_t* tile) {
    for (int eight = 0; eight < 4; eight++, step += kBytes) {
#pragma GCC unroll 4
      for (int pair = 0; pair < 4; pair++) {
        const Words words = upper_halves(at(step, pair * 2), at(step, pair * 2 + 1));
        std::memcpy(tile + (eight * 4 + pair) * 64, &words, 64);
      }
    }
  }
};

struct BfloatTiles : BfloatNumbers {
  using Numbers = BfloatNumbers;
  static constexpr long kPieces = 1, kCells = 8;  // sums of 256 places are added up in float32
  static constexpr bool kAsTheyLie = true;
  static void unpack(const uint8_t*, uint8_t*) {}
};

// x less what its first 16 bits hold, in float32: exact, and 8 bits fewer to hold.
inline Floats rest_of(Floats x) {
  return x - reinterpret_cast<Floats>(reinterpret_cast<Words>(x) & ~0xffff);
}

struct FloatTiles : FloatNumbers {
  using Numbers = FloatNumbers;
  static constexpr long kPieces = 3, kCells = 4;
  static constexpr bool kAsTheyLie = false;
  static void unpack(const uint8_t* step, uint8_t* tiles) {
    for (int pair = 0; pair < 16; pair++) {
      Floats even = at(step, pair * 2), odd = at(step, pair * 2 + 1);
      for (int part = 0; part < kParts; part++, even = rest_of(even), odd = rest_of(odd)) {
        const Words words = upper_halves(even, odd);
        std::memcpy(tiles + part * kTile + pair * 64, &words, 64);
      }
    }
  }
};

struct TileCall {
  Layout layout;
  Scales scales;
  const uint8_t* blob;
  float* out;
  long features;
  long rows;
  long tile_rows = 0;  // rows of a tile: rows are spread evenly over as few tiles as hold them
  long row_tiles = 0;
  long kept_tiles = 0;          // tiles of rows that go through a block while its weights are kept
  const uint8_t* x = nullptr;   // [row tiles, steps, parts, tile rows] lines of 32 bfloat16 numbers
  const float* sums = nullptr;  // [row tiles, groups, 16] for affine forms

  long steps() const { return layout.width / kStep; }
  size_t x_bytes() const { return tile_rows * 64; }
  const uint8_t* x_at(long tile, long step) const {
    return x + (tile * steps() + step) * kParts * x_bytes();
  }
};

// Part of x's rows [row, row + tile rows) as tiles; rows past the end are zero.
inline void split_rows(const TileCall& call, const float* x, long tile, uint8_t* to, float* sums) {
  const long width = call.layout.width, row0 = tile * call.tile_rows;
  uint8_t* parts = to + tile * call.steps() * kParts * call.x_bytes();
  const __m512i upper = _mm512_set_epi16(
      63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21, 19,
      17, 15, 13, 11, 9, 7, 5, 3, 1);
  for (long row = 0; row < call.tile_rows; row++) {
    const bool real = row0 + row < call.rows;
    const float* from = x + (row0 + row) * width;
    for (long step = 0; step < call.steps(); step++) {
      Floats low = {}, high = {};
      if (real) {
        low = load<Floats>(from + step * kStep);
        high = load<Floats>(from + step * kStep + kLanes);
      }
      uint8_t* line = parts + step * kParts * call.x_bytes() + row * 64;
      for (long part = 0; part < kParts; part++, line += call.x_bytes()) {
        _mm512_store_si512(line, _mm512_permutex2var_epi16(reinterpret_cast<__m512i>(low), upper,
                                                           reinterpret_cast<__m512i>(high)));
        low = rest_of(low), high = rest_of(high);
      }
    }
    if (sums == nullptr) continue;
    const long groups = call.layout.groups, group = call.layout.group;
    for (long i = 0; i < groups; i++)
      sums[(tile * groups + i) * kTileRows + row] = real ? sum_of(from + i * group, group) : 0;
  }
}

// Sums in float32 of up to four tiles of rows and the panels of a block.
template <int kCount>
using Totals = Floats[kRowTiles][kTileRows][kCount];

// Starts the products of one tile of rows with the panels' tiles of weights, over some steps.
template <class Form, int kCount>
inline void multiply_tiles(const uint8_t* x, size_t part, const uint8_t* weights, size_t step_bytes,
                           long steps) {
  each_panel<kCount>([&]<class Panel>(int) { Panel::clear(); });
  for (long step = 0; step < steps; step++, x += kParts * part, weights += step_bytes) {
    _tile_loadd(6, x + 2 * part, 64);
    _tile_loadd(5, x + part, 64);
    _tile_loadd(4, x, 64);
    each_panel<kCount>([&]<class Panel>(int panel) {
      const uint8_t* tile = weights + panel * Form::kPieces * kTile;
      if constexpr (Form::kPieces == 1) Panel::multiply(tile);
      else Panel::multiply_split(tile);
    });
  }
}

// What a task multiplies: some panels of a block, and where their weights are unpacked.
struct TileTask {
  const uint8_t* cells;  // of the first panel
  size_t row_of_cells;   // bytes from one group's cells to the next group's
  uint8_t* unpacked;
  size_t unpacked_bytes;  // of one group
  bool kept;              // room for all groups, not only for those in use and those that follow

  uint8_t* tiles_of(long group, long cells) const {
    return unpacked + (kept ? group : group / cells % 2 * cells) * unpacked_bytes;
  }
};

// Groups [first, first + Form::kCells) of the task's panels, as tiles.
template <class Form, int kCount>
inline void unpack_cells(const TileCall& call, const TileTask& task, long first) {
  const Layout& layout = call.layout;
  const long steps = layout.group / kStep, end = std::min(first + Form::kCells, layout.groups);
  uint8_t* tiles = task.tiles_of(first, Form::kCells);
  for (long group = first; group < end; group++, tiles += task.unpacked_bytes) {
    for (int panel = 0; panel < kCount; panel++) {
      const uint8_t* cell = task.cells + group * task.row_of_cells + panel * layout.cell_bytes;
      prefetch(cell + kAhead, layout.cell_bytes);
      for (long step = 0; step < steps; step++)
        Form::unpack(cell + layout.scale_bytes + step * 4 * Form::kBytes,
                     tiles + (step * kCount + panel) * Form::kPieces * kTile);
    }
  }
  settle_memory(tiles);
}

// Sums that the tiles gave out, and the totals that they go to.
template <int kCount>
struct Given {
  Floats (*totals)[kCount] = nullptr;
  const float* x_sums = nullptr;
  ScaleAndBias of[kCount];
};

template <class Form, int kCount>
inline void read_scales(const TileCall& call, const uint8_t* cells, Given<kCount>& given) {
  for (int panel = 0; panel < kCount; panel++)
    given.of[panel] = scales_of<typename Form::Numbers>(call.scales,
                                                        cells + panel * call.layout.cell_bytes);
}

template <class Form, int kCount>
inline void add_given(long rows, const uint8_t* next, const Floats (*sums)[kCount],
                      const Given<kCount>& given) {
  if (given.totals == nullptr) return;
  const Given<kCount> from = given;  // a copy, so that scales stay in registers
  for (long row = 0; row < rows; row++) {
    for (long part = 0; part < kParts; part++) __builtin_prefetch(next + (part * rows + row) * 64);
    Floats x_sum = {};
    if constexpr (kIsAffine<typename Form::Numbers>) x_sum = spread(from.x_sums[row]);
#pragma GCC unroll 4
    for (int panel = 0; panel < kCount; panel++) {
      Floats& total = from.totals[row][panel];
      const Floats sum = sums[row][panel];
      if constexpr (kIsAffine<typename Form::Numbers>)
        total = multiply_add(from.of[panel].scale, sum,
                             multiply_add(from.of[panel].bias, x_sum, total));
      else
        total += sum;
    }
  }
}

// Tiles of rows [first, first + count) with all of the width. While the tiles multiply, the vector
// units add up what the tiles gave before, and unpack what they need next.
template <class Form, int kCount>
void multiply_row_tiles(const TileCall& call, const TileTask& task, long first, long count,
                        bool fresh, Totals<kCount>& totals) {
  const Layout& layout = call.layout;
  const long cell_steps = layout.group / kStep;
  const size_t step_bytes = Form::kAsTheyLie ? task.row_of_cells : kCount * Form::kPieces * kTile;
  const bool unpacks = !Form::kAsTheyLie && (fresh || !task.kept);
  Floats sums[kTileRows][kCount];
  Given<kCount> given;
  if (unpacks) unpack_cells<Form, kCount>(call, task, 0);
  for (long group = 0; group < layout.groups; group += Form::kCells) {
    const long cells = std::min(Form::kCells, layout.groups - group);
    const uint8_t* row_of_cells = task.cells + group * task.row_of_cells;
    const uint8_t* weights = Form::kAsTheyLie ? row_of_cells : task.tiles_of(group, Form::kCells);
    for (long tile = 0; tile < count; tile++) {
      multiply_tiles<Form, kCount>(call.x_at(first + tile, group * cell_steps), call.x_bytes(),
                                   weights, step_bytes, cells * cell_steps);
      const uint8_t* next = tile + 1 < count ? call.x_at(first + tile + 1, group * cell_steps)
                                             : call.x_at(first, (group + cells) * cell_steps);
      add_given<Form, kCount>(call.tile_rows, next, sums, given);
      if (unpacks && tile == 0) unpack_cells<Form, kCount>(call, task, group + Form::kCells);
      each_panel<kCount>([&]<class Panel>(int panel) { Panel::store(&sums[0][panel], sizeof sums[0]); });
      given.totals = totals[tile];
      if constexpr (kIsAffine<typename Form::Numbers>) {
        given.x_sums = call.sums + ((first + tile) * layout.groups + group) * kTileRows;
        if (tile == 0) read_scales<Form, kCount>(call, row_of_cells, given);
      }
    }
  }
  add_given<Form, kCount>(call.tile_rows, call.x_at(first, 0), sums, given);
}

template <class Form, int kCount>
void multiply_block(const TileCall& call, long block, long panel, long first, long count) {
  static thread_local Scratch scratch;
  const Layout& layout = call.layout;
  TileTask task;
  task.cells = call.blob + layout.block_offset(block) + panel * layout.cell_bytes;
  task.row_of_cells = layout.block_panels(block) * layout.cell_bytes;
  task.unpacked_bytes = layout.group / kStep * kCount * Form::kPieces * kTile;
  task.kept = count > kRowTiles && task.unpacked_bytes * layout.groups <= kKeptWeights;
  if (!Form::kAsTheyLie)
    task.unpacked = scratch.of(task.unpacked_bytes * (task.kept ? layout.groups : 2 * Form::kCells));
  const Tiles tiles(call.tile_rows);
  float* out = call.out + (block * kPanels + panel) * kLanes;
  for (long tile = first; tile < first + count; tile += kRowTiles) {
    const long some = std::min(kRowTiles, first + count - tile);
    Totals<kCount> totals = {};
    multiply_row_tiles<Form, kCount>(call, task, tile, some, tile == first, totals);
    const long row0 = tile * call.tile_rows, rows = std::min(some * call.tile_rows, call.rows - row0);
    for (long row = 0; row < rows; row++)
      std::memcpy(out + (row0 + row) * call.features,
                  totals[row / call.tile_rows][row % call.tile_rows], kCount * 64);
  }
}

template <class Form>
void multiply_by_tiles(const TileCall& call) {
  for (long first = 0; first < call.row_tiles; first += call.kept_tiles) {
    const long tiles = std::min(call.kept_tiles, call.row_tiles - first);
    over_blocks(call.layout, [&](long block, long panel, long count) {
      switch (count) {
        case 1: multiply_block<Form, 1>(call, block, panel, first, tiles); break;
        case 2: multiply_block<Form, 2>(call, block, panel, first, tiles); break;
        case 3: multiply_block<Form, 3>(call, block, panel, first, tiles); break;
        default: multiply_block<Form, 4>(call, block, panel, first, tiles);
      }
    });
  }
}

inline void product_by_tiles(const Form& form, const uint8_t* blob, const float* x, long rows,
                             float* out) {
  static thread_local Scratch scratch;
  TileCall call{layout_of(form, scales_in(blob)), scales_in(blob), blob, out, form.features, rows};
  call.row_tiles = (rows + kTileRows - 1) / kTileRows;
  call.tile_rows = (rows + call.row_tiles - 1) / call.row_tiles;
  const size_t tile_bytes = call.steps() * kParts * call.x_bytes();
  call.kept_tiles = std::max<long>(kKeptRows / tile_bytes / kRowTiles, 1) * kRowTiles;
  const size_t x_bytes = call.row_tiles * tile_bytes;
  const long sums = form.kind == kAffine ? call.row_tiles * call.layout.groups * kTileRows : 0;
  uint8_t* split = scratch.of(x_bytes + sums * sizeof(float));
  float* x_sums = sums ? reinterpret_cast<float*>(split + x_bytes) : nullptr;
  call.x = split;
  call.sums = x_sums;
  parallel(call.row_tiles, [&](long tile) { split_rows(call, x, tile, split, x_sums); });
  if (form.kind == kFloat) multiply_by_tiles<FloatTiles>(call);
  else if (form.kind == kBfloat) multiply_by_tiles<BfloatTiles>(call);
  else if (form.bits == 8) multiply_by_tiles<ByteTiles>(call);
  else multiply_by_tiles<NibbleTiles>(call);
}

}  // namespace mlxtape::products

#endif
