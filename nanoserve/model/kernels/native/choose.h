// From a row of logits to a token, by the rule that model/choice.py states. No sort of the vocabulary: a scan keeps the
// largest logit of each block of 128 tokens, and every token that may be kept lies in a block whose largest is among
// the best. Weights are exp((logit - best) / temperature) in double precision.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "gemm.h"
#include "simd.h"

namespace nanoserve {

constexpr int64_t kBlock = 128;      // tokens
constexpr int64_t kLikely = 256;     // blocks that hold a nucleus (top_p) unless the row is flat
constexpr int64_t kSortable = 4096;  // candidates that are sorted at once; more are cut down by a histogram first

struct Choice {
  double temperature;
  int64_t top_k;
  double top_p, log_min_p, uniform;
  bool is_filtered() const { return top_k > 0 || top_p < 1 || log_min_p > -INFINITY; }
};

// exp(x) for x <= 0, within 2 ulp; 0 below -708. Branch-free, so that loops become vectors. (Cody and Waite's reduction,
// Taylor's polynomial.)
inline double exp_of(double x) {
  double bounded = x > -708 ? x : -708;
  double shifted = __builtin_fma(bounded, 1.4426950408889634, 6755399441055744.0);
  int64_t bits;
  memcpy(&bits, &shifted, 8);
  double n = shifted - 6755399441055744.0;
  double r = __builtin_fma(n, -1.9082149292705877e-10, __builtin_fma(n, -6.93147180369123816490e-01, bounded));
  double p = 1.0 / 6227020800;
  p = __builtin_fma(p, r, 1.0 / 479001600);
  p = __builtin_fma(p, r, 1.0 / 39916800);
  p = __builtin_fma(p, r, 1.0 / 3628800);
  p = __builtin_fma(p, r, 1.0 / 362880);
  p = __builtin_fma(p, r, 1.0 / 40320);
  p = __builtin_fma(p, r, 1.0 / 5040);
  p = __builtin_fma(p, r, 1.0 / 720);
  p = __builtin_fma(p, r, 1.0 / 120);
  p = __builtin_fma(p, r, 1.0 / 24);
  p = __builtin_fma(p, r, 1.0 / 6);
  p = __builtin_fma(p, r, 1.0 / 2);
  p = __builtin_fma(p, r, 1.0);
  p = __builtin_fma(p, r, 1.0);
  bits = (int64_t)((uint64_t)(bits + 1023) << 52);
  double scale;
  memcpy(&scale, &bits, 8);
  return x > -708 ? p * scale : 0;
}

// Sorted upwards, these go by falling logit, then by rising token id.
inline uint64_t key_of(float logit, int64_t id) {
  uint32_t bits;
  logit += 0.0f;  // -0 counts as 0
  memcpy(&bits, &logit, 4);
  bits = bits & 0x80000000 ? bits : ~bits & 0x7fffffff;
  return (uint64_t)bits << 32 | (uint64_t)id;
}
inline int64_t id_of(uint64_t key) { return (int64_t)(key & 0xffffffff); }
inline float logit_of(uint64_t key) {
  uint32_t bits = (uint32_t)(key >> 32);
  bits = bits & 0x80000000 ? bits : ~bits & 0x7fffffff;
  float logit;
  memcpy(&logit, &bits, 4);
  return logit;
}

// The first index whose cumulative weight exceeds `target`, else the last one that has weight; and what came before it.
struct Place {
  int64_t index = 0;
  double before = 0;
};
template <class Weight>
inline Place locate(int64_t count, double target, Weight&& weight) {
  Place place;
  double sum = 0;
  for (int64_t i = 0; i < count; i++) {
    double w = weight(i);
    if (w > 0) place = {i, sum};
    sum += w;
    if (sum > target) break;
  }
  return place;
}

template <class T>
class Row {
 public:
  Row(const T* logits, int64_t vocab) : logits_(logits), vocab_(vocab), maxima_(ceil_div(vocab, kBlock)) {
    for (int64_t b = 0; b < blocks(); b++) maxima_[b] = scan(block(b));
    best_ = *std::max_element(maxima_.begin(), maxima_.end());
  }

  int64_t choose(const Choice& choice) {
    if (has_nan_ || !std::isfinite(best_) || choice.temperature == 0 || choice.top_k == 1) return argmax();
    factor_ = 1 / choice.temperature;
    return choice.is_filtered() ? choose_filtered(choice) : choose_unfiltered(choice.uniform);
  }

 private:
  int64_t blocks() const { return (int64_t)maxima_.size(); }
  double weight(float logit) const { return exp_of(((double)logit - best_) * factor_); }

  // Block b; the last one is filled up with -inf.
  const T* block(int64_t b) {
    int64_t left = vocab_ - b * kBlock;
    if (left >= kBlock) return logits_ + b * kBlock;
    for (int64_t i = 0; i < kBlock; i++) tail_[i] = i < left ? logits_[b * kBlock + i] : lowest(T());
    return tail_;
  }
  static float lowest(float) { return -INFINITY; }
  static bf16 lowest(bf16) { return 0xff80; }

  float scan(const T* block) {
    Floats most = load(block);
    bool is_broken = has_nan(most);
    for (int64_t i = kLanes; i < kBlock; i += kLanes) {
      Floats x = load(block + i);
      most = max(most, x);
      is_broken |= has_nan(x);
    }
    has_nan_ |= is_broken;
    return largest(most);
  }

  // The lowest id among equals; a NaN counts as the largest.
  int64_t argmax() {
    if (has_nan_)
      for (int64_t i = 0; i < vocab_; i++)
        if (std::isnan(widen(logits_[i]))) return i;
    int64_t b = std::find(maxima_.begin(), maxima_.end(), best_) - maxima_.begin(), i = b * kBlock;
    while (widen(logits_[i]) != best_) i++;
    return i;
  }

  void weights(const T* block, double* out) const {
    for (int64_t i = 0; i < kBlock; i++) out[i] = weight(widen(block[i]));
  }

  // Mass of each block.
  std::vector<double> sums() {
    std::vector<double> sums(blocks());
    for (int64_t b = 0; b < blocks(); b++) {
      double all[kBlock], lanes[8] = {};
      weights(block(b), all);
      for (int64_t i = 0; i < kBlock; i += 8)
        for (int64_t j = 0; j < 8; j++) lanes[j] += all[i + j];
      for (double lane : lanes) sums[b] += lane;
    }
    return sums;
  }
  double mass() {
    double total = 0;
    for (double sum : sums()) total += sum;
    return total;
  }

  int64_t choose_unfiltered(double uniform) {
    std::vector<double> masses = sums();
    double total = 0, all[kBlock];
    for (double sum : masses) total += sum;
    Place in = locate(blocks(), uniform * total, [&](int64_t b) { return masses[b]; });
    weights(block(in.index), all);
    return in.index * kBlock + locate(kBlock, uniform * total - in.before, [&](int64_t i) { return all[i]; }).index;
  }

  int64_t choose_filtered(const Choice& choice) {
    std::vector<uint64_t> kept;
    bool is_mass_alone = choice.top_k == 0 && choice.log_min_p == -INFINITY;
    if (is_mass_alone) {
      double wanted = choice.top_p * mass();
      kept = candidates(blocks() > kLikely ? kth_largest(kLikely) : -INFINITY, -INFINITY);
      if (!cut_by_mass(kept, wanted)) cut_by_mass(kept = candidates(-INFINITY, -INFINITY), wanted);
    } else {
      bool is_few = choice.top_k > 0 && choice.top_k < blocks();
      kept = candidates(is_few ? kth_largest(choice.top_k) : -INFINITY, choice.log_min_p);
      cut_by_count(kept, choice.top_k);
      if (choice.top_p < 1) {
        double total = 0;
        for (uint64_t key : kept) total += weight(logit_of(key));
        cut_by_mass(kept, choice.top_p * total);
      }
    }
    return draw(kept, choice.uniform);
  }

  // The k-th largest of the blocks' maxima: at least k tokens are as large.
  float kth_largest(int64_t k) const {
    std::vector<float> sorted = maxima_;
    std::nth_element(sorted.begin(), sorted.begin() + (k - 1), sorted.end(), std::greater<float>());
    return sorted[k - 1];
  }

  // All tokens that reach `floor` and, relative to the best, `log_min_p`.
  std::vector<uint64_t> candidates(float floor, double log_min_p) {
    std::vector<uint64_t> keys;
    for (int64_t b = 0; b < blocks(); b++) {
      if (maxima_[b] < floor || ((double)maxima_[b] - best_) * factor_ < log_min_p) continue;
      for (int64_t id = b * kBlock; id < std::min(vocab_, (b + 1) * kBlock); id++) {
        float logit = widen(logits_[id]);
        if (logit >= floor && ((double)logit - best_) * factor_ >= log_min_p) keys.push_back(key_of(logit, id));
      }
    }
    return keys;
  }

  // The cuts keep the order of token ids: they find the last key that stays, then leave out the larger ones.
  static void keep_up_to(std::vector<uint64_t>& keys, uint64_t last) {
    keys.erase(std::remove_if(keys.begin(), keys.end(), [&](uint64_t key) { return key > last; }), keys.end());
  }

  static void cut_by_count(std::vector<uint64_t>& keys, int64_t count) {
    if (count <= 0 || (int64_t)keys.size() <= count) return;
    std::vector<uint64_t> sorted = keys;
    std::nth_element(sorted.begin(), sorted.begin() + (count - 1), sorted.end());
    keep_up_to(keys, sorted[count - 1]);
  }

  // Leaves the shortest beginning, by falling logit, that has the mass `wanted`; false when all of them have less.
  bool cut_by_mass(std::vector<uint64_t>& keys, double wanted) const {
    double sum = 0;
    std::vector<uint64_t> open = (int64_t)keys.size() > kSortable ? near_the_cut(keys, wanted, sum) : keys;
    std::sort(open.begin(), open.end());
    for (uint64_t key : open) {
      sum += weight(logit_of(key));
      if (sum < wanted) continue;
      keep_up_to(keys, key);
      return true;
    }
    return false;
  }

  // The keys around the place where a histogram over logits has the mass `wanted`, with a bucket on each side because
  // sums are rounded; `sum` becomes the mass of all better ones.
  std::vector<uint64_t> near_the_cut(const std::vector<uint64_t>& keys, double wanted, double& sum) const {
    constexpr int kBuckets = 4096;
    constexpr double kPerUnit = 64;
    auto bucket_of = [&](uint64_t key) {
      return (int)std::min(((double)best_ - logit_of(key)) * factor_ * kPerUnit, (double)kBuckets - 1);
    };
    std::vector<double> masses(kBuckets);
    for (uint64_t key : keys) masses[bucket_of(key)] += weight(logit_of(key));
    int cut = 0;
    for (double mass = masses[0]; mass < wanted && cut < kBuckets - 1;) mass += masses[++cut];
    for (int bucket = 0; bucket < cut - 1; bucket++) sum += masses[bucket];
    std::vector<uint64_t> open;
    for (uint64_t key : keys)
      if (abs(bucket_of(key) - cut) <= 1) open.push_back(key);
    return open;
  }

  // Among the kept, in order of token id, the first whose cumulative weight exceeds its share.
  int64_t draw(const std::vector<uint64_t>& keys, double uniform) const {
    std::vector<double> all(keys.size());
    for (size_t i = 0; i < keys.size(); i++) all[i] = weight(logit_of(keys[i]));
    double total = 0;
    for (double w : all) total += w;
    return id_of(keys[locate((int64_t)all.size(), uniform * total, [&](int64_t i) { return all[i]; }).index]);
  }

  const T* logits_;
  int64_t vocab_;
  std::vector<float> maxima_;
  T tail_[kBlock];
  float best_;
  bool has_nan_ = false;
  double factor_ = 1;
};

template <class T>
inline int64_t choose(const T* logits, int64_t vocab, const Choice& choice) {
  return Row<T>(logits, vocab).choose(choice);
}

}  // namespace nanoserve
