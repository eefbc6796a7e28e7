// The CPU kernels: one translation unit behind a plain C interface. Every exported name starts with ns_.
// Pointers are to tensors that Python has checked; sizes and strides count elements.
#include "pool.h"

#define NS_EXPORT extern "C" __attribute__((visibility("default")))

NS_EXPORT void ns_set_threads(int64_t threads) { nanoserve::Pool::get().resize((int)threads); }
NS_EXPORT int64_t ns_threads() { return nanoserve::Pool::get().threads(); }
NS_EXPORT void ns_set_spin(int64_t microseconds) { nanoserve::Pool::get().spin_for(microseconds); }

// Counts each of `items` once in `counts`: shows that the pool does every item exactly once.
NS_EXPORT void ns_count(int64_t* counts, int64_t items) {
  nanoserve::each(items, [&](int64_t i) { counts[i]++; });
}
