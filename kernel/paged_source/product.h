// Up to 8 rows times a layer's weights, on CUDA's tensor cores: out[m, n] = sum over k of
// x[m, k] w[n, k]. More rows, and large weights on Hopper, are wide.h's.
//
// A block of WARPS warps takes a tile of 32 rows of weights. The warps share its k among them, and the
// block adds up what they have. K goes in parts of 32; weights go from memory to registers, each
// once, as in tensor.h: the numbers of a part may be summed in any order that both sides agree on,
// so a lane's 8 numbers (16 bytes) serve two products.
//
// What a tile's rows are, and what becomes of its sums, is said by a struct:
//   row(tile, half, at)        where row `at` of 16 of either half of a tile begins
//   ahead(tile, at, m)         what finish needs from memory for row `at` of both halves and row m of x
//   finish(tile, at, m, low, high, ahead)   the sums of these
//   NORMED, norm(), eps()      whether x is to be normed here (RMSNorm), by which weights
// Rows are normed on the way: their numbers times the norm's weights go into the product, their
// squares are summed beside it, and the sums are divided in the end.
#pragma once
#define PART 32

// Two numbers of a row of x, times the norm's weights for them.
template <typename T> FN unsigned normed(unsigned two, unsigned by, float& square) {
  float low = low_of(two, T()), high = high_of(two, T());
  square += low * low + high * high;
  return packed(low * low_of(by, T()), high * high_of(by, T()), T());
}
template <typename T> FN uint4 normed_four(uint4 b, uint4 by, float& square) {
  return make_uint4(normed<T>(b.x, by.x, square), normed<T>(b.y, by.y, square),
                    normed<T>(b.z, by.z, square), normed<T>(b.w, by.w, square));
}
// 32 rows of weights times 8 rows of x, in a part.
template <typename T> FN void multiply_part(float (&sums)[2][4], const uint4 (&w)[4], uint4 b) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint4 p = w[half * 2], q = w[half * 2 + 1];
    multiply(sums[half], p.x, q.x, p.y, q.y, b.x, b.y, T());
    multiply(sums[half], p.z, q.z, p.w, q.w, b.z, b.w, T());
  }
}
template <typename T, typename Layer> struct ProductWarp {
  enum { PARTS = 2 };  // on their way while as many are multiplied
  uint4 weights[PARTS][4];
  float sums[2][4], square;
  const T* rows[4];    // this lane's, of A's rows: `line` and `line` + 8 of either half
  int line, column;

  FN void begin(const Layer& layer, int tile, int lane) {
    line = lane / 4; column = lane % 4;
    square = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[i] = layer.row(tile, i / 2, line + i % 2 * 8) + column * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i / 4][i % 4] = 0.0f;
  }
  FN void load(uint4 (&into)[PARTS][4], int first, int parts) const {
#pragma unroll
    for (int j = 0; j < PARTS; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        into[j][i] = first + j < parts ? load16(rows[i] + (first + j) * PART)
                                       : make_uint4(0, 0, 0, 0);
  }
  FN void multiply_parts(const Layer& layer, const T* x, int count, int width, int first,
                         int parts) {
#pragma unroll
    for (int j = 0; j < PARTS; ++j) {
      const uint4 (&w)[4] = weights[j];
      bool there = first + j < parts;
      int at = (first + j) * PART + column * 8;
      uint4 by = Layer::NORMED && there ? load16_again(layer.norm() + at) : make_uint4(0, 0, 0, 0);
      uint4 b = line < count && there ? load16_again(x + (long)line * width + at)
                                      : make_uint4(0, 0, 0, 0);
      if (Layer::NORMED) b = normed_four<T>(b, by, square);
      multiply_part<T>(sums, w, b);
    }
  }
  // All parts that are this warp's: every `warps`-th run of PARTS.
  FN void walk(const Layer& layer, const T* x, int count, int width, int warp, int warps) {
    int parts = width / PART, stride = warps * PARTS;
    uint4 next[PARTS][4];
    load(next, warp * PARTS, parts);
    for (int first = warp * PARTS; first < parts; first += stride) {
#pragma unroll
      for (int i = 0; i < PARTS * 4; ++i) weights[i / 4][i % 4] = next[i / 4][i % 4];
      load(next, first + stride, parts);
      multiply_parts(layer, x, count, width, first, parts);
    }
    if (Layer::NORMED)
      for (int reach = 1; reach < 4; reach *= 2) square += shuffle_xor(square, reach);
  }
};

// x: [count, width], count up to 8. Grid: a block a tile.
template <typename T, int WARPS, typename Layer>
FN void product(const T* x, int count, int width, const Layer& layer) {
  enum { LINE = 33 };  // one more than it holds: columns then lie in different banks
  __shared__ float merged[WARPS][8][LINE], squares[WARPS][8];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  ProductWarp<T, Layer> mine;
  mine.begin(layer, blockIdx.x, lane);
  mine.walk(layer, x, count, width, warp, WARPS);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    merged[warp][mine.column * 2 + i % 2][mine.line + i / 2 * 8] = mine.sums[i / 4][i % 4];
  if (mine.column == 0) squares[warp][mine.line] = mine.square;
  __syncthreads();
  int at = threadIdx.x % 16, m = threadIdx.x / 16;
  if (m >= count) return;
  float low = 0.0f, high = 0.0f, square = 0.0f;
  for (int w = 0; w < WARPS; ++w) {
    low += merged[w][m][at];
    high += merged[w][m][at + 16];
    square += squares[w][m];
  }
  float scale = Layer::NORMED ? inverse_root(square / width + layer.eps()) : 1.0f;
  layer.finish(blockIdx.x, at, m, low * scale, high * scale, layer.ahead(blockIdx.x, at, m));
}

// out = base + x w: what a block of layers adds to what it was given.
template <typename T> struct Added {
  enum { NORMED = 0 };
  struct Ahead { float low, high; };
  const T* weights;
  const T* base;
  T* out;
  int width, features;

  FN const T* norm() const { return weights; }
  FN float eps() const { return 0.0f; }
  FN const T* row(int tile, int half, int at) const {
    return weights + (long)(tile * 32 + half * 16 + at) * width;
  }
  FN long place(int tile, int at, int m) const { return (long)m * features + tile * 32 + at; }
  FN Ahead ahead(int tile, int at, int m) const {
    const T* from = base + place(tile, at, m);
    return {constant(from), constant(from + 16)};
  }
  FN void finish(int tile, int at, int m, float low, float high, const Ahead& given) const {
    T* to = out + place(tile, at, m);
    to[0] = narrow<T>(low + given.low);
    to[16] = narrow<T>(high + given.high);
  }
};

// out = silu(x gate) * (x up), of x normed. weights: `features` rows of the gate, then those of up.
template <typename T, bool NORMED_HERE> struct Gated {
  enum { NORMED = NORMED_HERE };
  struct Ahead {};
  const T* norm_weights;
  const T* weights;
  T* out;
  int width, features;
  float norm_eps;

  FN const T* norm() const { return norm_weights; }
  FN float eps() const { return norm_eps; }
  FN const T* row(int tile, int half, int at) const {
    return weights + (long)((half ? features : 0) + tile * 16 + at) * width;
  }
  FN Ahead ahead(int, int, int) const { return {}; }
  FN void finish(int tile, int at, int m, float low, float high, const Ahead&) const {
    float silu = low / (1.0f + power2(low * -1.4426950408889634f));
    out[(long)m * features + tile * 16 + at] = narrow<T>(silu * high);
  }
};

// Queries and keys, turned by their positions (RoPE), and values, of x normed. DIM: of a head. The
// numbers of a pair stand side by side where it is TRADITIONAL, else half a head apart. rates:
// [DIM / 2], the angle a position.
template <typename T, int DIM, bool TRADITIONAL, bool NORMED_HERE> struct Heads {
  enum { NORMED = NORMED_HERE, QUERIES = 0, KEYS = 1, VALUES = 2 };
  struct Ahead { float across, along; };
  const T* norm_weights;
  const T *queries, *keys, *values;
  T *out_queries, *out_keys, *out_values;
  int query_features, key_features, value_features;
  const int* positions;
  const float* rates;
  int width;
  float norm_eps;

  FN const T* norm() const { return norm_weights; }
  FN float eps() const { return norm_eps; }
  // Which of the three a tile is of; makes it a number among these.
  FN int of(int& tile) const {
    if (tile < query_features / 32) return QUERIES;
    tile -= query_features / 32;
    if (tile < key_features / 32) return KEYS;
    tile -= key_features / 32;
    return VALUES;
  }
  FN int feature(int which, int tile, int half, int at) const {
    if (which == VALUES) return tile * 32 + half * 16 + at;
    if (TRADITIONAL) return tile * 32 + at * 2 + half;
    return tile / (DIM / 32) * DIM + tile % (DIM / 32) * 16 + at + half * (DIM / 2);
  }
  FN const T* row(int tile, int half, int at) const {
    int which = of(tile);
    const T* weights = which == QUERIES ? queries : which == KEYS ? keys : values;
    return weights + (long)feature(which, tile, half, at) * width;
  }
  FN Ahead ahead(int tile, int at, int m) const {
    if (of(tile) == VALUES) return {1.0f, 0.0f};
    float angle = constant(positions + m) * constant(rates + tile % (DIM / 32) * 16 + at);
    return {cosine(angle), sine(angle)};
  }
  FN void finish(int tile, int at, int m, float low, float high, const Ahead& turn) const {
    int which = of(tile);
    int features = which == QUERIES ? query_features : which == KEYS ? key_features : value_features;
    T* out = which == QUERIES ? out_queries : which == KEYS ? out_keys : out_values;
    out += (long)m * features;
    out[feature(which, tile, 0, at)] = narrow<T>(low * turn.across - high * turn.along);
    out[feature(which, tile, 1, at)] = narrow<T>(low * turn.along + high * turn.across);
  }
};
