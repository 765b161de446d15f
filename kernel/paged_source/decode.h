// Attention of single rows over pages that a block table names: the algorithm, in no dialect.
//
// CUDA and Metal both compile this file, and so does the emulator of the tests. A dialect defines
// FN, GLOBAL, GROUP, LOCAL (words for functions and address spaces), power2, larger, shuffle_xor,
// barrier, narrow, and fetched and fetch_four (loads of what other blocks have just stored).
//
// A block of WARPS warps takes one item: some tiles of one row's keys, for one K/V head and up to
// HEADS of the query heads that share it, so that K and V are loaded once for all of these.
//
//   virtual tiles of a row      | sinks | live keys ... |
//   positions                   [0, sink) [live_from, until)         TILE keys each
//   where a key is                in pages before `start`, in the step's own rows from there on
//
// Each warp walks every WARPS-th tile with a softmax of its own (a peak, a total, a mix of values,
// scores in powers of two), the block merges its warps, and merge_splits merges the items of a row.
// A key that the row may not see is replaced by the row's own key with a weight of 0: nothing is
// ever loaded from where nothing was written, so that no NaN can come of it.
#pragma once

#define TILE 16
#define NEVER (-1e30f)

// What the host plans: items of ITEM_INTS ints, then tables; see paged_plan.py.
#define ITEM_INTS 12
struct Item {
  int table;      // where the row's block table stands in the plan
  int until;      // keys [live_from, until) and [0, sink) are seen; the row's own key is the last
  int live_from;
  int sink;
  int start;      // keys from here on stand in the step's rows
  int fresh;      // batch row of a position: fresh + position
  int slot;       // physical row that this item writes the row's K and V to; negative: none
  int begin;      // virtual tiles [begin, end)
  int end;
  int splits;     // items of this row
  int first;      // the number of their first
  int counter;    // which of the counters they share
};

FN Item item_at(GLOBAL const int* plan, int number) {
  GLOBAL const int* at = plan + number * ITEM_INTS;
  Item item;
  item.table = at[0]; item.until = at[1]; item.live_from = at[2]; item.sink = at[3];
  item.start = at[4]; item.fresh = at[5]; item.slot = at[6]; item.begin = at[7];
  item.end = at[8]; item.splits = at[9]; item.first = at[10]; item.counter = at[11];
  return item;
}

template <typename T> struct alignas(4 * sizeof(T)) Four { T at[4]; };

// What a head's row is in memory: numbers, or words of 8-bit numbers q, each GROUP of which stand for
// scale * q + bias: the numbers of a row, then its scales, then its biases (quantised.py). width: in
// units; four: the numbers from 4 * `at` on.
template <typename T> struct PlainRow {
  typedef T Unit;
  enum { PLAIN = 1 };
  FN static constexpr int width(int dim) { return dim; }
  FN static void four(GLOBAL const T* row, int at, int dim, LOCAL float* into) {
    Four<T> loaded = *(GLOBAL const Four<T>*)(row + at * 4);
    for (int i = 0; i < 4; ++i) into[i] = float(loaded.at[i]);
  }
};
template <int GROUP_OF> struct CodedRow {
  typedef unsigned Unit;
  enum { PLAIN = 0 };
  FN static constexpr int width(int dim) { return dim / 4 + dim / GROUP_OF * 2; }
  FN static void four(GLOBAL const unsigned* row, int at, int dim, LOCAL float* into) {
    unsigned word = row[at];
    GLOBAL const unsigned* scale = row + dim / 4 + at * 4 / GROUP_OF;
    float step = float_of(scale[0]), least = float_of(scale[dim / GROUP_OF]);
    for (int i = 0; i < 4; ++i) into[i] = float(word >> 8 * i & 255u) * step + least;
  }
};

// The rows of one K/V head that one query row may see. BLOCK: rows of a page's block. Strides are
// in elements.
template <typename T, int BLOCK> struct Rows {
  GLOBAL const T* key_pages;
  GLOBAL const T* value_pages;
  GLOBAL const T* fresh_keys;
  GLOBAL const T* fresh_values;
  GLOBAL const int* table;
  int key_stride, value_stride;
  int until, live_from, sink, start, fresh, sink_tiles, skipped;

  FN void open(LOCAL const Item& item, GLOBAL const int* plan) {
    table = plan + item.table;
    until = item.until; live_from = item.live_from; sink = item.sink;
    start = item.start; fresh = item.fresh;
    sink_tiles = (sink + TILE - 1) / TILE;
    int live_tile = live_from / TILE;
    skipped = live_tile > sink_tiles ? live_tile - sink_tiles : 0;
  }
  FN int own() const { return until - 1; }
  FN int first_of(int tile) const { return TILE * (tile < sink_tiles ? tile : tile + skipped); }
  FN bool sees(int position) const {
    return position < until && (position >= live_from || position < sink);
  }
  // Whether a tile is all seen and all in one block of the pages.
  FN bool plain(int position) const {
    return BLOCK % TILE == 0 && position + TILE <= start && position + TILE <= until
        && (position >= live_from || position + TILE <= sink);
  }
  FN int slot(int position) const {
    int block = table[position / BLOCK];
    return (block < 0 ? 0 : block) * BLOCK + position % BLOCK;
  }
  // The physical row of a tile's first key, where the tile is in one block.
  FN int base(int tile) const { return BLOCK % TILE == 0 ? slot(first_of(tile)) : 0; }

  FN GLOBAL const T* key_at(int slot) const { return key_pages + (long)slot * key_stride; }
  FN GLOBAL const T* value_at(int slot) const { return value_pages + (long)slot * value_stride; }
  FN GLOBAL const T* key(int position) const {
    position = sees(position) ? position : own();
    if (position >= start) return fresh_keys + (long)(fresh + position) * key_stride;
    return key_at(slot(position));
  }
  FN GLOBAL const T* value(int position) const {
    position = sees(position) ? position : own();
    if (position >= start) return fresh_values + (long)(fresh + position) * value_stride;
    return value_at(slot(position));
  }
};

// One warp in plain float32: LANES lanes share a key, each with every LANES-th four of its numbers,
// 32 / LANES keys at a time, each such part of the warp with a softmax of its own.
template <typename T, typename R, int BLOCK, int KEY, int VALUE, int HEADS> struct PlainWarp {
  typedef Rows<typename R::Unit, BLOCK> Seen;
  enum {
    LANES = KEY > 128 || VALUE > 128 ? 16 : 8,
    KEYS = 32 / LANES,
    KEY_FOURS = (KEY / 4 + LANES - 1) / LANES,
    VALUE_FOURS = (VALUE / 4 + LANES - 1) / LANES
  };
  float query[HEADS][KEY_FOURS * 4], mix[HEADS][VALUE_FOURS * 4], peak[HEADS], total[HEADS];
  int lane, part, key_of;

  template <typename Kind>
  FN void load(GLOBAL const typename Kind::Unit* row, int four, int dim, LOCAL float* into) const {
    if (four * 4 < dim) {
      Kind::four(row, four, dim, into);
    } else {
      for (int i = 0; i < 4; ++i) into[i] = 0.0f;
    }
  }
  FN void begin(GLOBAL const T* queries, int heads, int in_lane) {
    lane = in_lane; part = lane % LANES; key_of = lane / LANES;
    for (int h = 0; h < HEADS; ++h) {
      peak[h] = NEVER; total[h] = 0.0f;
      for (int i = 0; i < VALUE_FOURS * 4; ++i) mix[h][i] = 0.0f;
      for (int j = 0; j < KEY_FOURS; ++j)
        load<PlainRow<T>>(queries + (h < heads ? h : 0) * KEY, part + j * LANES, KEY,
                          query[h] + j * 4);
    }
  }
  FN void load_keys(LOCAL const Seen&, int, int) {}
  FN void load_values(LOCAL const Seen&, int, int) {}
  FN void score() {}
  FN void weigh(LOCAL const Seen& rows, int tile, float scale) {
    int first = rows.first_of(tile);
    for (int at = key_of; at < TILE; at += KEYS) one_key(rows, first + at, scale);
  }
  FN void one_key(LOCAL const Seen& rows, int position, float scale) {
    GLOBAL const typename R::Unit* key_row = rows.key(position);
    GLOBAL const typename R::Unit* value_row = rows.value(position);
    float key[KEY_FOURS * 4], value[VALUE_FOURS * 4];
    for (int j = 0; j < KEY_FOURS; ++j) load<R>(key_row, part + j * LANES, KEY, key + j * 4);
    for (int j = 0; j < VALUE_FOURS; ++j)
      load<R>(value_row, part + j * LANES, VALUE, value + j * 4);
    for (int h = 0; h < HEADS; ++h) {
      float x = 0.0f;
      for (int i = 0; i < KEY_FOURS * 4; ++i) x += query[h][i] * key[i];
      for (int reach = 1; reach < LANES; reach *= 2) x += shuffle_xor(x, reach);
      x = rows.sees(position) ? x * scale : NEVER;
      float top = larger(peak[h], x);
      float weight = rows.sees(position) ? power2(x - top) : 0.0f, kept = power2(peak[h] - top);
      peak[h] = top; total[h] = total[h] * kept + weight;
      for (int i = 0; i < VALUE_FOURS * 4; ++i) mix[h][i] = mix[h][i] * kept + weight * value[i];
    }
  }
  // Merge the parts of the warp, and put heads' mixes [heads][VALUE], peaks and totals into
  // the block's memory.
  FN void end(GROUP float* mixes, GROUP float* peaks, GROUP float* totals, int heads) {
    for (int h = 0; h < HEADS; ++h) {
      float top = peak[h];
      for (int reach = LANES; reach < 32; reach *= 2) top = larger(top, shuffle_xor(top, reach));
      float kept = power2(peak[h] - top);
      total[h] *= kept;
      for (int reach = LANES; reach < 32; reach *= 2) total[h] += shuffle_xor(total[h], reach);
      for (int i = 0; i < VALUE_FOURS * 4; ++i) {
        mix[h][i] *= kept;
        for (int reach = LANES; reach < 32; reach *= 2) mix[h][i] += shuffle_xor(mix[h][i], reach);
        int four = part + i / 4 * LANES;
        if (h < heads && key_of == 0 && four * 4 < VALUE)
          mixes[h * VALUE + four * 4 + i % 4] = mix[h][i];
      }
      if (h < heads && lane == 0) { peaks[h] = top; totals[h] = total[h]; }
    }
  }
};

// A warp's share of an item: the next tile's keys and values are on their way while one is mixed.
template <typename Warp, typename Unit, int BLOCK>
FN void walk(LOCAL Warp& warp, LOCAL const Rows<Unit, BLOCK>& rows, int tile, int end, int warps,
             float scale) {
  if (tile >= end) return;
  int base = rows.base(tile);
  warp.load_keys(rows, tile, base);
  warp.load_values(rows, tile, base);
  int next = tile + warps;
  int next_base = next < end ? rows.base(next) : 0;
  while (true) {
    warp.score();
    if (next < end) warp.load_keys(rows, next, next_base);
    warp.weigh(rows, tile, scale);
    if (next >= end) break;
    warp.load_values(rows, next, next_base);
    tile = next;
    next += warps;
    next_base = next < end ? rows.base(next) : 0;
  }
}

// A total with the sink of its head in it, a key that all rows see, of no value. Returns what is
// left of the mix beside it.
FN float kept_beside_sink(LOCAL float& total, float peak, float sink) {
  float top = larger(peak, sink);
  float kept = power2(peak - top);
  total = total * kept + power2(sink - top);
  return kept;
}

// Put the step's own row to its place in the pages: only rows that nothing reads in this step.
template <typename T, int WIDTH>
FN void write_row(GLOBAL T* pages, GLOBAL const T* rows, long to, long from, int worker,
                  int workers) {
  if (WIDTH % 4) {
    for (int i = worker; i < WIDTH; i += workers) pages[to * WIDTH + i] = rows[from * WIDTH + i];
    return;
  }
  GLOBAL Four<T>* into = (GLOBAL Four<T>*)(pages + to * WIDTH);
  GLOBAL const Four<T>* row = (GLOBAL const Four<T>*)(rows + from * WIDTH);
  for (int i = worker; i < WIDTH / 4; i += workers) into[i] = row[i];
}

// Merge a block's warps: the peak, the total and one number of the mix of a head.
template <int WARPS, int HEADS, int VALUE>
FN void merge_warps(GROUP const float* mixes, GROUP const float* peaks, GROUP const float* totals,
                    int head, int at, LOCAL float& peak, LOCAL float& total, LOCAL float& mix) {
  peak = NEVER; total = 0.0f; mix = 0.0f;
  for (int w = 0; w < WARPS; ++w) peak = larger(peak, peaks[w * HEADS + head]);
  for (int w = 0; w < WARPS; ++w) {
    float kept = power2(peaks[w * HEADS + head] - peak);
    total += kept * totals[w * HEADS + head];
    mix += kept * mixes[(w * HEADS + head) * VALUE + at];
  }
}

// Merge the items [first, first + splits) of one row and head: four numbers of the mix, divided.
// parts: [items, all_heads, VALUE]; tops: [items, all_heads, 2], peak and total.
template <typename T, int VALUE, bool SINKS>
FN void merge_splits(GLOBAL const float* parts, GLOBAL const float* tops, GLOBAL T* out, float sink,
                     int first, int splits, int all_heads, int head, int four) {
  enum { BATCH = 16 };
  float peak = NEVER, total = 0.0f, mix[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int begin = 0; begin < splits; begin += BATCH) {
    float part[BATCH][4], top[BATCH], weight[BATCH], highest = peak;
    for (int i = 0; i < BATCH; ++i) {
      bool there = begin + i < splits;
      long at = (long)(first + (there ? begin + i : begin)) * all_heads + head;
      fetch_four(parts + at * VALUE + four * 4, part[i]);
      top[i] = there ? fetched(tops + at * 2) : NEVER;
      weight[i] = there ? fetched(tops + at * 2 + 1) : 0.0f;
      highest = larger(highest, top[i]);
    }
    float kept = power2(peak - highest);
    peak = highest; total *= kept;
    for (int d = 0; d < 4; ++d) mix[d] *= kept;
    for (int i = 0; i < BATCH; ++i) {
      float share = begin + i < splits ? power2(top[i] - highest) : 0.0f;
      total += share * weight[i];
      for (int d = 0; d < 4; ++d) mix[d] += share * part[i][d];
    }
  }
  float kept = SINKS ? kept_beside_sink(total, peak, sink) : 1.0f;
  Four<T> four_out;
  for (int d = 0; d < 4; ++d) four_out.at[d] = narrow<T>(mix[d] * kept / total);
  *(GLOBAL Four<T>*)(out + four * 4) = four_out;
}

// A whole item but for the merging of splits. queries: [T, KV * SHARED, KEY]; pages: [blocks,
// BLOCK, KV, dim]; keys, values: the step's rows [T, KV, dim]; sinks: [KV * SHARED], in powers of
// two; out: [T, KV * SHARED, VALUE]. column: K/V head, and which HEADS of the heads that share it.
template <typename Warp, typename T, typename R, int BLOCK, int KEY, int VALUE, int KV, int SHARED,
          int HEADS, int WARPS, bool SINKS>
FN void attend_item(LOCAL const Item& item, int number, int column, GLOBAL const int* plan,
                    GLOBAL const T* queries, GLOBAL const typename R::Unit* key_pages,
                    GLOBAL const typename R::Unit* value_pages,
                    GLOBAL const typename R::Unit* keys, GLOBAL const typename R::Unit* values,
                    GLOBAL const float* sinks, GLOBAL T* out, GLOBAL float* parts, GLOBAL float* tops, float scale,
                    GROUP float* mixes, GROUP float* peaks, GROUP float* totals, int worker) {
  enum {
    COLUMNS = (SHARED + HEADS - 1) / HEADS,
    KEY_UNITS = R::width(KEY),
    VALUE_UNITS = R::width(VALUE)
  };
  int kv_head = column / COLUMNS, from_head = column % COLUMNS * HEADS;
  int heads = SHARED - from_head < HEADS ? SHARED - from_head : HEADS;
  int lane = worker % 32, warp_number = worker / 32;
  long row = item.fresh + item.until - 1;
  long head_row = row * (KV * SHARED) + kv_head * SHARED + from_head;
  Rows<typename R::Unit, BLOCK> rows;
  rows.open(item, plan);
  rows.key_pages = key_pages + kv_head * KEY_UNITS; rows.key_stride = KV * KEY_UNITS;
  rows.value_pages = value_pages + kv_head * VALUE_UNITS; rows.value_stride = KV * VALUE_UNITS;
  rows.fresh_keys = keys + kv_head * KEY_UNITS; rows.fresh_values = values + kv_head * VALUE_UNITS;
  Warp warp;
  warp.begin(queries + head_row * KEY, heads, lane);
  walk(warp, rows, item.begin + warp_number, item.end, WARPS, scale);
  int mine = warp_number * HEADS;
  warp.end(mixes + mine * VALUE, peaks + mine, totals + mine, heads);
  barrier();
  for (int i = worker; i < heads * VALUE; i += WARPS * 32) {
    int head = i / VALUE, at = i % VALUE;
    float peak, total, mix;
    merge_warps<WARPS, HEADS, VALUE>(mixes, peaks, totals, head, at, peak, total, mix);
    if (item.splits == 1) {
      float kept = 1.0f;
      if (SINKS) kept = kept_beside_sink(total, peak, sinks[kv_head * SHARED + from_head + head]);
      out[(head_row + head) * VALUE + at] = narrow<T>(mix * kept / total);
    } else {
      long part = (long)number * (KV * SHARED) + kv_head * SHARED + from_head + head;
      parts[part * VALUE + at] = mix;
      if (at == 0) { tops[part * 2] = peak; tops[part * 2 + 1] = total; }
    }
  }
}

// What merge_splits needs of a row, for all heads of a column.
template <typename T, int VALUE, int KV, int SHARED, int HEADS, bool SINKS>
FN void merge_item(LOCAL const Item& item, int column, GLOBAL const float* sinks, GLOBAL T* out,
                   GLOBAL const float* parts, GLOBAL const float* tops, int worker, int workers) {
  enum { COLUMNS = (SHARED + HEADS - 1) / HEADS };
  int head = column / COLUMNS * SHARED + column % COLUMNS * HEADS;
  int heads = SHARED - column % COLUMNS * HEADS;
  heads = heads < HEADS ? heads : HEADS;
  long row = item.fresh + item.until - 1;
  for (int i = worker; i < heads * (VALUE / 4); i += workers) {
    int mine = head + i / (VALUE / 4);
    merge_splits<T, VALUE, SINKS>(parts, tops, out + (row * (KV * SHARED) + mine) * VALUE,
                                  SINKS ? sinks[mine] : 0.0f, item.first, item.splits, KV * SHARED,
                                  mine, i % (VALUE / 4));
  }
}

// The rows that a piece reads, made dense, and its own rows put into the pages: one call, one four
// of numbers a thread. plan: rows read, sink, low (the first key after the sinks), start, fresh,
// then the table. out_keys, out_values: [KV, rows, dim].
#define FETCH_INTS 5
template <typename T, int BLOCK, int KEY, int VALUE, int KV>
FN void fetch_piece(long number, GLOBAL const int* plan, GLOBAL T* key_pages, GLOBAL T* value_pages,
                    GLOBAL const T* keys, GLOBAL const T* values, GLOBAL T* out_keys,
                    GLOBAL T* out_values) {
  enum { FOURS = KEY / 4 + VALUE / 4 };
  int count = plan[0], sink = plan[1], low = plan[2], start = plan[3], fresh = plan[4];
  if (number >= (long)count * KV * FOURS) return;
  int four = int(number % FOURS), head = int(number / FOURS % KV), at = int(number / FOURS / KV);
  int position = at < sink ? at : at - sink + low;
  bool is_key = four < KEY / 4;
  int width = is_key ? KEY : VALUE;
  int block = plan[FETCH_INTS + position / BLOCK];
  long inside = ((long)block * BLOCK + position % BLOCK) * KV + head;
  four = is_key ? four : four - KEY / 4;
  long from = ((long)(fresh + position) * KV + head) * width;
  long to = ((long)head * count + at) * width;
  GLOBAL T* pages = (is_key ? key_pages : value_pages) + inside * width;
  GLOBAL Four<T>* page = (GLOBAL Four<T>*)pages + four;
  GLOBAL const Four<T>* row = (GLOBAL const Four<T>*)((is_key ? keys : values) + from) + four;
  Four<T> loaded = position < start ? *page : *row;
  if (position >= start) *page = loaded;
  *((GLOBAL Four<T>*)((is_key ? out_keys : out_values) + to) + four) = loaded;
}

// The same, of rows of words: a thread a word, which it may have to make numbers of.
template <typename T, typename R, int BLOCK, int KEY, int VALUE, int KV>
FN void fetch_coded(long number, GLOBAL const int* plan, GLOBAL unsigned* key_pages,
                    GLOBAL unsigned* value_pages, GLOBAL const unsigned* keys,
                    GLOBAL const unsigned* values, GLOBAL T* out_keys, GLOBAL T* out_values) {
  enum { KEY_UNITS = R::width(KEY), VALUE_UNITS = R::width(VALUE), UNITS = KEY_UNITS + VALUE_UNITS };
  int count = plan[0], sink = plan[1], low = plan[2], start = plan[3], fresh = plan[4];
  if (number >= (long)count * KV * UNITS) return;
  int unit = int(number % UNITS), head = int(number / UNITS % KV), at = int(number / UNITS / KV);
  int position = at < sink ? at : at - sink + low;
  bool is_key = unit < KEY_UNITS;
  int width = is_key ? KEY_UNITS : VALUE_UNITS, dim = is_key ? KEY : VALUE;
  unit = is_key ? unit : unit - KEY_UNITS;
  long inside = ((long)plan[FETCH_INTS + position / BLOCK] * BLOCK + position % BLOCK) * KV + head;
  GLOBAL unsigned* page = (is_key ? key_pages : value_pages) + inside * width;
  long from = ((long)(fresh + position) * KV + head) * width;
  GLOBAL const unsigned* row = (is_key ? keys : values) + from;
  if (position >= start) page[unit] = row[unit];
  if (unit * 4 >= dim) return;
  float numbers[4];
  Four<T> made;
  R::four(position < start ? page : row, unit, dim, numbers);
  for (int i = 0; i < 4; ++i) made.at[i] = narrow<T>(numbers[i]);
  long to = ((long)head * count + at) * dim + unit * 4;
  *(GLOBAL Four<T>*)((is_key ? out_keys : out_values) + to) = made;
}
