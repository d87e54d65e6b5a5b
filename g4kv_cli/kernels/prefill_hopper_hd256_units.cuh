// Prefill at head_dim 256 for sm_90: which tiles and keys a block of threads works on, one unit after the other.
#pragma once

#include "prefill_hopper_hd256_shape.cuh"

namespace g4kv {

// Keys [begin, end) of a request, walked in whole blocks. Those of [oldest, kv_len) are the request's and seen by some
// query of it: what stands in other slots may be NaN.
struct KeyWalk {
  int first_page;  // where in page_indices the request's page 0 is, or would be
  int begin;
  int end;
  int oldest;
  int kv_len;

  __device__ __forceinline__ int first_key() const { return begin / PairPrefill::kKeys * PairPrefill::kKeys; }
  __device__ __forceinline__ int blocks() const {
    return max(1, ceil_divide(end, PairPrefill::kKeys) - begin / PairPrefill::kKeys);
  }
};

// What a block of threads works on in one go: a pair of tiles, one a consumer, of which each has all its keys or half
// of them. A cluster's two blocks have the halves of the same pairs in the same order. Keys of tiles of requests that
// leave most of the card idle are halved: it is the request alone that decides whether and where.
//
// A warp works it out together, lane l what is tile l % 2's: a launch begins with this, and its instructions are
// fetched one line after the other.
struct TileUnit {
  static constexpr int kSplitKeys = 512;  // fewer keys of a request's first token are not worth it
  static constexpr int kAllKeys = 2;

  int kv_head;
  int part;                       // of the keys: 0, 1 or kAllKeys
  bool has[PairPrefill::kTiles];  // a tile for this consumer
  bool is_shared;                 // the consumers' keys are one request's, and walked once

  // Wholes [pair, last first][kv_head], and halves [pair, last first][kv_head][part], where a launch has clusters: the
  // last tiles of a request see the most keys. A pair whose tiles are of both kinds is in both, with one tile each.
  // Halves come behind the wholes, which take longer, unless there can be no wholes of many tiles.
  __device__ __forceinline__ TileUnit(const AttentionParams& p, int number, int lane) {
    // Each time anew: what the compiler works out ahead of all units takes registers.
    int num_tiles = p.num_tiles;
    asm volatile("" : "+r"(num_tiles));
    const int pairs = ceil_divide(num_tiles, PairPrefill::kTiles), units = pairs * p.num_kv_heads;
    part = kAllKeys;
    if (p.num_splits > 0) {
      const bool halves_first = num_tiles * p.num_kv_heads <= p.num_splits;
      const int half = halves_first ? number : number - whole_numbers(units);
      if (half >= 0 && half < 2 * units) {
        part = half % 2;
        number = half / 2;
      } else if (halves_first) {
        number -= 2 * units;
      }
    }
    const int rank = (unsigned)number / (unsigned)p.num_kv_heads;
    kv_head = number - rank * p.num_kv_heads;
    // Negative behind the last unit, where there is nothing.
    const int tile = (pairs - 1 - rank) * PairPrefill::kTiles + lane % PairPrefill::kTiles;
    const int nearest = min(max(tile, 0), num_tiles - 1);
    index_ = p.tile_indices[nearest];
    rows_ = load_request(p, p.tile_requests[nearest]);
    oldest_ = p.window_left < 0 ? 0 : max(0, rows_.kv_len - rows_.q_len - p.window_left);
    first_page_ = p.page_indptr[rows_.request] - p.page_origins[rows_.request];
    const bool is_mine = tile == nearest && is_split_request(p) == (part != kAllKeys);
    const unsigned tiles = __ballot_sync(kAllLanes, is_mine);
    has[0] = tiles & 1;
    has[1] = tiles & 2;
    is_shared = has[0] && has[1] && of(rows_.request, 0) == of(rows_.request, 1);
    // The middle is that of a pair which begins at an even tile of the request, whatever pair the tile is in here.
    // Lanes 2 and 3 have that pair's keys.
    const bool of_pair = part != kAllKeys && lane % 4 >= 2;
    begin_ = tile_of(p, rows_, of_pair ? index_ & ~1 : index_, kv_head, PairPrefill::kRows).begin;
    end_ = tile_of(p, rows_, of_pair ? index_ | 1 : index_, kv_head, PairPrefill::kRows).end;
    if (part != kAllKeys) {
      const int blocks = begin_ / PairPrefill::kKeys + ceil_divide(end_, PairPrefill::kKeys);
      const int middle = (__shfl_sync(kAllLanes, blocks, lane | 2) + 1) / 2 * PairPrefill::kKeys;
      if (part == 0) {
        end_ = min(end_, middle);
      } else {
        begin_ = max(begin_, middle);
      }
    }
  }

  static __device__ __forceinline__ int count(const AttentionParams& p) {
    const int units = ceil_divide(p.num_tiles, PairPrefill::kTiles) * p.num_kv_heads;
    return p.num_splits > 0 ? whole_numbers(units) + 2 * units : units;
  }

  __device__ __forceinline__ int walks() const { return has[0] + (has[1] && !(has[0] && is_shared)); }

  // All lanes of the warp come here, as below.
  __device__ __forceinline__ TileGeometry tile(const AttentionParams& p, int which) const {
    const RequestRows rows = {of(rows_.request, which), of(rows_.first_token, which), of(rows_.q_len, which),
                              of(rows_.kv_len, which)};
    TileGeometry tile = tile_of(p, rows, of(index_, which), kv_head, PairPrefill::kRows);
    tile.begin = of(begin_, which);
    tile.end = of(end_, which);
    return tile;
  }

  __device__ __forceinline__ KeyWalk walk(const AttentionParams& p, int number) const {
    const int which = has[0] ? number : 1;
    KeyWalk walk = {of(first_page_, which), of(begin_, which), of(end_, which), of(oldest_, which),
                    of(rows_.kv_len, which)};
    if (is_shared) {
      walk.begin = min(walk.begin, of(begin_, 1));
      walk.end = max(walk.end, of(end_, 1));
    }
    return walk;
  }

 private:
  // Of tile lane % 2; keys of the part.
  RequestRows rows_;
  int index_;
  int first_page_;
  int oldest_;  // that the request's first token sees
  int begin_;
  int end_;

  static __device__ __forceinline__ int of(int value, int which) { return __shfl_sync(kAllLanes, value, which); }

  // Even, so that each part is that of one block of the cluster.
  static __device__ __forceinline__ int whole_numbers(int units) { return units + units % 2; }

  // p.num_splits: tiles times KV heads of such a request at most. Each part of its keys then has some of every row.
  __device__ __forceinline__ bool is_split_request(const AttentionParams& p) const {
    const int tiles = ceil_divide(rows_.q_len * (p.num_qo_heads / p.num_kv_heads), PairPrefill::kRows);
    const int seen_first = rows_.kv_len - rows_.q_len + 1 - oldest_;
    return tiles > 1 && tiles * p.num_kv_heads <= p.num_splits && seen_first >= kSplitKeys;
  }
};

}  // namespace g4kv
