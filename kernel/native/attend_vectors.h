// Vectors of attention: the loops that take all the time, for any width of vector.
//
// Two ways to score keys. For many queries (the rows of a prompt, each with its heads) a vector is
// as many queries, and a number of a key is spread over it: keys are read as they lie, and a
// softmax runs along vectors. For few queries (a row that decodes) a vector is a part of one key.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "vectors.h"

namespace mlxtape::attention {

// kPanel * kKeys, or kRows * kColumns sums stand in registers, beside what is loaded for them.
#if defined(__AVX512F__)
constexpr int kPanel = 6, kKeys = 4, kRows = 6, kColumns = 4;
#elif defined(__AVX__)
constexpr int kPanel = 3, kKeys = 4, kRows = 6, kColumns = 2;
#elif defined(__aarch64__)
constexpr int kPanel = 6, kKeys = 4, kRows = 6, kColumns = 4;
#else
constexpr int kPanel = 3, kKeys = 4, kRows = 6, kColumns = 2;
#endif
constexpr long kDims = 64;    // summed in one go: longer sums are less exact, and leave the cache
constexpr int kTogether = 4;  // queries of the few that one reading of a key serves

typedef float Eight __attribute__((vector_size(32)));  // what is left of a row: dims are 8 * n

inline bool any_above(Vector x, float bound) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)x, (__m512)spread(bound), _CMP_GT_OQ) != 0;
#else
  Ints above = x > bound;
  int any = 0;
  for (int lane = 0; lane < kLanes; lane++) any |= above[lane];
  return any != 0;
#endif
}

inline float sum_of(Vector x) {
  float sum = 0;
  for (int lane = 0; lane < kLanes; lane++) sum += x[lane];
  return sum;
}

// Scores of KEYS keys and V vectors of queries, of the dims [from, end); added to what the dims
// before gave. queries: [dim, stride]; scores: [KEYS, stride].
template <int KEYS, int V>
inline void score_keys(const float* queries, long stride, const float* const* keys, long from,
                       long end, float* scores) {
  const float* key[KEYS];
  Vector sums[KEYS][V];
#pragma GCC unroll 8
  for (int k = 0; k < KEYS; k++) {
    key[k] = keys[k];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) sums[k][v] = Vector{};
  }
  for (long d = from; d < end; d++) {
    Vector query[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) query[v] = load(queries + d * stride + v * kLanes);
#pragma GCC unroll 8
    for (int k = 0; k < KEYS; k++) {
      Vector number = spread(key[k][d]);
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) sums[k][v] += query[v] * number;
    }
  }
#pragma GCC unroll 8
  for (int k = 0; k < KEYS; k++) {
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
      float* to = scores + k * stride + v * kLanes;
      store(to, from == 0 ? sums[k][v] : load(to) + sums[k][v]);
    }
  }
}

// The same of all dims, for any number of keys, and `vectors` of at most kPanel. Pointers are
// there, and room for scores, up to the next multiple of 2 * kKeys.
template <int V = kPanel>
inline void score_panel(const float* queries, long stride, const float* const* keys, long count,
                        long dim, float* scores, long vectors) {
  if constexpr (V > 1) {
    if (vectors < V)
      return score_panel<V - 1>(queries, stride, keys, count, dim, scores, vectors);
  }
  constexpr int KEYS = V * 2 <= kPanel ? kKeys * 2 : kKeys;
  for (long from = 0; from < dim; from += kDims)
    for (long k = 0; k < count; k += KEYS)
      score_keys<KEYS, V>(queries, stride, keys + k, from, std::min(dim, from + kDims),
                          scores + k * stride);
}

// W lanes of one in turn with W of the other: the halves of each such 2 * W are summed.
template <int W, int... LANE>
inline Vector halves(Vector a, Vector b, std::integer_sequence<int, LANE...>) {
  return __builtin_shufflevector(
             a, b, ((LANE / W % 2 ? kLanes : 0) + LANE / (2 * W) * 2 * W + LANE % W)...) +
         __builtin_shufflevector(
             a, b, ((LANE / W % 2 ? kLanes : 0) + LANE / (2 * W) * 2 * W + LANE % W + W)...);
}

template <int Q>
struct Scores { Vector of[Q]; };

// Scores of kLanes keys, a lane a key, for Q queries [Q, stride]: a vector of products of each key,
// then sums of the lanes of each, two vectors made one at a time.
template <int W, int Q>
[[gnu::always_inline]] inline Scores<Q> score_few(const float* queries, long stride,
                                                  const float* const* keys, long dim) {
  Scores<Q> scores;
  if constexpr (W == kLanes) {
    for (int q = 0; q < Q; q++) scores.of[q] = Vector{};
    const float* key = keys[0];
    long d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
      Vector numbers = load(key + d);
#pragma GCC unroll 8
      for (int q = 0; q < Q; q++) scores.of[q] += numbers * load(queries + q * stride + d);
    }
    if constexpr (kLanes > 8) {
      if (d < dim) {
        Vector numbers{};
        std::memcpy(&numbers, key + d, sizeof(Eight));
        for (int q = 0; q < Q; q++) scores.of[q] += numbers * load(queries + q * stride + d);
      }
    }
  } else {
    Scores<Q> a = score_few<W * 2, Q>(queries, stride, keys, dim);
    Scores<Q> b = score_few<W * 2, Q>(queries, stride, keys + W, dim);
#pragma GCC unroll 8
    for (int q = 0; q < Q; q++)
      scores.of[q] = halves<W>(a.of[q], b.of[q], std::make_integer_sequence<int, kLanes>());
  }
  return scores;
}

// Scores [queries, row] of `count` keys, for few queries [count, stride] whose rows end in zeros.
// Pointers are there, and room for scores, up to the next multiple of kLanes.
template <int Q = kTogether>
inline void score_rows(const float* queries, long stride, long number, const float* const* keys,
                       long count, long dim, float* scores, long row) {
  if constexpr (Q > 1) {
    if (number < Q)
      return score_rows<Q - 1>(queries, stride, number, keys, count, dim, scores, row);
  }
  for (long k = 0; k < count; k += kLanes) {
    Scores<Q> found = score_few<1, Q>(queries, stride, keys + k, dim);
    for (int q = 0; q < Q; q++) store(scores + q * row + k, found.of[q]);
  }
}

// Weights of keys, and how far apart those of two keys, and of two queries, are.
struct Weights {
  const float* at;
  long key, query;
};

// R queries' mixes of C vectors of the values: what there is is kept in part, then keys are added.
template <class V, int R, int C>
inline void mix_block(Weights weights, const float* const* values, long count, long offset,
                      float* mix, long dim, const float* kept) {
  constexpr int lanes = sizeof(V) / 4;
  V sums[R][C];
  const float* weight[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    weight[r] = weights.at + r * weights.query;
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) sums[r][c] = load<V>(mix + r * dim + c * lanes) * kept[r];
  }
  for (long k = 0; k < count; k++) {
    V value[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) value[c] = load<V>(values[k] + offset + c * lanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      V number = spread<V>(weight[r][k * weights.key]);
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) sums[r][c] += value[c] * number;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) store(mix + r * dim + c * lanes, sums[r][c]);
  }
}

// The same for the whole width of the values.
template <int R>
inline void mix_rows(Weights weights, const float* const* values, long count, float* mix, long dim,
                     const float* kept) {
  long at = 0;
  for (; at + kLanes * kColumns <= dim; at += kLanes * kColumns)
    mix_block<Vector, R, kColumns>(weights, values, count, at, mix + at, dim, kept);
  for (; at + kLanes <= dim; at += kLanes)
    mix_block<Vector, R, 1>(weights, values, count, at, mix + at, dim, kept);
  if constexpr (kLanes > 8) {
    if (at < dim) mix_block<Eight, R, 1>(weights, values, count, at, mix + at, dim, kept);
  }
}

// The same for the last queries, fewer than kRows.
template <int R = kRows - 1>
inline void mix_rest(Weights weights, const float* const* values, long count, float* mix, long dim,
                     const float* kept, long queries) {
  if constexpr (R > 0) {
    if (queries < R) return mix_rest<R - 1>(weights, values, count, mix, dim, kept, queries);
    mix_rows<R>(weights, values, count, mix, dim, kept);
  }
}

// mix: [queries, dim], of which kept[query] is kept; `count` keys are added.
inline void mix_values(Weights weights, const float* const* values, long count, float* mix,
                       long dim, const float* kept, long queries) {
  long q = 0;
  for (; q + kRows <= queries; q += kRows) {
    Weights mine{weights.at + q * weights.query, weights.key, weights.query};
    mix_rows<kRows>(mine, values, count, mix + q * dim, dim, kept + q);
  }
  Weights mine{weights.at + q * weights.query, weights.key, weights.query};
  mix_rest(mine, values, count, mix + q * dim, dim, kept + q, queries - q);
}

}  // namespace mlxtape::attention
