// A warp of decode.h on CUDA's tensor cores, for 16-bit pages, and the kernels. K and V go from
// memory to registers, 16 bytes a load, as the products take them: no shared memory on the way.
//
// lane = 4 * line + column. A product D[16, 8] += A[16, 16] B[16, 8] takes, from each lane,
//   A  a0: row `line`, a1: row `line` + 8, numbers 2 * column and the next; a2, a3: those 8 further
//   B  b0: column `line`, numbers 2 * column and the next; b1: those 8 further
//   D  d0, d1: row `line`, columns 2 * column and the next; d2, d3: row `line` + 8
//
// Scores [16 keys, 8 heads]: the order of the numbers summed over is free as long as A and B agree,
// so a lane's 8 numbers of a key (16 bytes) serve two products.
// Mixes [16 dims, 8 heads]: A is V turned, pairs of keys by byte_perm; B is the weights turned.
// With 4 heads or fewer the other 4 columns repeat them, and take what the rounding of a weight to
// 16 bits leaves over: the sum of both is exact to 16 bits.
#pragma once

template <typename T, int BLOCK, int KEY, int VALUE, int HEADS> struct TensorWarp {
  enum {
    KEY_PARTS = (KEY + 31) / 32,     // 4 lanes of 8 numbers
    VALUE_PARTS = (VALUE + 63) / 64, // 8 lanes of 8 numbers
    TWICE = HEADS <= 4
  };
  uint4 query[KEY_PARTS], key[2][KEY_PARTS], value[VALUE_PARTS][4];
  float mix[VALUE_PARTS * 4][4], scores[4], peak[2], total[2];
  int line, column;

  FN void begin(const T* queries, int heads, int lane) {
    line = lane / 4; column = lane % 4;
    peak[0] = peak[1] = NEVER;
    total[0] = total[1] = 0.0f;
    int head = TWICE ? line % 4 : line;
#pragma unroll
    for (int j = 0; j < KEY_PARTS; ++j)
      query[j] = part(queries + head * KEY, j * 4 + column, head < heads ? KEY : 0);
#pragma unroll
    for (int i = 0; i < VALUE_PARTS * 4; ++i) mix[i][0] = mix[i][1] = mix[i][2] = mix[i][3] = 0.0f;
  }
  // Eight numbers of a row, zeros beyond its end.
  FN uint4 part(const T* row, int eight, int width) const {
    return eight * 8 < width ? load16(row + eight * 8) : make_uint4(0, 0, 0, 0);
  }
  FN void load_keys(const Rows<T, BLOCK>& rows, int tile, int base) {
    int first = rows.first_of(tile);
    bool plain = rows.plain(first);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int at = line + half * 8;
      const T* row = plain ? rows.key_at(base + at) : rows.key(first + at);
#pragma unroll
      for (int j = 0; j < KEY_PARTS; ++j) key[half][j] = part(row, j * 4 + column, KEY);
    }
  }
  FN void load_values(const Rows<T, BLOCK>& rows, int tile, int base) {
    int first = rows.first_of(tile);
    bool plain = rows.plain(first);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int at = column * 2 + i % 2 + i / 2 * 8;
      const T* row = plain ? rows.value_at(base + at) : rows.value(first + at);
#pragma unroll
      for (int j = 0; j < VALUE_PARTS; ++j) value[j][i] = part(row, j * 8 + line, VALUE);
    }
  }
  FN void score() {
    scores[0] = scores[1] = scores[2] = scores[3] = 0.0f;
#pragma unroll
    for (int j = 0; j < KEY_PARTS; ++j) {
      uint4 a = key[0][j], b = key[1][j], q = query[j];
      multiply(scores, a.x, b.x, a.y, b.y, q.x, q.y, T());
      multiply(scores, a.z, b.z, a.w, b.w, q.z, q.w, T());
    }
  }
  FN void weigh(const Rows<T, BLOCK>& rows, int tile, float scale) {
    int first = rows.first_of(tile);
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[i] *= scale;
    if (!rows.plain(first)) {
      if (!rows.sees(first + line)) scores[0] = scores[1] = NEVER;
      if (!rows.sees(first + line + 8)) scores[2] = scores[3] = NEVER;
    }
    float kept[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float top = larger(scores[i], scores[i + 2]);
#pragma unroll
      for (int reach = 4; reach < 32; reach *= 2) top = larger(top, shuffle_xor(top, reach));
      top = larger(top, peak[i]);
      kept[i] = power2(peak[i] - top);
      peak[i] = top;
      scores[i] = power2(scores[i] - top);
      scores[i + 2] = power2(scores[i + 2] - top);
      total[i] = total[i] * kept[i] + scores[i] + scores[i + 2];
    }
    unsigned low = turned(weights(scores[0], scores[1]));
    unsigned high = turned(weights(scores[2], scores[3]));
#pragma unroll
    for (int i = 0; i < VALUE_PARTS * 4; ++i) {
      mix[i][0] *= kept[0]; mix[i][1] *= kept[1]; mix[i][2] *= kept[0]; mix[i][3] *= kept[1];
    }
#pragma unroll
    for (int j = 0; j < VALUE_PARTS; ++j) {
      const uint4 *v = value[j];
      mix_two(mix[j * 4], v[0].x, v[1].x, v[2].x, v[3].x, low, high);
      mix_two(mix[j * 4 + 1], v[0].y, v[1].y, v[2].y, v[3].y, low, high);
      mix_two(mix[j * 4 + 2], v[0].z, v[1].z, v[2].z, v[3].z, low, high);
      mix_two(mix[j * 4 + 3], v[0].w, v[1].w, v[2].w, v[3].w, low, high);
    }
  }
  // Two heads' weights of a key in 16 bits; in the repeated columns, what that leaves over.
  FN unsigned weights(float one, float two) const {
    unsigned rounded = packed(one, two, T());
    if (!TWICE || column < 2) return rounded;
    return packed(one - low_of(rounded, T()), two - high_of(rounded, T()), T());
  }
  // Two dims of four keys each.
  FN void mix_two(float (&into)[4], unsigned a, unsigned b, unsigned c, unsigned d, unsigned low,
                  unsigned high) {
    multiply(into, __byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x5410),
             __byte_perm(c, d, 0x7632), low, high, T());
  }
  FN void end(float* mixes, float* peaks, float* totals, int heads) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int head = column * 2 + i;
#pragma unroll
      for (int reach = 4; reach < 32; reach *= 2) total[i] += shuffle_xor(total[i], reach);
      if (line == 0 && head < heads) { peaks[head] = peak[i]; totals[head] = total[i]; }
#pragma unroll
      for (int j = 0; j < VALUE_PARTS * 4; ++j) {
        float even = mix[j][i], odd = mix[j][i + 2];
        if (TWICE) { even += shuffle_xor(even, 2); odd += shuffle_xor(odd, 2); }
        int dim = j / 4 * 64 + line * 8 + j % 4 * 2;
        if (head < heads && (!TWICE || column < 2) && dim < VALUE) {
          mixes[head * VALUE + dim] = even;
          mixes[head * VALUE + dim + 1] = odd;
        }
      }
    }
  }
};

// Pages of 16-bit numbers go to tensor cores, others to plain arithmetic.
template <typename T, typename R, int BLOCK, int KEY, int VALUE, int HEADS,
          bool TENSOR = R::PLAIN && sizeof(T) == 2 && KEY % 8 == 0 && VALUE % 8 == 0>
struct WarpOf { typedef PlainWarp<T, R, BLOCK, KEY, VALUE, HEADS> type; };
template <typename T, typename R, int BLOCK, int KEY, int VALUE, int HEADS>
struct WarpOf<T, R, BLOCK, KEY, VALUE, HEADS, true> {
  typedef TensorWarp<T, BLOCK, KEY, VALUE, HEADS> type;
};

// Grid: x = K/V heads times columns of heads, y = items; items without splits fill a plan up. Pages
// are written in place, each row by the block that has its last item. The last block of a row's
// items merges them, and sets their counter back to 0.
template <typename T, typename R, int BLOCK, int KEY, int VALUE, int KV, int SHARED, int HEADS,
          int WARPS, bool SINKS>
FN void decode(const int* plan, const T* queries, const typename R::Unit* key_pages,
               const typename R::Unit* value_pages, const typename R::Unit* keys,
               const typename R::Unit* values, const float* sinks, unsigned* counters, T* out,
               float* parts, float* tops, float scale) {
  typedef typename R::Unit Unit;
  enum { COLUMNS = (SHARED + HEADS - 1) / HEADS };
  alignas(16) __shared__ float mixes[WARPS * HEADS * VALUE];
  __shared__ float peaks[WARPS * HEADS], totals[WARPS * HEADS];
  __shared__ bool last;
  typedef typename WarpOf<T, R, BLOCK, KEY, VALUE, HEADS>::type Warp;
  int worker = threadIdx.x, column = blockIdx.x, number = blockIdx.y;
  Item item = item_at(plan, number);
  if (item.splits == 0) return;
  if (item.slot >= 0 && column % COLUMNS == 0) {
    int head = column / COLUMNS;
    long to = (long)item.slot * KV + head, from = (long)(item.fresh + item.until - 1) * KV + head;
    write_row<Unit, R::width(KEY)>(const_cast<Unit*>(key_pages), keys, to, from, worker,
                                   WARPS * 32);
    write_row<Unit, R::width(VALUE)>(const_cast<Unit*>(value_pages), values, to, from, worker,
                                     WARPS * 32);
  }
  attend_item<Warp, T, R, BLOCK, KEY, VALUE, KV, SHARED, HEADS, WARPS, SINKS>(
      item, number, column, plan, queries, key_pages, value_pages, keys, values, sinks, out, parts,
      tops, scale, mixes, peaks, totals, worker);
  if (item.splits == 1) return;
  __threadfence();
  __syncthreads();
  if (worker == 0) {
    unsigned* counter = counters + item.counter * gridDim.x + column;
    last = atomicAdd(counter, 1u) == unsigned(item.splits - 1);
    if (last) *counter = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  merge_item<T, VALUE, KV, SHARED, HEADS, SINKS>(item, column, sinks, out, parts, tops, worker,
                                                 WARPS * 32);
}

template <typename T, int BLOCK, int KEY, int VALUE, int KV>
FN void fetch(const int* plan, const T* key_pages, const T* value_pages, const T* keys,
              const T* values, T* out_keys, T* out_values) {
  fetch_piece<T, BLOCK, KEY, VALUE, KV>(
      (long)blockIdx.x * blockDim.x + threadIdx.x, plan, const_cast<T*>(key_pages),
      const_cast<T*>(value_pages), keys, values, out_keys, out_values);
}

template <typename T, typename R, int BLOCK, int KEY, int VALUE, int KV>
FN void fetch_words(const int* plan, const unsigned* key_pages, const unsigned* value_pages,
                    const unsigned* keys, const unsigned* values, T* out_keys, T* out_values) {
  fetch_coded<T, R, BLOCK, KEY, VALUE, KV>(
      (long)blockIdx.x * blockDim.x + threadIdx.x, plan, const_cast<unsigned*>(key_pages),
      const_cast<unsigned*>(value_pages), keys, values, out_keys, out_values);
}
