// Attention over pages that block tables name, by the plan that paged_plan.py lays out.
//
// A job is a run of rows of one piece, for one K/V head and the query heads that share it: its
// queries meet a tile of keys at a time, with a running softmax (a peak, a total, a mix of values;
// scores in powers of two), so that scores never leave the nearest cache.
//
// Only keys that some row of a job sees are loaded: pages hold anything where nothing was written.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attend_vectors.h"
#include "scratch.h"
#include "threads.h"

namespace mlxtape {

struct Attend {
  const int32_t* plan;  // items, then tables
  long items;
  const float* queries;  // [T, kv_heads * shared, key_dim]
  float* key_pages;      // [num_blocks, block_size, kv_heads, key_dim]; gets the step's rows
  float* value_pages;
  const float* keys;  // the step's own rows, [T, kv_heads, key_dim]
  const float* values;
  const float* sinks;  // [kv_heads * shared]: the score of a key of no value; or null
  float* out;          // [T, kv_heads * shared, value_dim]
  long block_size, kv_heads, shared, key_dim, value_dim;
  float scale;  // of scores, in powers of two
};

namespace attention {

constexpr int kItemInts = 12;
constexpr long kTile = 64;       // keys that queries meet at a time
constexpr long kFew = 8;         // queries that are scored key by key
constexpr long kMany = 96;       // queries of a job, at most
constexpr long kSplit = 256;     // keys of a job of few queries
constexpr long kSideBySide = 512;  // numbers of a key that a job of few queries reads
constexpr float kNever = -1e30f;  // the score of a key that is not seen
constexpr float kLowest = -1e29f;  // a peak before any key: what is not seen weighs 0 even then

struct Item {
  const int32_t* table;
  long until, live_from, sink, start, fresh, slot, splits;
};

inline Item item_at(const int32_t* plan, long number) {
  const int32_t* at = plan + number * kItemInts;
  Item item{plan + at[0], at[1], at[2], at[3], at[4], at[5], -1, std::max(1, at[9])};
  item.slot = plan[(number + item.splits - 1) * kItemInts + 6];
  return item;
}

// Whether a row comes right after another in the same piece.
inline bool follows(const Item& item, const Item& last) {
  return item.table == last.table && item.start == last.start && item.fresh == last.fresh &&
         item.sink == last.sink && item.until == last.until + 1 &&
         item.live_from >= last.live_from;
}

// Keys [0, sinks) and [low, end) are seen by at least one of these rows.
struct Run {
  const Item* rows;
  long count, sinks, low, end;

  Run(const Item* first, long count) : rows(first), count(count) {
    // Rows see without a gap between them: what one sees last, the next one still sees, or begins.
    low = first->sink < first->live_from ? first->live_from : 0;
    sinks = low ? first->sink : 0;
    end = first[count - 1].until;
  }
  long keys() const { return sinks + end - low; }
  long position(long key) const { return key < sinks ? key : key - sinks + low; }
  // Whether each of the rows sees each of these positions.
  bool all_see(long position, long many) const {
    const Item& last = rows[count - 1];
    return position + many <= rows->until &&
           (position >= last.live_from || position + many <= last.sink);
  }
};

// K/V heads that lie side by side, and for each of them some of the query heads that share it.
struct Job {
  const Run* run;
  long kv_head, kv_heads, from_head, heads;
  long begin, end;  // of the run's keys
  long part;        // where its parts go; negative: it is the whole

  long queries() const { return heads * run->count; }  // of one K/V head
  bool few() const { return queries() <= kFew; }
};

inline long rounded(long count, long step) { return (count + step - 1) / step * step; }

// Keys that follow one another, and where they are.
struct Tile {
  const float* keys[kTile];
  const float* values[kTile];
  long position, count;

  void point(const Attend& it, const Run& run, long kv_head, long first, long many) {
    const Item& row = *run.rows;
    position = first;
    count = many;
    long block = first / it.block_size, inside = first % it.block_size;
    for (long k = 0; k < count; k++) {
      bool own = first + k >= row.start;
      long at = own ? row.fresh + first + k : row.table[block] * it.block_size + inside;
      at = at * it.kv_heads + kv_head;
      keys[k] = (own ? it.keys : it.key_pages) + at * it.key_dim;
      values[k] = (own ? it.values : it.value_pages) + at * it.value_dim;
      if (++inside == it.block_size) {
        inside = 0;
        block++;
      }
    }
    // Loops over keys go on to a whole vector: with a key that may be read.
    for (long k = count; k < rounded(count, 16); k++) keys[k] = keys[count - 1];
  }

  // Ask for some rows, that many numbers of each: soon they are wanted.
  void fetch(long first, long end, long key_floats, long value_floats) const {
    for (long k = first; k < end; k++) {
      for (long d = 0; d < key_floats; d += 16) __builtin_prefetch(keys[k] + d);
      for (long d = 0; d < value_floats; d += 16) __builtin_prefetch(values[k] + d);
    }
  }

  // To the next K/V head.
  void move(long key_dim, long value_dim) {
    for (long k = 0; k < rounded(count, 16); k++) keys[k] += key_dim;
    for (long k = 0; k < count; k++) values[k] += value_dim;
  }
};

// One K/V head of a job. Queries are numbered row by row, with the job's heads of each.
class Walk {
 public:
  static long floats(const Attend& it, const Job& job) {
    long stride = rounded(job.queries(), kLanes), width = rounded(it.key_dim, kLanes);
    return stride * (width + rounded(it.value_dim, kLanes) + 4) + totals(job);
  }

  // memory: that many floats. scores: room of all walks.
  Walk(const Attend& it, const Job& job, long number, float* memory, float* scores)
      : it_(it), job_(job), run_(*job.run), kv_head_(job.kv_head + number),
        part_(job.part + number * job.queries()), queries_(job.queries()),
        stride_(rounded(queries_, kLanes)), width_(rounded(it.key_dim, kLanes)), score_(scores) {
    peak_ = memory;
    total_ = peak_ + stride_;
    kept_ = total_ + totals(job);
    until_ = reinterpret_cast<int*>(kept_ + stride_);
    live_from_ = until_ + stride_;
    query_ = kept_ + 3 * stride_;
    mix_ = query_ + stride_ * width_;
    begin();
  }

  void meet(const Tile& tile) {
    if (job_.few()) meet_few(tile);
    else meet_many(tile);
  }

  void end(float* parts) {
    if (job_.few())
      for (long q = 0; q < queries_; q++) total_[q] = sum_of(load(total_ + q * kLanes));
    if (job_.part < 0) put_out();
    else put_part(parts);
    if (job_.end == run_.keys() && job_.from_head == 0) write_rows();
  }

 private:
  static long totals(const Job& job) {
    long stride = rounded(job.queries(), kLanes);
    return job.few() ? stride * kLanes : stride;
  }
  const Item& row_of(long query) const { return run_.rows[query / job_.heads]; }
  long head_of(long query) const {
    return kv_head_ * it_.shared + job_.from_head + query % job_.heads;
  }
  // A row of queries, or of what comes out, of all heads of the batch.
  long place_of(long query) const {
    const Item& row = row_of(query);
    return (row.fresh + row.until - 1) * it_.kv_heads * it_.shared + head_of(query);
  }

  void begin() {
    std::fill(total_, total_ + totals(job_), 0.0f);
    bool with_sinks = it_.sinks != nullptr && job_.begin == 0;
    for (long q = 0; q < stride_; q++) {
      bool sink = with_sinks && q < queries_;
      peak_[q] = sink ? it_.sinks[head_of(q)] : kLowest;
      total_[job_.few() ? q * kLanes : q] = sink ? 1.0f : 0.0f;
      const Item& row = row_of(std::min(q, queries_ - 1));
      until_[q] = static_cast<int>(row.until);
      live_from_[q] = static_cast<int>(row.live_from);
    }
    std::fill(mix_, mix_ + queries_ * it_.value_dim, 0.0f);
    if (job_.few()) take_few();
    else take_many();
  }

  // [queries, width], ending in zeros.
  void take_few() {
    for (long q = 0; q < queries_; q++) {
      const float* from = it_.queries + place_of(q) * it_.key_dim;
      float* to = query_ + q * width_;
      for (long d = 0; d < it_.key_dim; d++) to[d] = from[d] * it_.scale;
      std::fill(to + it_.key_dim, to + width_, 0.0f);
    }
  }

  // [key_dim, stride]; lanes without a query are zeros.
  void take_many() {
    for (long q = 0; q < stride_; q++) {
      const float* from = it_.queries + place_of(std::min(q, queries_ - 1)) * it_.key_dim;
      float scale = q < queries_ ? it_.scale : 0.0f;
      for (long d = 0; d < it_.key_dim; d++) query_[d * stride_ + q] = from[d] * scale;
    }
  }

  void meet_few(const Tile& tile) {
    for (long q = 0; q < queries_; q += kTogether)
      score_rows(query_ + q * width_, width_, std::min<long>(kTogether, queries_ - q), tile.keys,
                 tile.count, it_.key_dim, score_ + q * kTile, kTile);
    bool all_see = run_.all_see(tile.position, tile.count);
    for (long q = 0; q < queries_; q++) {
      float* scores = score_ + q * kTile;
      long end = rounded(tile.count, kLanes);
      std::fill(scores + tile.count, scores + end, kNever);
      if (!all_see) hide(row_of(q), tile, scores);
      weigh_row(scores, end, q);
    }
    mix_values({score_, 1, kTile}, tile.values, tile.count, mix_, it_.value_dim, kept_, queries_);
  }

  static void hide(const Item& row, const Tile& tile, float* scores) {
    for (long k = 0; k < tile.count; k++) {
      long at = tile.position + k;
      if (at >= row.until || (at < row.live_from && at >= row.sink)) scores[k] = kNever;
    }
  }

  // Scores of one query become weights. The peak seldom grows; totals are left a lane each.
  void weigh_row(float* scores, long end, long query) {
    Vector highest = load(scores), total = load(total_ + query * kLanes);
    for (long k = kLanes; k < end; k += kLanes) highest = larger(highest, load(scores + k));
    float peak = peak_[query];
    kept_[query] = 1.0f;
    if (any_above(highest, peak)) {
      for (int lane = 0; lane < kLanes; lane++) peak = std::max(peak, highest[lane]);
      kept_[query] = power2_of(peak_[query] - peak);
      peak_[query] = peak;
      total *= kept_[query];
    }
    for (long k = 0; k < end; k += kLanes) {
      Vector weight = power2(load(scores + k) - peak);
      store(scores + k, weight);
      total += weight;
    }
    store(total_ + query * kLanes, total);
  }

  void meet_many(const Tile& tile) {
    // Rows before a tile's first key see nothing of it.
    long row = std::max(0L, tile.position + 1 - run_.rows->until);
    long first = row * job_.heads, lane = first / kLanes * kLanes;
    bool all_see = run_.all_see(tile.position, tile.count);
    for (long q = lane; q < stride_; q += kPanel * kLanes)
      score_panel(query_ + q, stride_, tile.keys, tile.count, it_.key_dim, score_ + q,
                  (stride_ - q) / kLanes);
    for (long q = lane; q < stride_; q += kLanes) {
      if (!all_see) hide(tile, q);
      weigh_lanes(tile, q);
    }
    mix_values({score_ + first, stride_, 1}, tile.values, tile.count,
               mix_ + first * it_.value_dim, it_.value_dim, kept_ + first, queries_ - first);
  }

  void hide(const Tile& tile, long lane) {
    Ints until, live_from;
    std::memcpy(&until, until_ + lane, sizeof until);
    std::memcpy(&live_from, live_from_ + lane, sizeof live_from);
    int sink = static_cast<int>(run_.rows->sink);
    for (long k = 0; k < tile.count; k++) {
      Ints at = static_cast<int>(tile.position + k) - Ints{};
      Ints seen = (at < until) & ((at >= live_from) | (at < sink));
      float* scores = score_ + k * stride_ + lane;
      store(scores, seen ? load(scores) : spread(kNever));
    }
  }

  // Scores of a vector of queries become weights.
  void weigh_lanes(const Tile& tile, long lane) {
    float* scores = score_ + lane;
    Vector before = load(peak_ + lane), peak = before, sum{};
    for (long k = 0; k < tile.count; k++) peak = larger(peak, load(scores + k * stride_));
    for (long k = 0; k < tile.count; k++) {
      Vector weight = power2(load(scores + k * stride_) - peak);
      store(scores + k * stride_, weight);
      sum += weight;
    }
    Vector kept = power2(before - peak);
    store(kept_ + lane, kept);
    store(peak_ + lane, peak);
    store(total_ + lane, load(total_ + lane) * kept + sum);
  }

  void put_out() {
    for (long q = 0; q < queries_; q++) {
      float* to = it_.out + place_of(q) * it_.value_dim;
      for (long d = 0; d < it_.value_dim; d++) to[d] = mix_[q * it_.value_dim + d] / total_[q];
    }
  }

  // A peak, a total and a mix of each query.
  void put_part(float* parts) {
    float* to = parts + part_ * (it_.value_dim + 2);
    for (long q = 0; q < queries_; q++, to += it_.value_dim + 2) {
      to[0] = peak_[q];
      to[1] = total_[q];
      std::copy_n(mix_ + q * it_.value_dim, it_.value_dim, to + 2);
    }
  }

  // The rows' own keys and values to their places: nothing reads them there in this step.
  void write_rows() {
    for (long r = 0; r < run_.count; r++) {
      const Item& row = run_.rows[r];
      if (row.slot < 0) continue;
      long from = (row.fresh + row.until - 1) * it_.kv_heads + kv_head_;
      long to = row.slot * it_.kv_heads + kv_head_;
      std::copy_n(it_.keys + from * it_.key_dim, it_.key_dim, it_.key_pages + to * it_.key_dim);
      std::copy_n(it_.values + from * it_.value_dim, it_.value_dim,
                  it_.value_pages + to * it_.value_dim);
    }
  }

  const Attend& it_;
  const Job& job_;
  const Run& run_;
  long kv_head_, part_, queries_, stride_, width_;
  float *score_, *query_, *peak_, *total_, *kept_, *mix_;
  int *until_, *live_from_;
};

// The tile of a job that begins with one of its run's keys; of no keys at the job's end.
inline void point(Tile& tile, const Attend& it, const Job& job, long key) {
  const Run& run = *job.run;
  long end = key < run.sinks ? std::min(run.sinks, job.end) : job.end;
  tile.point(it, run, job.kv_head, run.position(key), std::min(kTile, end - key));
}

// K/V heads take turns at each tile, so that pages are read from end to end.
inline void do_job(const Attend& it, const Job& job, Scratch& scratch, float* parts) {
  long floats = Walk::floats(it, job), scores = rounded(job.queries(), kLanes) * kTile;
  float* memory = scratch.of<float>(scores + floats * job.kv_heads);
  std::vector<Walk> walks;
  walks.reserve(job.kv_heads);
  for (long head = 0; head < job.kv_heads; head++)
    walks.emplace_back(it, job, head, memory + scores + floats * head, memory);
  Tile tile, next;
  point(tile, it, job, job.begin);
  for (long at = job.begin; at < job.end; tile = next) {
    at += tile.count;
    point(next, it, job, at);
    for (long head = 0; head < job.kv_heads; head++) {
      if (job.few())
        next.fetch(head * next.count / job.kv_heads, (head + 1) * next.count / job.kv_heads,
                   it.key_dim * job.kv_heads, it.value_dim * job.kv_heads);
      walks[head].meet(tile);
      tile.move(it.key_dim, it.value_dim);
    }
  }
  for (Walk& walk : walks) walk.end(parts);
}

inline std::vector<Item> read_items(const Attend& it) {
  std::vector<Item> rows;
  for (long number = 0; number < it.items;) {
    if (it.plan[number * kItemInts + 1] == 0) {  // an item of nothing
      number++;
      continue;
    }
    rows.push_back(item_at(it.plan, number));
    number += rows.back().splits;
  }
  return rows;
}

inline std::vector<Run> find_runs(const std::vector<Item>& rows, long longest) {
  std::vector<Run> runs;
  for (size_t first = 0, end; first < rows.size(); first = end) {
    end = first + 1;
    while (end < rows.size() && end - first < static_cast<size_t>(longest) &&
           follows(rows[end], rows[end - 1]))
      end++;
    runs.emplace_back(&rows[first], static_cast<long>(end - first));
  }
  return runs;
}

// Jobs of all runs. Those of a few queries are split by length alone: what comes out must not
// depend on the number of threads.
struct Jobs {
  std::vector<Job> list;
  long parts = 0;  // queries of all parts

  Jobs(const Attend& it, const std::vector<Run>& runs, long heads) {
    for (const Run& run : runs)
      for (long from = 0; from < it.shared; from += heads) {
        Job job{&run, 0, 1, from, std::min(heads, it.shared - from), 0, run.keys(), -1};
        long side_by_side = job.few() ? std::max(1L, kSideBySide / it.key_dim) : 1;
        for (; job.kv_head < it.kv_heads; job.kv_head += job.kv_heads) {
          job.kv_heads = std::min(side_by_side, it.kv_heads - job.kv_head);
          add(job);
        }
      }
  }

 private:
  void add(Job job) {
    long keys = job.run->keys();
    long splits = job.few() ? std::max(1L, (keys + kSplit / 2) / kSplit) : 1;
    for (long split = 0; split < splits; split++) {
      job.begin = split * keys / splits;
      job.end = (split + 1) * keys / splits;
      job.part = splits == 1 ? -1 : parts;
      parts += splits == 1 ? 0 : job.queries() * job.kv_heads;
      list.push_back(job);
    }
  }
};

// One query of all parts of a job, `queries` apart.
inline void merge(const Attend& it, const float* parts, long splits, long queries, float* out) {
  long width = it.value_dim + 2, step = queries * width;
  float peak = kLowest, total = 0;
  for (long split = 0; split < splits; split++) peak = std::max(peak, parts[split * step]);
  std::fill(out, out + it.value_dim, 0.0f);
  for (long split = 0; split < splits; split++) {
    const float* part = parts + split * step;
    float kept = power2_of(part[0] - peak);
    total += part[1] * kept;
    for (long d = 0; d < it.value_dim; d++) out[d] += part[2 + d] * kept;
  }
  for (long d = 0; d < it.value_dim; d++) out[d] /= total;
}

inline void merge_parts(const Attend& it, const std::vector<Job>& jobs, const float* parts) {
  for (size_t first = 0, end; first < jobs.size(); first = end) {
    const Job& job = jobs[first];
    end = first + 1;
    if (job.part < 0) continue;
    while (end < jobs.size() && jobs[end].begin > 0) end++;
    long queries = job.queries() * job.kv_heads, splits = static_cast<long>(end - first);
    for (long q = 0; q < queries; q++) {
      const Item& row = job.run->rows[q % job.queries() / job.heads];
      long kv_head = job.kv_head + q / job.queries();
      long head = kv_head * it.shared + job.from_head + q % job.heads;
      long place = (row.fresh + row.until - 1) * it.kv_heads * it.shared + head;
      merge(it, parts + (job.part + q) * (it.value_dim + 2), splits, queries,
            it.out + place * it.value_dim);
    }
  }
}

}  // namespace attention

// Attends for all rows of a plan, and writes their keys and values into the pages.
inline void attend(const Attend& it) {
  using namespace attention;
  std::vector<Item> rows = read_items(it);
  long heads = std::min(it.shared, kMany);
  std::vector<Run> runs = find_runs(rows, std::max(1L, kMany / heads));
  Jobs jobs(it, runs, heads);
  std::vector<float> parts(jobs.parts * (it.value_dim + 2));
  long count = static_cast<long>(jobs.list.size());
  // The last jobs of a prompt are its longest: those first, so that no thread is left with one.
  parallel(count, [&](long number) {
    static thread_local Scratch scratch;
    do_job(it, jobs.list[count - 1 - number], scratch, parts.data());
  });
  merge_parts(it, jobs.list, parts.data());
}

}  // namespace mlxtape
