// Products of many rows on AMX, whose tile operations multiply bfloat16 and add in float32.
//
// A float32 number is the sum of three bfloat16 numbers, exactly, unless it is so small (1e-33) that
// the last of them is not: 24 bits of it, eight in each. An infinite one makes its row's products NaN.
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
inline constexpr size_t kKeptRows = 512 * 1024;       // bytes of split rows to keep in the L2 cache
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
#define MLXTAPE_TILE_PANEL(PANEL)                                        \
  struct Panel##PANEL {                                                  \
    static void clear() { _tile_zero(PANEL); }                           \
    static void store(void* to) { _tile_stored(PANEL, to, 64); }         \
    template <long kPieces>                                              \
    static void multiply(const uint8_t* weights) {                       \
      if constexpr (kPieces == 3) {                                      \
        _tile_loadd(7, weights + 2 * kTile, 64);                         \
        _tile_dpbf16ps(PANEL, 4, 7);                                     \
        _tile_loadd(7, weights + kTile, 64);                             \
        _tile_dpbf16ps(PANEL, 5, 7);                                     \
        _tile_dpbf16ps(PANEL, 4, 7);                                     \
      }                                                                  \
      _tile_loadd(7, weights, 64);                                       \
      _tile_dpbf16ps(PANEL, 6, 7);                                       \
      _tile_dpbf16ps(PANEL, 5, 7);                                       \
      _tile_dpbf16ps(PANEL, 4, 7);                                       \
    }                                                                    \
  }
MLXTAPE_TILE_PANEL(0);
MLXTAPE_TILE_PANEL(1);
MLXTAPE_TILE_PANEL(2);
MLXTAPE_TILE_PANEL(3);
#undef MLXTAPE_TILE_PANEL

inline void load_x(const uint8_t* x, size_t part) {
  _tile_loadd(6, x + 2 * part, 64);
  _tile_loadd(5, x + part, 64);
  _tile_loadd(4, x, 64);
}

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

// One tile of x's rows, in parts; rows past the end are zero.
inline void split_rows(const TileCall& call, const float* x, long tile, uint8_t* parts) {
  const __m512i upper = _mm512_set_epi16(
      63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21, 19,
      17, 15, 13, 11, 9, 7, 5, 3, 1);
  const long real_rows = std::min(call.tile_rows, call.rows - tile * call.tile_rows);
  parts += tile * call.steps() * kParts * call.x_bytes();
  for (long step = 0; step < call.steps(); step++, parts += kParts * call.x_bytes()) {
    const float* from = x + tile * call.tile_rows * call.layout.width + step * kStep;
    for (long row = 0; row < call.tile_rows; row++, from += call.layout.width) {
      Floats low = {}, high = {};
      if (row < real_rows) low = load<Floats>(from), high = load<Floats>(from + kLanes);
      for (long part = 0; part < kParts; part++, low = rest_of(low), high = rest_of(high))
        _mm512_store_si512(parts + part * call.x_bytes() + row * 64,
                           _mm512_permutex2var_epi16(reinterpret_cast<__m512i>(low), upper,
                                                     reinterpret_cast<__m512i>(high)));
    }
  }
}

inline void sum_rows(const TileCall& call, const float* x, long tile, float* sums) {
  const long groups = call.layout.groups, row0 = tile * call.tile_rows;
  const long rows = std::min(call.tile_rows, call.rows - row0);
  sums += tile * groups * kTileRows;
  std::memset(sums, 0, groups * kTileRows * sizeof(float));
  for (long row = 0; row < rows; row++) {
    const float* from = x + (row0 + row) * call.layout.width;
    for (long group = 0; group < groups; group++, from += call.layout.group)
      sums[group * kTileRows + row] = sum_of(from, call.layout.group);
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

// Groups [first, first + Form::kCells) of one panel, as tiles.
template <class Form, int kCount>
inline void unpack_panel(const TileCall& call, const TileTask& task, long first, int panel) {
  const Layout& layout = call.layout;
  const long steps = layout.group / kStep, end = std::min(first + Form::kCells, layout.groups);
  uint8_t* tiles = task.tiles_of(first, Form::kCells) + panel * Form::kPieces * kTile;
  for (long group = first; group < end; group++) {
    const uint8_t* cell = task.cells + group * task.row_of_cells + panel * layout.cell_bytes;
    prefetch(cell + kAhead, layout.cell_bytes);
    cell += layout.scale_bytes;
    for (long step = 0; step < steps; step++, tiles += kCount * Form::kPieces * kTile)
      Form::unpack(cell + step * 4 * Form::kBytes, tiles);
  }
  settle_memory(tiles);
}

// Sums that the tiles hold, and what becomes of them.
template <int kCount>
struct Held {
  Floats (*totals)[kTileRows] = nullptr;  // of each panel; none before the first sums
  const float* x_sums = nullptr;
  ScaleAndBias of[kCount];
};

template <class Form, int kCount>
inline void read_scales(const TileCall& call, const uint8_t* cells, Held<kCount>& held, int panel) {
  if constexpr (kIsAffine<typename Form::Numbers>)
    held.of[panel] = scales_of<typename Form::Numbers>(call.scales,
                                                       cells + panel * call.layout.cell_bytes);
}

// Adds one panel's sums to its totals.
template <class Form, int kCount>
inline void add_sums(long rows, const Floats* sums, const Held<kCount>& held, int panel) {
  Floats* totals = held.totals[panel];
  if constexpr (kIsAffine<typename Form::Numbers>) {
    const ScaleAndBias of = held.of[panel];
    const float* x_sums = held.x_sums;
#pragma GCC unroll 4
    for (long row = 0; row < rows; row++)
      totals[row] = multiply_add(of.scale, sums[row],
                                 multiply_add(of.bias, spread(x_sums[row]), totals[row]));
  } else {
#pragma GCC unroll 4
    for (long row = 0; row < rows; row++) totals[row] += sums[row];
  }
}

// The products of one tile of rows, over the steps of a chunk of the width: what the tiles held
// before goes to its totals, and what they hold afterwards is left in them. Panels take turns:
// while the tiles multiply for some, the vector units add up what another's tile held.
template <class Form, int kCount, class After>
inline void multiply_tile(const TileCall& call, const uint8_t* x, const uint8_t* weights,
                          size_t step_bytes, long steps, const Held<kCount>& held,
                          Floats (*sums)[kTileRows], After&& after_panel) {
  const size_t part = call.x_bytes();
  load_x(x, part);
  each_panel<kCount>([&]<class Panel>(int panel) {
    if (held.totals != nullptr) Panel::store(sums[panel]);
    Panel::clear();
    Panel::template multiply<Form::kPieces>(weights + panel * Form::kPieces * kTile);
    if (held.totals != nullptr) add_sums<Form, kCount>(call.tile_rows, sums[panel], held, panel);
    after_panel(panel);
  });
  for (long step = 1; step < steps; step++) {
    load_x(x + step * kParts * part, part);
    weights += step_bytes;
    each_panel<kCount>([&]<class Panel>(int panel) {
      Panel::template multiply<Form::kPieces>(weights + panel * Form::kPieces * kTile);
    });
  }
}

// Tiles of rows [first, first + count) with all of the width.
template <class Form, int kCount>
void multiply_row_tiles(const TileCall& call, const TileTask& task, long first, long count,
                        bool fresh, Floats (*totals)[kCount][kTileRows]) {
  const Layout& layout = call.layout;
  const long cell_steps = layout.group / kStep;
  const size_t step_bytes = Form::kAsTheyLie ? task.row_of_cells : kCount * Form::kPieces * kTile;
  const bool unpacks = !Form::kAsTheyLie && (fresh || !task.kept);
  Floats sums[kCount][kTileRows];
  Held<kCount> held;
  for (int panel = 0; panel < kCount && unpacks; panel++)
    unpack_panel<Form, kCount>(call, task, 0, panel);
  for (long group = 0; group < layout.groups; group += Form::kCells) {
    const long steps = std::min(Form::kCells, layout.groups - group) * cell_steps;
    const uint8_t* cells = task.cells + group * task.row_of_cells;
    const uint8_t* weights = Form::kAsTheyLie ? cells : task.tiles_of(group, Form::kCells);
    for (long tile = 0; tile < count; tile++) {
      multiply_tile<Form, kCount>(call, call.x_at(first + tile, group * cell_steps), weights,
                                  step_bytes, steps, held, sums, [&](int panel) {
        if (tile > 0) return;
        read_scales<Form, kCount>(call, cells, held, panel);
        if (unpacks) unpack_panel<Form, kCount>(call, task, group + Form::kCells, panel);
      });
      held.totals = totals[tile];
      if constexpr (kIsAffine<typename Form::Numbers>)
        held.x_sums = call.sums + ((first + tile) * layout.groups + group) * kTileRows;
    }
  }
  each_panel<kCount>([&]<class Panel>(int panel) {
    Panel::store(sums[panel]);
    add_sums<Form, kCount>(call.tile_rows, sums[panel], held, panel);
  });
}

// One tile's totals, as rows of out.
template <int kCount>
inline void put_rows(const TileCall& call, long tile, const Floats (*totals)[kTileRows],
                     float* out) {
  const long row0 = tile * call.tile_rows, rows = std::min(call.tile_rows, call.rows - row0);
  out += row0 * call.features;
  for (long row = 0; row < rows; row++, out += call.features)
    for (int panel = 0; panel < kCount; panel++)
      std::memcpy(out + panel * kLanes, &totals[panel][row], 64);
}

template <class Form, int kCount>
void multiply_block(const TileCall& call, long block, long first, long count) {
  static thread_local Scratch scratch;
  const Layout& layout = call.layout;
  TileTask task;
  task.cells = call.blob + layout.block_offset(block);
  task.row_of_cells = kCount * layout.cell_bytes;
  task.unpacked_bytes = layout.group / kStep * kCount * Form::kPieces * kTile;
  task.kept = count > kRowTiles && task.unpacked_bytes * layout.groups <= kKeptWeights;
  if (!Form::kAsTheyLie)
    task.unpacked = scratch.of<uint8_t>(
        task.unpacked_bytes * (task.kept ? layout.groups : 2 * Form::kCells));
  const Tiles tiles(call.tile_rows);
  float* out = call.out + block * kPanels * kLanes;
  for (long tile = first; tile < first + count; tile += kRowTiles) {
    const long some = std::min(kRowTiles, first + count - tile);
    Floats totals[kRowTiles][kCount][kTileRows];
    std::memset(totals, 0, some * sizeof totals[0]);
    multiply_row_tiles<Form, kCount>(call, task, tile, some, tile == first, totals);
    for (long i = 0; i < some; i++) put_rows<kCount>(call, tile + i, totals[i], out);
  }
}

// A task is a block and as many tiles of rows as are kept.
template <class Form>
void multiply_by_tiles(const TileCall& call) {
  const long blocks = call.layout.blocks;
  const long turns = (call.row_tiles + call.kept_tiles - 1) / call.kept_tiles;
  parallel(turns * blocks, [&](long index) {
    const long block = index % blocks, first = index / blocks * call.kept_tiles;
    const long count = std::min(call.kept_tiles, call.row_tiles - first);
    switch (call.layout.block_panels(block)) {
      case 1: multiply_block<Form, 1>(call, block, first, count); break;
      case 2: multiply_block<Form, 2>(call, block, first, count); break;
      case 3: multiply_block<Form, 3>(call, block, first, count); break;
      default: multiply_block<Form, 4>(call, block, first, count);
    }
  });
}

// How many tiles of rows go through a block while its weights are kept: few enough that the rows
// stay in the L2 cache, and that few blocks still make tasks for all threads.
inline long tiles_to_keep(const TileCall& call) {
  const long tile_bytes = call.steps() * kParts * call.x_bytes();
  long tiles = std::min<long>(kKeptRows / tile_bytes, call.row_tiles);
  if (call.layout.blocks < 8 * Pool::shared().threads())
    tiles = std::min(tiles, call.row_tiles / Pool::shared().threads());
  return std::max(tiles / kRowTiles, 1L) * kRowTiles;
}

inline void product_by_tiles(const Form& form, const uint8_t* blob, const float* x, long rows,
                             float* out) {
  static thread_local Scratch scratch;
  TileCall call{layout_of(form, scales_in(blob)), scales_in(blob), blob, out, form.features, rows};
  call.row_tiles = (rows + kTileRows - 1) / kTileRows;
  call.tile_rows = (rows + call.row_tiles - 1) / call.row_tiles;
  const size_t tile_bytes = call.steps() * kParts * call.x_bytes();
  call.kept_tiles = tiles_to_keep(call);
  const size_t x_bytes = call.row_tiles * tile_bytes;
  const long sums = form.kind == kAffine ? call.row_tiles * call.layout.groups * kTileRows : 0;
  uint8_t* split = scratch.of<uint8_t>(x_bytes + sums * sizeof(float));
  float* x_sums = sums ? reinterpret_cast<float*>(split + x_bytes) : nullptr;
  call.x = split;
  call.sums = x_sums;
  parallel(call.row_tiles, [&](long tile) {
    split_rows(call, x, tile, split);
    if (x_sums != nullptr) sum_rows(call, x, tile, x_sums);
  });
  if (form.kind == kFloat) multiply_by_tiles<FloatTiles>(call);
  else if (form.kind == kBfloat) multiply_by_tiles<BfloatTiles>(call);
  else if (form.bits == 8) multiply_by_tiles<ByteTiles>(call);
  else multiply_by_tiles<NibbleTiles>(call);
}

}  // namespace mlxtape::products

#endif
