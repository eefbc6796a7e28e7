// y = x W^T for few and for many rows, from one packed form of W.
//
// W [N, K] is packed into panels of 32 output columns. A panel is a sequence of steps; a step holds one 32-bit word for
// each column: 1 float, 2 bfloat16 or 4 int8 values of consecutive k. So every type has the same geometry, and what AMX
// wants of a tile of B, 16 steps of 64 bytes, lies in the panel as it is (row stride 128 bytes).
//
// Batch invariance: each output adds up its products in an order that depends on K and the kernel alone, never on the
// number of rows, the thread or the place in the batch. Where K is cut into blocks, sums continue from float32 memory.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <type_traits>

#include "pool.h"
#include "simd.h"

namespace nanoserve {

constexpr int64_t kPanel = 32;             // columns
constexpr int64_t kBlockSteps = 256;  // K block: 32 KiB of a panel stay in L1 while the rows of a slice pass by
constexpr int64_t kSmallWork = 1 << 19;    // products that one thread does before another would have woken up
#ifdef __AMX_TILE__
constexpr int64_t kSliceBytes = 1 << 20;  // rows of A that stay in L2 (2 MiB on CPUs with AMX) while panels pass by
#else
constexpr int64_t kSliceBytes = 512 << 10;
#endif

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Memory of this thread that only grows; one per `Tag`.
template <class Tag>
inline void* scratch(size_t bytes) {
  struct Block {
    void* data = nullptr;
    size_t size = 0;
    ~Block() { free(data); }
  };
  thread_local Block block;
  if (bytes > block.size) {
    free(block.data);
    block.size = (bytes + (bytes >> 2) + 4095) & ~(size_t)4095;
    block.data = aligned_alloc(4096, block.size);
  }
  return block.data;
}

// ---- dot products of one step: acc[lane] += sum over the step's k of a * b[lane] ----

struct FloatDot {
  typedef float A;
  typedef float Acc;
  typedef Floats Sum;
  static constexpr int kAPerStep = 1;
  typedef Floats B;
  static B prepare(Ints b) { return as_floats(b); }
  static Sum add(Sum sum, const A* a, B b) { return fma(set(a[0]), b, sum); }
};

// bfloat16 by float32 products, for CPUs without bfloat16 instructions; A is widened beforehand.
struct WidenedDot {
  typedef float A;
  typedef float Acc;
  typedef Floats Sum;
  static constexpr int kAPerStep = 2;
  struct B {
    Floats even, odd;
  };
  static B prepare(Ints b) { return {as_floats(low_halves(b)), as_floats(high_halves(b))}; }
  static Sum add(Sum sum, const A* a, B b) { return fma(set(a[1]), b.odd, fma(set(a[0]), b.even, sum)); }
};

#ifdef __AVX512BF16__
struct PairDot {
  typedef bf16 A;
  typedef float Acc;
  typedef Floats Sum;
  static constexpr int kAPerStep = 2;
  typedef Ints B;
  static B prepare(Ints b) { return b; }
  static Sum add(Sum sum, const A* a, B b) { return _mm512_dpbf16_ps(sum, (__m512bh)set(word(a)), (__m512bh)b); }
};
typedef PairDot Bf16Dot;
#else
typedef WidenedDot Bf16Dot;
#endif

// R rows times W vectors of adjacent columns (over W * kLanes / 32 panels), all steps of a K block. `c` [panel][R][32].
template <class Dot, int R, int W>
inline void dot_block(const typename Dot::A* a, int64_t lda, const uint32_t* b, int64_t panel_words,
                      typename Dot::Acc* c, int64_t c_panel, int64_t steps, bool is_first) {
  constexpr int kVectors = kPanel / kLanes;  // in a panel
  typename Dot::Sum sums[R][W];
  for (int r = 0; r < R; r++)
    for (int w = 0; w < W; w++) {
      typename Dot::Acc* at = c + w / kVectors * c_panel + r * kPanel + w % kVectors * kLanes;
      sums[r][w] = is_first ? zero(typename Dot::Sum{}) : load(at);
    }
  for (int64_t s = 0; s < steps; s++) {
    typename Dot::B vectors[W];
    for (int w = 0; w < W; w++) {
      const uint32_t* at = b + w / kVectors * panel_words + s * kPanel + w % kVectors * kLanes;
      vectors[w] = Dot::prepare(load(at));
      if (w % (64 / (kLanes * 4)) == 0) _mm_prefetch((const char*)(at + 1024), _MM_HINT_T0);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int w = 0; w < W; w++) sums[r][w] = Dot::add(sums[r][w], a + r * lda + s * Dot::kAPerStep, vectors[w]);
  }
  for (int r = 0; r < R; r++)
    for (int w = 0; w < W; w++) store(c + w / kVectors * c_panel + r * kPanel + w % kVectors * kLanes, sums[r][w]);
}

// A block kernel made of dot products. Few rows take several panels at once, to keep enough sums in flight.
template <class Dot>
struct Vectors {
  typedef typename Dot::A A;
  typedef typename Dot::Acc Acc;
  static constexpr int kAPerStep = Dot::kAPerStep;
  static constexpr int64_t kRows = kLanes == 16 ? 14 : 6;
  static int panels_at_once(int64_t rows) {
    if (kLanes == 16) return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
    return rows == 1 ? 2 : 1;
  }
  static void begin() {}
  static void end() {}

  template <int R>
  static void rows(const A* a, int64_t lda, const uint32_t* b, int64_t panel_words, Acc* c, int64_t steps,
                   int panels, bool is_first) {
    constexpr int kVectors = kPanel / kLanes;
    constexpr int kWide = kLanes == 16 ? (R == 1 ? 8 : R <= 3 ? 4 : 2) : (R == 1 ? 8 : R <= 3 ? 4 : 2);
    constexpr int kAtOnce = kWide / kVectors > 0 ? kWide / kVectors : 1;
    int p = 0;
    if constexpr (kWide >= kVectors)
      for (; p + kAtOnce <= panels; p += kAtOnce)
        dot_block<Dot, R, kWide>(a, lda, b + p * panel_words, panel_words, c + p * R * kPanel, R * kPanel, steps,
                                 is_first);
    for (; p < panels; p++)
      for (int64_t column = 0; column < kPanel; column += 2 * kLanes)
        dot_block<Dot, R, 2>(a, lda, b + p * panel_words + column, panel_words, c + p * R * kPanel + column, R * kPanel,
                             steps, is_first);
  }

  // `count` rows of A by `panels` panels, continuing in `c` [panels][count][32] unless it is the first K block.
  static void block(const A* a, int64_t lda, int64_t count, const uint32_t* b, int64_t panel_words, Acc* c,
                    int64_t steps, int panels, bool is_first) {
    dispatch<1>(count, [&](auto r) { rows<decltype(r)::value>(a, lda, b, panel_words, c, steps, panels, is_first); });
  }

  template <int R, class F>
  static void dispatch(int64_t count, F&& f) {
    if (count == R) return f(std::integral_constant<int, R>());
    if constexpr (R < (int)kRows) dispatch<R + 1>(count, f);
  }
};

// ---- AMX: tiles of 16 rows by 16 columns ----

#ifdef __AMX_TILE__
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles 0-3: sums, 4-5: A, 6-7: B. Two row tiles by one panel, or one row tile by two panels.
template <bool kIsInt>
struct Tiles {
  typedef std::conditional_t<kIsInt, int8_t, bf16> A;
  typedef std::conditional_t<kIsInt, int32_t, float> Acc;
  static constexpr int kAPerStep = kIsInt ? 4 : 2;
  static constexpr int64_t kRows = 32;
  static constexpr int kPrefetch = 1024;  // words ahead: two tiles, as more is slower
  static int panels_at_once(int64_t rows) { return rows <= 16 ? 2 : 1; }
  static void begin() { configured() = 0; }
  static void end() { _tile_release(); }
  static int64_t& configured() {
    thread_local int64_t rows = 0;
    return rows;
  }

  static void configure(int64_t rows) {
    if (configured() == rows) return;
    configured() = rows;
    TileConfig config;
    uint8_t upper = (uint8_t)std::min<int64_t>(rows, 16), lower = (uint8_t)std::max<int64_t>(rows - 16, 0);
    bool is_single = rows <= 16;
    for (int tile = 0; tile < 8; tile++) {
      bool is_lower = !is_single && (tile == 2 || tile == 3 || tile == 5);
      config.rows[tile] = tile >= 6 ? 16 : is_lower ? lower : upper;
      config.row_bytes[tile] = 64;
    }
    _tile_loadconfig(&config);
  }

#define NS_TILE_DOT(c, a, b) \
  if constexpr (kIsInt) _tile_dpbssd(c, a, b); else _tile_dpbf16ps(c, a, b)

  static void block(const A* a, int64_t lda, int64_t count, const uint32_t* b, int64_t panel_words, Acc* c,
                    int64_t steps, int panels, bool is_first) {
    configure(count);
    if (count > 16) {
      for (int p = 0; p < panels; p++)
        tall(a, lda, b + p * panel_words, c + p * count * kPanel, steps, is_first);
    } else if (panels == 2) {
      wide(a, lda, b, b + panel_words, c, c + count * kPanel, steps, is_first);
    } else {
      for (int p = 0; p < panels; p++) {  // the second panel's sums are thrown away
        Acc* at = c + p * count * kPanel;
        single(a, lda, b + p * panel_words, at, steps, is_first);
      }
    }
  }

  static void start(const Acc* c0, const Acc* c1, const Acc* c2, const Acc* c3, bool is_first) {
    if (is_first) {
      _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    } else {
      _tile_loadd(0, c0, 128); _tile_loadd(1, c1, 128); _tile_loadd(2, c2, 128); _tile_loadd(3, c3, 128);
    }
  }

  static void prefetch(const uint32_t* b) {
    for (int line = 0; line < 32; line++) _mm_prefetch((const char*)(b + line * 16), _MM_HINT_T0);
  }

  static void tall(const A* a, int64_t lda, const uint32_t* b, Acc* c, int64_t steps, bool is_first) {
    const A* below = a + 16 * lda;
    int64_t stride = lda * (int64_t)sizeof(A);
    start(c, c + 16, c + 16 * kPanel, c + 16 * kPanel + 16, is_first);
    for (int64_t s = 0; s < steps; s += 16) {
      _tile_loadd(6, b + s * kPanel, 128);
      _tile_loadd(4, a + s * kAPerStep, stride);
      NS_TILE_DOT(0, 4, 6);
      _tile_loadd(7, b + s * kPanel + 16, 128);
      NS_TILE_DOT(1, 4, 7);
      _tile_loadd(5, below + s * kAPerStep, stride);
      NS_TILE_DOT(2, 5, 6);
      NS_TILE_DOT(3, 5, 7);
    }
    _tile_stored(0, c, 128); _tile_stored(1, c + 16, 128);
    _tile_stored(2, c + 16 * kPanel, 128); _tile_stored(3, c + 16 * kPanel + 16, 128);
  }

  static void wide(const A* a, int64_t lda, const uint32_t* b, const uint32_t* d, Acc* c, Acc* e, int64_t steps,
                   bool is_first) {
    int64_t stride = lda * (int64_t)sizeof(A);
    start(c, c + 16, e, e + 16, is_first);
    for (int64_t s = 0; s < steps; s += 16) {
      prefetch(b + s * kPanel + kPrefetch);
      prefetch(d + s * kPanel + kPrefetch);
      _tile_loadd(4, a + s * kAPerStep, stride);
      _tile_loadd(6, b + s * kPanel, 128);
      NS_TILE_DOT(0, 4, 6);
      _tile_loadd(7, b + s * kPanel + 16, 128);
      NS_TILE_DOT(1, 4, 7);
      _tile_loadd(6, d + s * kPanel, 128);
      NS_TILE_DOT(2, 4, 6);
      _tile_loadd(7, d + s * kPanel + 16, 128);
      NS_TILE_DOT(3, 4, 7);
    }
    _tile_stored(0, c, 128); _tile_stored(1, c + 16, 128);
    _tile_stored(2, e, 128); _tile_stored(3, e + 16, 128);
  }

  static void single(const A* a, int64_t lda, const uint32_t* b, Acc* c, int64_t steps, bool is_first) {
    int64_t stride = lda * (int64_t)sizeof(A);
    if (is_first) {
      _tile_zero(0); _tile_zero(1);
    } else {
      _tile_loadd(0, c, 128); _tile_loadd(1, c + 16, 128);
    }
    for (int64_t s = 0; s < steps; s += 16) {
      _tile_loadd(4, a + s * kAPerStep, stride);
      _tile_loadd(6, b + s * kPanel, 128);
      NS_TILE_DOT(0, 4, 6);
      _tile_loadd(7, b + s * kPanel + 16, 128);
      NS_TILE_DOT(1, 4, 7);
    }
    _tile_stored(0, c, 128); _tile_stored(1, c + 16, 128);
  }
#undef NS_TILE_DOT
};
typedef Tiles<false> Bf16Kernel;
#else
typedef Vectors<Bf16Dot> Bf16Kernel;
#endif
typedef Vectors<FloatDot> FloatKernel;

// ---- the loops around a block kernel ----

// Sizes of one product; `steps` is that of the packed form.
struct Shape {
  int64_t rows, columns, steps;
  int64_t panels() const { return ceil_div(columns, kPanel); }
};

inline void put(float& to, float x) { to = x; }
inline void put(bf16& to, float x) { to = narrow(x); }

// Columns [0, width) of a panel's row: `vector(n)` gives kLanes results from column n on, for the rest one by one.
template <class Y, class Vector>
inline void put_row(Y* to, int64_t width, Vector&& vector) {
  for (int64_t n = 0; n < width; n += kLanes) {
    if (n + kLanes <= width) {
      store(to + n, vector(n));
      continue;
    }
    Y lanes[kLanes];
    store(lanes, vector(n));
    memcpy(to + n, lanes, (width - n) * sizeof(Y));
  }
}

// kLanes of a bias from column n on; past the last column zeros.
template <class Y>
inline Floats bias_lanes(const Y* bias, int64_t n, int64_t columns) {
  if (n + kLanes <= columns) return load(bias + n);
  Y lanes[kLanes] = {};
  for (int64_t i = 0; n + i < columns; i++) lanes[i] = bias[n + i];
  return load(lanes);
}

// c [rows][32] of one panel -> y, with y's dtype and a bias.
template <class Y>
struct FloatOut {
  Y* y;
  int64_t ldy;
  const Y* bias;
  int64_t columns;

  void operator()(const float* c, int64_t row, int64_t count, int64_t column, int64_t width) const {
    for (int64_t r = 0; r < count; r++, c += kPanel)
      put_row(y + (row + r) * ldy + column, width, [&](int64_t n) {
        return bias ? add(load(c + n), bias_lanes(bias, column + n, columns)) : load(c + n);
      });
  }
};

// Where panels lie: the first one asked for, and words from one to the next.
struct Panels {
  const uint32_t* words;
  int64_t stride;
};

// Panels of a packed weight, read where they are.
struct Packed {
  const uint32_t* words;
  int64_t stride;
  Panels operator()(int64_t first, int) const { return {words + first * stride, stride}; }
};

// One product, cut into items that threads can do in any order: (slice of rows, run of panels). In an item, panels are
// the outer loop, K blocks the middle and rows the inner one: the block of a panel stays in L1, the slice of A in L2.
// `panel(first, count)` gives Panels; `out(c, row, count, column, width)` takes finished sums [count][32].
template <class Kernel, class Panel, class Out>
struct Product {
  typedef typename Kernel::A A;
  typedef typename Kernel::Acc Acc;
  const A* a;
  int64_t lda;
  Panel panel;
  Shape shape;
  Out out;
  int64_t slice, slices, run, runs;
  int at_once;

  Product(const A* a, int64_t lda, Panel panel, const Shape& shape, Out out)
      : a(a), lda(lda), panel(panel), shape(shape), out(out) {
    int64_t row_bytes = shape.steps * Kernel::kAPerStep * (int64_t)sizeof(A);
    int64_t fitting = std::max<int64_t>(kSliceBytes / row_bytes / Kernel::kRows, 1) * Kernel::kRows;
    slices = std::max<int64_t>(ceil_div(shape.rows, fitting), 1);
    slice = ceil_div(ceil_div(shape.rows, slices), Kernel::kRows) * Kernel::kRows;
    slices = shape.rows ? ceil_div(shape.rows, slice) : 0;
    at_once = Kernel::panels_at_once(std::min(shape.rows, slice));
    run = std::min<int64_t>(8, shape.panels() / (8 * Pool::get().threads())) / at_once * at_once;
    run = std::max<int64_t>(run, at_once);
    runs = ceil_div(shape.panels(), run);
  }

  int64_t items() const { return slices * runs; }
  bool is_worth_sharing() const { return shape.rows * shape.columns * shape.steps >= kSmallWork; }

  void operator()(int64_t item) const {
    int64_t first_row = item / runs * slice, rows = std::min(slice, shape.rows - first_row);
    int64_t first = item % runs * run, end = std::min(first + run, shape.panels());
    Kernel::begin();
    for (int64_t p = first; p < end; p += at_once) one(first_row, rows, p, (int)std::min<int64_t>(at_once, end - p));
    Kernel::end();
  }

 private:
  void one(int64_t first_row, int64_t rows, int64_t p, int panels) const {
    Acc* c = (Acc*)scratch<Kernel>(sizeof(Acc) * at_once * slice * kPanel);
    int64_t block = rows <= Kernel::kRows ? shape.steps : kBlockSteps;
    Panels b = panel(p, panels);
    for (int64_t step = 0; step < shape.steps; step += block)
      for (int64_t row = 0; row < rows; row += Kernel::kRows)
        Kernel::block(a + (first_row + row) * lda + step * Kernel::kAPerStep, lda, std::min(Kernel::kRows, rows - row),
                      b.words + step * kPanel, b.stride, c + row * kPanel * at_once,
                      std::min(block, shape.steps - step), panels, step == 0);
    for (int64_t row = 0; row < rows; row += Kernel::kRows) {
      int64_t count = std::min(Kernel::kRows, rows - row);
      for (int i = 0; i < panels; i++) {
        int64_t column = (p + i) * kPanel;
        out(c + row * kPanel * at_once + i * count * kPanel, first_row + row, count, column,
            std::min(kPanel, shape.columns - column));
      }
    }
  }
};

template <class Kernel, class Panel, class Out>
void multiply(const typename Kernel::A* a, int64_t lda, Panel panel, const Shape& shape, Out out) {
  Product<Kernel, Panel, Out> product(a, lda, panel, shape, out);
  each_if(product.is_worth_sharing(), product.items(), product);
}

// ---- what Python calls ----

// Steps of a packed K: padded so that every level may read the same weights.
inline int64_t bf16_steps(int64_t k) { return ceil_div(k, 32) * 16; }

template <class T>
inline void pack_panel(const T* w, int64_t ldw, T* panel, int64_t columns, int64_t k, int64_t steps) {
  constexpr int64_t per = 4 / sizeof(T);
  memset(panel, 0, steps * kPanel * 4);
  for (int64_t n = 0; n < columns; n++)
    for (int64_t i = 0; i < k; i++) panel[(i / per * kPanel + n) * per + i % per] = w[n * ldw + i];
}

template <class T>
inline void pack(const T* w, int64_t ldw, T* packed, int64_t n, int64_t k, int64_t steps) {
  constexpr int64_t per = 4 / sizeof(T);
  each(ceil_div(n, kPanel), [&](int64_t p) {
    pack_panel(w + p * kPanel * ldw, ldw, packed + p * steps * kPanel * per, std::min(kPanel, n - p * kPanel), k, steps);
  });
}

// Row `ids[i]` of the original weight -> y[i]: the embedding served from the packed form.
template <class T>
inline void gather(const int64_t* ids, int64_t count, const T* packed, T* y, int64_t k, int64_t steps) {
  constexpr int64_t per = 4 / sizeof(T);
  each(count, [&](int64_t i) {
    const T* from = packed + (ids[i] / kPanel * steps * kPanel + ids[i] % kPanel) * per;
    T* to = y + i * k;
    for (int64_t s = 0; s < k / per; s++) memcpy(to + s * per, from + s * kPanel * per, 4);
    for (int64_t j = k / per * per; j < k; j++) to[j] = from[j / per * kPanel * per + j % per];
  });
}

// x as the kernel wants it: its own memory when that will do, else a padded or widened copy.
template <class Kernel>
inline const typename Kernel::A* prepare(const bf16* x, int64_t ldx, const Shape& shape, int64_t k, int64_t* lda) {
  typedef typename Kernel::A A;
  int64_t width = shape.steps * Kernel::kAPerStep;
  if (std::is_same<A, bf16>::value && width == k) {
    *lda = ldx;
    return (const A*)x;
  }
  *lda = width;
  A* a = (A*)scratch<A[2]>(sizeof(A) * shape.rows * width);
  each(shape.rows, [&](int64_t r) {
    for (int64_t i = 0; i < k; i++) {
      if constexpr (std::is_same<A, bf16>::value) a[r * width + i] = x[r * ldx + i];
      else a[r * width + i] = widen(x[r * ldx + i]);
    }
    memset(a + r * width + k, 0, sizeof(A) * (width - k));
  });
  return a;
}

inline void linear_bf16(const bf16* x, int64_t ldx, const uint32_t* packed, const bf16* bias, bf16* y, int64_t ldy,
                        int64_t rows, int64_t n, int64_t k) {
  Shape shape{rows, n, bf16_steps(k)};
  int64_t lda, stride = shape.steps * kPanel;
  auto a = prepare<Bf16Kernel>(x, ldx, shape, k, &lda);
  multiply<Bf16Kernel>(a, lda, Packed{packed, stride}, shape, FloatOut<bf16>{y, ldy, bias, n});
}

inline void linear_float(const float* x, int64_t ldx, const uint32_t* packed, const float* bias, float* y, int64_t ldy,
                         int64_t rows, int64_t n, int64_t k) {
  Shape shape{rows, n, k};
  multiply<FloatKernel>(x, ldx, Packed{packed, k * kPanel}, shape, FloatOut<float>{y, ldy, bias, n});
}

}  // namespace nanoserve
