// Up to 64 rows times a layer's weights, on Hopper's own matrix instructions; layers are product.h's.
//
// A block of 256 threads takes TILES tiles of 32 rows of weights, and a part of k: blocks that share
// tiles leave their sums in `parts`, and the last of them adds up and finishes. Weights and x come
// into shared memory by asynchronous copies, in stages of STEP numbers of k, of which all but one are
// on their way while that one is multiplied.
//
// A stage's rows are 128 bytes, weights first; piece p (16 bytes) of row r stands at p ^ r % 8, as the
// instruction wants it. Of each 16 rows of weights the first 8 are of a tile's one half, the others of
// its other half, so that both sums that a layer's finish takes are in the same thread:
//   sums[4j + e], [4j + 2 + e]: rows `line` of either half, with row 8j + 2 * column + e of x
#pragma once
#define STEP 64

template <typename T, int ROWS, int TILES, int SPLITS, int STAGES, typename Layer>
struct WideBlock {
  enum {
    THREADS = 256,
    UNITS = (TILES + 1) / 2,          // of 64 rows of weights
    MINE = (UNITS + 1) / 2,           // of them, a warpgroup's
    LINES = (ROWS + 31) / 32,         // rows of x that a thread brings pieces of
    WEIGHTS = TILES * 32 * STEP,      // numbers of a stage that are weights
    STAGE = WEIGHTS + ROWS * STEP,
    SUMS = MINE * ROWS / 2 * THREADS, // a block's
    SHARE = SUMS + ROWS               // with the squares of its rows
  };
  float sums[MINE][ROWS / 2], squares[LINES];
  typename Layer::Ahead ahead[MINE][ROWS / 4];
  const T *weights[TILES], *rows[LINES];
  T *stages, *norms;                  // in shared memory; norms: the norm's weights for its steps
  int piece, width, from, until;

  FN void begin(const Layer& layer, const T* x, int count, int of_width, int first, int tiles) {
    int line = threadIdx.x / 8;
    piece = threadIdx.x % 8; width = of_width;
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
      int tile = first + j < tiles ? first + j : tiles - 1;
      weights[j] = layer.row(tile, line / 8 % 2, line / 16 * 8 + line % 8) + piece * 8;
    }
#pragma unroll
    for (int j = 0; j < LINES; ++j) {
      int m = j * 32 + line;
      rows[j] = m < count ? x + (long)m * width + piece * 8 : nullptr;
      squares[j] = 0.0f;
    }
#pragma unroll
    for (int i = 0; i < MINE * ROWS / 2; ++i) sums[i / (ROWS / 2)][i % (ROWS / 2)] = 0.0f;
  }
  FN bool brings(int j) const { return ROWS >= 32 || threadIdx.x / 8 < ROWS; }
  // Where the first piece that a thread brings stands, among weights and rows of x.
  FN int place() const {
    int line = threadIdx.x / 8;
    return line * STEP + (piece ^ line % 8) * 8;
  }
  // Ask for a step: zeros beyond the width and the rows of x.
  FN void load(T* stage, int step) const {
    if (step < until) {
      int k = step * STEP;
      bool there = k + piece * 8 < width;
#pragma unroll
      for (int j = 0; j < TILES; ++j)
        copy16(stage + place() + j * 32 * STEP, there ? weights[j] + k : weights[j], there);
#pragma unroll
      for (int j = 0; j < LINES; ++j) {
        bool given = there && rows[j];
        T* to = stage + WEIGHTS + place() + j * 32 * STEP;
        if (brings(j)) copy16(to, given ? rows[j] + k : weights[0], given);
      }
    }
    end_copies();
  }
  FN void load_norm(const Layer& layer) const {
    for (int i = threadIdx.x; i < (until - from) * 8; i += THREADS) {
      int k = from * STEP + i * 8;
      copy16(norms + i * 8, layer.norm() + (k < width ? k : 0), k < width);
    }
  }
  FN void start(const Layer& layer, T* room, int first_step, int end) {
    from = first_step; until = end;
    stages = room; norms = room + STAGES * STAGE;
    if (Layer::NORMED) load_norm(layer);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) load(stages + i * STAGE, from + i);
  }
  // What the end will need, while the first step is on its way.
  FN void look_ahead(const Layer& layer, int count, int first, int tiles) {
#pragma unroll
    for (int i = 0; i < MINE * ROWS / 4; ++i) {
      int u = i / (ROWS / 4), m = row_of(i % (ROWS / 4)), tile = first + tile_of(u);
      ahead[u][i % (ROWS / 4)] =
          layer.ahead(tile < tiles ? tile : tiles - 1, at(), m < count ? m : count - 1);
    }
  }
  // Norm the pieces of x that this thread brought.
  FN void norm_rows(T* stage, int step) {
    uint4 by = *reinterpret_cast<const uint4*>(norms + (step - from) * STEP + piece * 8);
#pragma unroll
    for (int j = 0; j < LINES; ++j) {
      uint4* x = reinterpret_cast<uint4*>(stage + WEIGHTS + place() + j * 32 * STEP);
      if (brings(j)) *x = normed_four<T>(*x, by, squares[j]);
    }
  }
  // Odd units leave the last warpgroup one that another has, too; and half a unit, what stands behind.
  FN void multiply_step(const T* stage) {
    begin_products();
#pragma unroll
    for (int u = 0; u < MINE; ++u) {
      int unit = u * 2 + threadIdx.x / 128;
      const T* a = stage + (unit < UNITS ? unit : UNITS - 1) * 64 * STEP;
#pragma unroll
      for (int k = 0; k < STEP; k += 16) multiply64(sums[u], a + k, stage + WEIGHTS + k);
    }
    end_products();
  }
  FN void walk() {
    int now = 0, last = STAGES - 1;
    if (Layer::NORMED) {  // its weights came with the first step, brought by any thread
      wait_copies<STAGES - 2>();
      barrier();
    }
    for (int step = from; step < until; ++step) {
      wait_copies<STAGES - 2>();
      if (Layer::NORMED) norm_rows(stages + now * STAGE, step);
      show_copies();
      wait_products();
      barrier();
      multiply_step(stages + now * STAGE);
      load(stages + last * STAGE, step + STAGES - 1);
      last = now;
      now = now + 1 < STAGES ? now + 1 : 0;
    }
    wait_products();
#pragma unroll
    for (int j = 0; j < LINES; ++j)
      for (int reach = 1; reach < 8; reach *= 2) squares[j] += shuffle_xor(squares[j], reach);
  }
  FN int four(int i) const { return (i * THREADS + threadIdx.x) * 4; }
  // This block's sums, for the last one.
  FN void put(float* share, const float* of_rows) const {
#pragma unroll
    for (int i = 0; i < MINE * ROWS / 8; ++i)
      store_four(share + four(i), sums[i / (ROWS / 8)] + i % (ROWS / 8) * 4);
    if (Layer::NORMED && threadIdx.x < ROWS) share[SUMS + threadIdx.x] = of_rows[threadIdx.x];
  }
  // The sums of all, in one order whichever block is the last.
  FN void take(const float* shares, float* of_rows) {
#pragma unroll
    for (int i = 0; i < MINE * ROWS / 8; ++i) {
      float* sum = sums[i / (ROWS / 8)] + i % (ROWS / 8) * 4;
      float more[SPLITS][4];
#pragma unroll
      for (int s = 0; s < SPLITS; ++s) fetch_four(shares + s * SHARE + four(i), more[s]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sum[e] = more[0][e];
#pragma unroll
        for (int s = 1; s < SPLITS; ++s) sum[e] += more[s][e];
      }
    }
    if (!Layer::NORMED || threadIdx.x >= ROWS) return;
    float square = 0.0f;
    for (int s = 0; s < SPLITS; ++s) square += fetched(shares + s * SHARE + SUMS + threadIdx.x);
    of_rows[threadIdx.x] = square;
  }
  // The i-th pair of sums of a unit: its row of x, its tile of the block's, its row of the tile.
  FN int row_of(int i) const { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }
  FN int tile_of(int u) const { return (u * 2 + threadIdx.x / 128) * 2 + threadIdx.x / 64 % 2; }
  FN int at() const { return threadIdx.x / 32 % 2 * 8 + threadIdx.x % 32 / 4; }
  FN void finish(const Layer& layer, const float* of_rows, int count, int first, int tiles) const {
#pragma unroll
    for (int i = 0; i < ROWS / 4; ++i) {
      int m = row_of(i), sum = i / 2 * 4 + i % 2;
      if (m >= count) continue;
      float scale = Layer::NORMED ? inverse_root(of_rows[m] / width + layer.eps()) : 1.0f;
#pragma unroll
      for (int u = 0; u < MINE; ++u) {
        int tile = tile_of(u);
        if (tile < TILES && first + tile < tiles)
          layer.finish(first + tile, at(), m, sums[u][sum] * scale, sums[u][sum + 2] * scale,
                       ahead[u][i]);
      }
    }
  }
};

// x: [count, width], count up to ROWS; tiles: of all weights. Grid: SPLITS blocks for each TILES
// tiles. parts: [blocks, SHARE], where SPLITS is more than one; counters: zeros, one for each TILES
// tiles, which are zeros again afterwards. Shared memory: STAGES stages, the norm's weights for a
// block's steps, and 4 KB, since half a unit reads what stands behind it.
template <typename T, int ROWS, int TILES, int SPLITS, int STAGES, typename Layer>
FN void wide_product(const T* x, int count, int width, int tiles, float* parts, unsigned* counters,
                     const Layer& layer) {
  typedef WideBlock<T, ROWS, TILES, SPLITS, STAGES, Layer> Block;
  __shared__ float squares[ROWS];
  __shared__ bool last;
  int group = blockIdx.x / SPLITS, split = blockIdx.x % SPLITS, first = group * TILES;
  int steps = (width + STEP - 1) / STEP, worker = threadIdx.x;
  Block mine;
  mine.begin(layer, x, count, width, first, tiles);
  mine.start(layer, static_cast<T*>(shared_room()), steps * split / SPLITS,
             steps * (split + 1) / SPLITS);
  mine.look_ahead(layer, count, first, tiles);
  mine.walk();
#pragma unroll
  for (int j = 0; j < Block::LINES; ++j)
    if (worker % 8 == 0 && mine.brings(j)) squares[j * 32 + worker / 8] = mine.squares[j];
  barrier();
  if (SPLITS > 1) {
    float* shares = parts + (long)group * SPLITS * Block::SHARE;
    mine.put(shares + split * Block::SHARE, squares);
    __threadfence();
    barrier();
    if (worker == 0) last = atomicInc(counters + group, SPLITS - 1) == SPLITS - 1;
    barrier();
    if (!last) return;
    __threadfence();
    mine.take(shares, squares);
    barrier();
  }
  mine.finish(layer, squares, count, first, tiles);
}
