// Pages by bulk tensor copies: where the boxes of a request's keys lie, and the rings of stages that they go to.
#pragma once

#include "attention_params.cuh"

namespace g4kv {

constexpr int kBoxKeys = 16;       // of one copy: they lie in one page whatever its size, a multiple of 16
constexpr int kBlockColumns = 64;  // of one copy: a 128-byte row of the swizzle

__device__ __forceinline__ int ceil_divide(int value, int divisor) { return (value + divisor - 1) / divisor; }

// Where 16 neighbouring keys lie.
struct BoxPlace {
  int page;
  int slot;
};

// The pages of a request, of which keys [begin, end) are wanted.
struct PageRow {
  const int* pages;  // by logical page
  int first_key;     // of the first and of the last box with such keys
  int last_key;

  __device__ __forceinline__ PageRow(const int* pages, int begin, int end)
      : pages(pages),
        first_key(begin / kBoxKeys * kBoxKeys),
        last_key(max(end - 1, begin) / kBoxKeys * kBoxKeys) {}

  // page_indices[request row][logical page - origin]
  __device__ __forceinline__ PageRow(const AttentionParams& p, int request, int begin, int end)
      : PageRow(p.page_indices + p.page_indptr[request] - p.page_origins[request], begin, end) {}

  // Other keys are nobody's business: the nearest box takes their place, and whoever reads hides them.
  __device__ __forceinline__ BoxPlace place_of(const AttentionParams& p, int key) const {
    const int nearest = min(max(key, first_key), last_key);
    const int logical_page = nearest / p.layout.page_size;
    BoxPlace place;
    place.page = pages[logical_page];
    place.slot = nearest - logical_page * p.layout.page_size;
    return place;
  }
};

// One more than the last stage is the first, a phase later.
template <int kStages>
struct RingPlace {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace g4kv
