// A token for each row of logits: the largest, or one drawn as kernel/sampling.py draws it, and what
// is told of it: its logit, and by how much the largest logit exceeds the next.
//
// A block of THREADS threads takes a row. asked: of each row, ASKED numbers: the scale of logits in
// powers of two (0: greedy), top_k, top_p, min_p, and the row's uniform number in (0, 1).
#pragma once
#define ASKED 5
#define LOWEST (-INFINITY)
#define POWER_MIN (-126.0f)  // below it a power of two is no normal number
#define HALVINGS 16

struct Top { float first, next; int at; };

FN Top better(const Top& a, const Top& b) {
  bool is_a = a.first > b.first || (a.first == b.first && a.at < b.at);
  Top top = is_a ? a : b;
  top.next = larger(top.next, is_a ? b.first : a.first);
  return top;
}

template <int THREADS> struct Row {
  enum { WARPS = THREADS / 32 };
  const float* logits;
  float* sums;       // the block's: [THREADS]
  unsigned* counts;  // [256]
  int vocab, thread;
  float peak, scale, least_weight, least_power, min_p;

  FN float power(int at) const { return larger((logits[at] - peak) * scale, POWER_MIN); }
  // What is left of a token's weight after all cuts so far.
  FN float weight(int at) const {
    float x = power(at), w = power2(x);
    return w >= least_weight && x >= least_power && w >= min_p ? w : 0.0f;
  }
  FN Top top() {
    Top mine = {LOWEST, LOWEST, vocab};
    for (int i = thread; i < vocab; i += THREADS) mine = better(mine, Top{logits[i], LOWEST, i});
    for (int reach = 1; reach < 32; reach *= 2)
      mine = better(mine, Top{shuffle_xor(mine.first, reach), shuffle_xor(mine.next, reach),
                              int(shuffle_xor(float(mine.at), reach))});
    float* held = sums + thread / 32 * 3;
    barrier();
    if (thread % 32 == 0) { held[0] = mine.first; held[1] = mine.next; held[2] = float(mine.at); }
    barrier();
    for (int w = 0; w < WARPS; ++w)
      mine = w == thread / 32 ? mine : better(mine, Top{sums[w * 3], sums[w * 3 + 1],
                                                        int(sums[w * 3 + 2])});
    return mine;
  }
  // Every thread's number, in the same order for all.
  FN float sum(float x) {
    for (int reach = 1; reach < 32; reach *= 2) x += shuffle_xor(x, reach);
    barrier();
    if (thread % 32 == 0) sums[thread / 32] = x;
    barrier();
    float all = 0.0f;
    for (int w = 0; w < WARPS; ++w) all += sums[w];
    return all;
  }
  // The weights of tokens of at least that power.
  FN float mass(float from) {
    float mine = 0.0f;
    for (int i = thread; i < vocab; i += THREADS) mine += power(i) >= from ? weight(i) : 0.0f;
    return sum(mine);
  }
  // The weight that `most` tokens reach: its bits, eight at a time from the top.
  FN float reached_by(int most) {
    unsigned found = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
      barrier();
      for (int i = thread; i < 256; i += THREADS) counts[i] = 0;
      barrier();
      for (int i = thread; i < vocab; i += THREADS) {
        unsigned bits = bits_of(weight(i));
        if (shift == 24 || bits >> (shift + 8) == found) atomicAdd(counts + (bits >> shift & 255), 1u);
      }
      barrier();
      int bin = 255;
      while (most > int(counts[bin])) most -= int(counts[bin--]);
      found = found << 8 | unsigned(bin);
    }
    return float_of(found);
  }
  // The largest power at which tokens hold `part` of all weights.
  FN float edge(float part) {
    float all = mass(POWER_MIN), high = 0.0f;
    float low = larger(log2f((1.0f - part) * all / vocab) - 1.0f, POWER_MIN);
    for (int i = 0; i < HALVINGS; ++i) {
      float middle = (low + high) * 0.5f;
      bool enough = mass(middle) >= all * part;
      low = enough ? middle : low;
      high = enough ? high : middle;
    }
    return low;
  }
  // The first token at which the sum of weights exceeds `uniform` of all; each thread has a run.
  FN int drawn(float uniform) {
    int run = (vocab + THREADS - 1) / THREADS, begin = thread * run;
    float mine = 0.0f;
    for (int i = begin; i < begin + run && i < vocab; ++i) mine += weight(i);
    barrier();
    sums[thread] = mine;
    barrier();
    float all = 0.0f, passed = 0.0f;
    for (int t = 0; t < THREADS; ++t) all += sums[t];
    int last = 0, chosen = 0;
    for (int t = 0; t < THREADS; ++t) {
      if (sums[t] > 0.0f) last = t;
      if (passed + sums[t] > all * uniform) break;
      if (t + 1 < THREADS) passed += sums[t];
    }
    for (int i = last * run; i < (last + 1) * run && i < vocab; ++i) {
      float w = weight(i);
      if (w > 0.0f) chosen = i;
      passed += w;
      if (passed > all * uniform) break;
    }
    return chosen;
  }
};

template <int THREADS>
FN void sample(const float* logits, int vocab, const float* asked, unsigned* tokens, float* chosen,
               float* margins) {
  __shared__ float sums[THREADS];
  __shared__ unsigned counts[256];
  int number = blockIdx.x;
  asked += number * ASKED;
  Row<THREADS> row;
  row.logits = logits + (long)number * vocab;
  row.sums = sums; row.counts = counts; row.vocab = vocab; row.thread = threadIdx.x;
  Top top = row.top();
  int token = top.at;
  if (asked[0] > 0.0f) {
    int most = int(asked[1]);
    row.peak = top.first; row.scale = asked[0];
    row.least_weight = 0.0f; row.least_power = POWER_MIN; row.min_p = 0.0f;
    if (most > 0 && most < vocab) row.least_weight = row.reached_by(most);
    if (asked[2] < 1.0f) row.least_power = row.edge(asked[2]);
    row.min_p = asked[3];
    token = row.drawn(asked[4]);
  }
  if (threadIdx.x == 0) {
    tokens[number] = unsigned(token);
    chosen[number] = row.logits[token];
    margins[number] = top.first - top.next;
  }
}
