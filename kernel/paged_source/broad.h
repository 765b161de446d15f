// Products of more rows, as in product.h: blocks take ACROSS tiles, whose warps share x.
//
// From 9 rows on, loads of x for each tile take longer than those of the weights. Here x goes through
// shared memory, in chunks, and is normed on the way there.
#pragma once
#define CHUNK 128  // numbers of each row of x that lie there, while as many are on their way

// A thread's share of a chunk of x: from memory to registers, and from there to shared memory.
template <typename T, int TILES, int WARPS, typename Layer> struct SharedRows {
  enum {
    PIECES = CHUNK / 8,       // of 16 bytes, in a row
    LINE = PIECES + 4,        // of a row in shared memory: two rows' pieces lie in different banks
    STEP = WARPS * 32 / PIECES,
    EACH = TILES * 8 / STEP,  // rows
  };
  uint4 ahead[EACH], by;
  float squares[EACH];
  int row, piece;

  FN void begin() {
    row = threadIdx.x / PIECES; piece = threadIdx.x % PIECES;
#pragma unroll
    for (int i = 0; i < EACH; ++i) squares[i] = 0.0f;
  }
  FN void load(const Layer& layer, const T* x, int count, int width, int chunk) {
    int at = chunk * CHUNK + piece * 8;
    bool there = at < width;
    if (Layer::NORMED) by = there ? load16_again(layer.norm() + at) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      int m = row + i * STEP;
      ahead[i] = there && m < count ? load16_again(x + (long)m * width + at)
                                    : make_uint4(0, 0, 0, 0);
    }
  }
  FN void put(uint4* held) {
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      held[(row + i * STEP) * LINE + piece] =
          Layer::NORMED ? normed_four<T>(ahead[i], by, squares[i]) : ahead[i];
  }
  FN void end(float* all) {
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      for (int reach = 1; reach < PIECES; reach *= 2) squares[i] += shuffle_xor(squares[i], reach);
      if (piece == 0) all[row + i * STEP] = squares[i];
    }
  }
};

// One of ALONG warps that share a tile: each takes its parts of a chunk. Weights go through a ring of
// registers: what was multiplied makes room for what comes DEPTH parts later.
template <typename T, int TILES, int WARPS, int ACROSS, typename Layer> struct BroadWarp {
  typedef SharedRows<T, TILES, WARPS, Layer> Rows;
  enum { DEPTH = 4, ALONG = WARPS / ACROSS, PARTS = CHUNK / PART, PER = PARTS / ALONG };
  uint4 ring[DEPTH][4];
  float sums[TILES][2][4];
  const T* rows[4];
  int line, column, along;

  FN void begin(const Layer& layer, int tile, int lane, int which) {
    line = lane / 4; column = lane % 4; along = which;
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[i] = layer.row(tile, i / 2, line + i % 2 * 8) + column * 8;
#pragma unroll
    for (int t = 0; t < TILES; ++t)
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[t][i / 4][i % 4] = 0.0f;
  }
  // Step number `step`, of PER in a chunk.
  FN void load(uint4 (&into)[4], int step, int first, int width) const {
    int at = (first * PARTS + step / PER * PARTS + step % PER * ALONG + along) * PART;
#pragma unroll
    for (int i = 0; i < 4; ++i) into[i] = at < width ? load16(rows[i] + at) : make_uint4(0, 0, 0, 0);
  }
  // Chunks [first, last). held: room for two.
  FN void walk(const Layer& layer, Rows& mine, uint4* held, const T* x, int count, int width,
               int first, int last) {
    int steps = (last - first) * PER;
#pragma unroll
    for (int j = 0; j < DEPTH; ++j) load(ring[j], j, first, width);
    mine.load(layer, x, count, width, first);
    for (int i = 0; i < steps; i += DEPTH) {
#pragma unroll
      for (int j = 0; j < DEPTH; ++j) {
        if (i + j >= steps) break;
        int chunk = (i + j) / PER;
        uint4* now = held + chunk % 2 * TILES * 8 * Rows::LINE;
        if (j % PER == 0) {
          // Whoever is here has left the chunk before the last, which lay there.
          mine.put(now);
          __syncthreads();
          mine.load(layer, x, count, width, first + chunk + 1);
        }
        const uint4* part = now + (j % PER * ALONG + along) * (PART / 8) + column;
#pragma unroll
        for (int t = 0; t < TILES; ++t)
          multiply_part<T>(sums[t], ring[j], part[(t * 8 + line) * Rows::LINE]);
        load(ring[j], i + j + DEPTH, first, width);
      }
    }
  }
};

// As `product`, of at least two times 8 rows. Grid: SPLITS blocks for each ACROSS tiles; each takes a
// run of chunks, and the last of them to end sums up what stands in `parts`, [SPLITS, 8 * TILES,
// features], and sets their counter back to 0.
template <typename T, int TILES, int WARPS, int ACROSS, int SPLITS, typename Layer>
FN void broad_product(const T* x, int count, int width, const Layer& layer, const T* next,
                      const int* next_shape, unsigned* counters, float* parts) {
  typedef BroadWarp<T, TILES, WARPS, ACROSS, Layer> Warp;
  typedef typename Warp::Rows Rows;
  enum { LINE = 33, ROWS = TILES * 8, ALONG = Warp::ALONG };
  __shared__ uint4 held[2 * ROWS * Rows::LINE];
  __shared__ float squares[ROWS];
  __shared__ bool last;
  float* merged = reinterpret_cast<float*>(held);  // [WARPS, 8, LINE], afterwards
  int warp = threadIdx.x / 32, group = blockIdx.x / SPLITS, split = blockIdx.x % SPLITS;
  int chunks = (width + CHUNK - 1) / CHUNK, stride = gridDim.x / SPLITS * ACROSS * 32;
  Warp mine;
  Rows shared;
  mine.begin(layer, group * ACROSS + warp / ALONG, threadIdx.x % 32, warp % ALONG);
  shared.begin();
  mine.walk(layer, shared, held, x, count, width, chunks * split / SPLITS,
            chunks * (split + 1) / SPLITS);
  ask_ahead(next, next_shape[0], next_shape[1]);
  if (Layer::NORMED) shared.end(squares);
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; ++i)
      merged[(warp * 8 + mine.column * 2 + i % 2) * LINE + mine.line + i / 2 * 8] =
          mine.sums[t][i / 4][i % 4];
    __syncthreads();
    for (int e = threadIdx.x; e < ACROSS * 128; e += WARPS * 32) {
      int at = e % 16, m = e / 16 % 8, which = e / 128, row = t * 8 + m;
      if (row >= count) continue;
      float low = 0.0f, high = 0.0f;
#pragma unroll
      for (int w = 0; w < ALONG; ++w) {
        const float* from = merged + ((which * ALONG + w) * 8 + m) * LINE + at;
        low += from[0];
        high += from[16];
      }
      int tile = group * ACROSS + which;
      float by = Layer::NORMED ? inverse_root(squares[row] / width + layer.eps()) : 1.0f;
      float* to = parts + ((long)split * ROWS + row) * stride + tile * 32 + at;
      if (SPLITS == 1) layer.finish(tile, at, row, low * by, high * by);
      else { to[0] = low; to[16] = high; }
    }
  }
  if (SPLITS == 1) return;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(counters + group, 1u) == SPLITS - 1;
    if (last) counters[group] = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int e = threadIdx.x; e < count * ACROSS * 4; e += WARPS * 32) {
    int at = e % 4 * 4, tile = group * ACROSS + e / 4 % ACROSS, row = e / 4 / ACROSS;
    float low[4] = {}, high[4] = {}, part[SPLITS][2][4];
#pragma unroll
    for (int i = 0; i < SPLITS * 2; ++i)
      fetch_four(parts + ((long)(i / 2) * ROWS + row) * stride + tile * 32 + at + i % 2 * 16,
                 part[i / 2][i % 2]);
#pragma unroll
    for (int i = 0; i < SPLITS * 4; ++i) {
      low[i % 4] += part[i / 4][0][i % 4];
      high[i % 4] += part[i / 4][1][i % 4];
    }
    for (int i = 0; i < 4; ++i) layer.finish(tile, at + i, row, low[i], high[i]);
  }
}
