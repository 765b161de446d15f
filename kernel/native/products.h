// Products with weights as narrow as a file holds them, in float32's accuracy, on the CPU.
#pragma once

#include "product_forms.h"
#include "product_tiles.h"
#include "product_vectors.h"

namespace mlxtape {

namespace products {

// From so many rows on tiles are faster, as measured: fewer are bound by memory either way.
inline bool takes_tiles(const Form& form, long rows) {
#if defined(MLXTAPE_TILES)
  const long least = form.kind == kAffine ? 4 : form.kind == kBfloat ? 6 : 32;
  return rows >= least && may_use_tiles();
#else
  (void)form, (void)rows;
  return false;
#endif
}

}  // namespace products

// How so many rows are multiplied, for logs and tests.
inline const char* product_path(const Form& form, long rows) {
  if (products::takes_tiles(form, rows)) return "amx";
#if defined(__AVX512F__)
  return "avx512";
#else
  return "vector";
#endif
}

// out [rows, features] = x [rows, width] times the weights. Another number of rows may take another
// path, and so another order of sums; threads never change a result.
inline void product(const Form& form, const uint8_t* blob, const float* x, long rows, float* out) {
#if defined(MLXTAPE_TILES)
  if (products::takes_tiles(form, rows)) {
    products::product_by_tiles(form, blob, x, rows, out);
    return;
  }
#endif
  products::product_by_vectors(form, blob, x, rows, out);
}

}  // namespace mlxtape
