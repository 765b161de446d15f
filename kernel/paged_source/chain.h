// What lies between two attentions, in one launch of product.h's products: out + sum, norm + gate
// and up + SwiGLU, down + sum, and the next layer's norm + queries, keys and values + RoPE.
//
// Each of these is a phase, whose tiles wait until all tiles of the phase before are done. All tiles
// stand in one order, and a block takes the next one that nobody took, again and again, until none
// is left. So a tile that somebody waits for is always at a block that runs and waits for earlier
// ones at most: however few of the blocks run at once, and whatever else runs beside them, the
// launch comes to an end. Weights wait for nothing: a block asks for the first of its next tile's
// before its sums are made, and before it waits.
//
// What another block wrote is read by plain loads. They see it: who wrote it met its block, and one
// thread of it fenced before it counted the tiles; who reads it met a thread that saw the count and
// fenced, which empties the first cache.
#pragma once

// counters: zeros, which are zeros again when the launch has ended. Each in a line of its own.
enum { COUNTER_LINE = 32, TAKEN = 0, LEFT = 1, DONE = 2, PHASES = 4 };

template <int WARPS> struct ChainShared {
  Merge<WARPS> merge;
  unsigned place;
};
// A warp's weights on their way from memory to shared memory, by runs of PARTS. A lane takes from
// there what it has put there itself, so that nobody else has to be waited for.
template <typename T, int RUNS> struct Ring {
  enum { PARTS = ProductWarp<T, 1>::PARTS, WORDS = RUNS * PARTS * 4 * 32 };
  uint4* words;  // WORDS, of which every 32nd is this lane's
  Rows<T> rows;

  FN void ask(int run, int first) {
#pragma unroll
    for (int j = 0; j < PARTS; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bool there = first + j < rows.parts;
        copy16(words + ((run * PARTS + j) * 4 + i) * 32,
               rows.rows[i] + (there ? first + j : 0) * PART, there);
      }
    copies_end();
  }
  FN void take(int run, uint4 (&weights)[PARTS][4]) const {
    copies_wait<RUNS - 1>();
#pragma unroll
    for (int i = 0; i < PARTS * 4; ++i) weights[i / 4][i % 4] = words[(run * PARTS * 4 + i) * 32];
  }
};
// In place of the heads, after the last layer.
template <typename T> struct NoHeads {
  enum { NORMED = 0, width = 0 };
  FN const T* norm() const { return nullptr; }
  FN float eps() const { return 0.0f; }
  FN int tiles() const { return 0; }
  FN const T* row(int, int, int) const { return nullptr; }
  FN void finish(int, int, int, float, float) const {}
};

template <typename T, int WARPS, int RUNS, typename Last> struct Chain {
  enum { PARTS = Ring<T, RUNS>::PARTS };
  const T* x;
  const Added<T>& out;
  const Gated<T>& gated;
  const Added<T>& down;
  const Last& last;
  unsigned* counters;
  ChainShared<WARPS>* shared;
  int count, lane, warp;
  Ring<T, RUNS> ring;
  int phase, tile;  // what this block took last; PHASES if there was nothing left

  // Calls with the layer of a phase, and with what this reads.
  template <typename Call> FN void at(int phase, Call call) const {
    if (phase == 0) call(out, x);
    else if (phase == 1) call(gated, (const T*)out.out);
    else if (phase == 2) call(down, (const T*)gated.out);
    else call(last, (const T*)down.out);
  }
  FN unsigned* counter(int which) const { return counters + which * COUNTER_LINE; }
  // A place that nobody took, for the block's first thread.
  FN unsigned take() const { return threadIdx.x == 0 ? atomicAdd(counter(TAKEN), 1u) : 0u; }
  FN void find(int place) {
    phase = 0; tile = place;
    if (tile < out.tiles()) return;
    phase = 1; tile -= out.tiles();
    if (tile < gated.tiles()) return;
    phase = 2; tile -= gated.tiles();
    if (tile < down.tiles()) return;
    phase = 3; tile -= down.tiles();
    if (tile >= last.tiles()) phase = PHASES;
  }
  // Every WARPS-th run is a warp's.
  FN void ask() {
    if (phase == PHASES) return;
    at(phase, [&](const auto& layer, const T*) { ring.rows.begin(layer, tile, lane); });
    for (int run = 0; run < RUNS; ++run) ring.ask(run, (warp + run * WARPS) * PARTS);
  }
  template <typename Layer>
  FN void walk(ProductWarp<T, 1>& mine, const Layer& layer, const T* x) {
    int run = 0, parts = ring.rows.parts;
    for (int first = warp * PARTS; first < parts; first += WARPS * PARTS) {
      uint4 weights[PARTS][4];
      ring.take(run, weights);
      mine.multiply_parts(layer, x, count, weights, first, parts);
      ring.ask(run, first + RUNS * WARPS * PARTS);
      run = (run + 1) % RUNS;
    }
    copies_wait<0>();  // of nothing: what is asked for next may take the same places
    mine.template share_squares<Layer>();
  }
  FN void wait_for(int phase) const {
    if (threadIdx.x == 0) {
      unsigned tiles = 0;
      at(phase, [&](const auto& layer, const T*) { tiles = layer.tiles(); });
      while (seen(counter(DONE + phase)) < tiles) {}
      fence();
    }
    __syncthreads();
  }
  // By the thread that takes tiles, before its warp asks for more weights: a fence may wait for all
  // that was asked for. The last phase, `newest`, is not told of.
  FN void tell(int phase, int tiles) const {
    if (threadIdx.x == 0) {
      fence();
      atomicAdd(counter(DONE + phase), (unsigned)tiles);
    }
  }
  FN void run() {
    unsigned taken = take();
    if (threadIdx.x == 0) shared->place = taken;
    __syncthreads();
    find(shared->place);
    leave();
    ask();
    int ready = 0, done = 0, newest = last.tiles() ? PHASES - 1 : PHASES - 2;
    while (phase < PHASES) {
      if (phase != ready) wait_for(phase - 1);
      ready = phase;
      taken = take();
      ProductWarp<T, 1> mine;
      mine.begin(lane);
      at(phase, [&](const auto& layer, const T* x) { walk(mine, layer, x); });
      __syncthreads();
      shared->merge.give(mine, 0, warp);
      if (threadIdx.x == 0) shared->place = taken;
      __syncthreads();
      int now = phase, here = tile;
      ++done;
      find(shared->place);
      leave();
      bool tells = phase != now && now != newest, late = tells && warp == 0;
      if (!late) ask();
      at(now, [&](const auto& layer, const T*) {
        shared->merge.finish(layer, here, 0, count);
      });
      if (tells) {
        __syncthreads();
        tell(now, done);
        done = 0;
        if (late) ask();
      }
    }
  }
  // By a block that found nothing left, while it sums what it has in hand. The last one makes the
  // counters zeros: nobody looks at them any more, since all have waited for what they have in hand;
  // and all was told, since whoever has a tile of the last phase waited for it before he left.
  FN void leave() const {
    if (phase != PHASES || threadIdx.x != WARPS * 32 - 1) return;
    if (atomicAdd(counter(LEFT), 1u) + 1 < (unsigned)gridDim.x) return;
    fence();
    for (int i = 0; i < DONE + PHASES; ++i) *counter(i) = 0;
  }
};

// x: [count, out.width], count up to 8. Any grid. Shared memory: WARPS rings.
template <typename T, int WARPS, int RUNS, typename Last>
FN void chain(const T* x, int count, unsigned* counters, const Added<T>& out,
              const Gated<T>& gated, const Added<T>& down, const Last& last) {
  __shared__ ChainShared<WARPS> shared;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Chain<T, WARPS, RUNS, Last> block{x,        out,     gated, down, last,
                                    counters, &shared, count, lane, warp};
  block.ring.words = shared_words() + warp * Ring<T, RUNS>::WORDS + lane;
  block.run();
}
