// Where an element of the paged KV pool lies: the device twin of g4kv_cli/model/kv_layout.py, and the only home of
// this arithmetic on the device. All offsets count elements (not bytes) from the start of the pool, in 64 bits: the
// offset of a page leaves int32 inside a pool of 5 GiB.
#pragma once

namespace g4kv {

// The Python twin is model/kv_layout.py:KvLayoutParameters: the size is asserted on both sides, and a probe kernel
// (layout_probe.cu) reports every offset as the compiler placed it (NVRTC 13.0 has no offsetof).
struct KvLayout {
  long long kv_block_len;  // elements of one K block, behind which V's begins: page_size * num_kv_heads * k_dim
  long long layer_stride;  // elements of one layer in a page: the K block, and V's of page_size * num_kv_heads * head_dim
  long long page_stride;   // elements of one page, all layers: num_layers * layer_stride
  int page_size;           // tokens
  int num_layers;
  int num_kv_heads;
  int head_dim;  // columns of a row of V
  int k_dim;     // of a row of K: head_dim (split), or the rotated ones alone, in ascending order (folded)
};

static_assert(sizeof(KvLayout) == 48, "model/kv_layout.py states this size");

// First element of a layer's K block in a page.
__device__ __forceinline__ long long kv_layer_k_offset(const KvLayout& layout, int page, int layer) {
  // pool[page][layer][K][..]
  return (long long)page * layout.page_stride + (long long)layer * layout.layer_stride;
}

// First element of a layer's V block in a page.
__device__ __forceinline__ long long kv_layer_v_offset(const KvLayout& layout, int page, int layer) {
  // pool[page][layer][V][..]
  return kv_layer_k_offset(layout, page, layer) + layout.kv_block_len;
}

// First element of one head row inside a K or V block; relative to the block.
__device__ __forceinline__ long long kv_row_in_block(const KvLayout& layout, bool is_v, int slot, int head) {
  // block[slot][head][..]
  return ((long long)slot * layout.num_kv_heads + head) * (is_v ? layout.head_dim : layout.k_dim);
}

// First element of the row of (page, layer, K or V, slot, head): k_dim or head_dim consecutive elements.
__device__ __forceinline__ long long kv_row_offset(const KvLayout& layout, int page, int layer, bool is_v, int slot,
                                                   int head) {
  // pool[page][layer][K, V][slot][head][..]
  const long long block =
      is_v ? kv_layer_v_offset(layout, page, layer) : kv_layer_k_offset(layout, page, layer);
  return block + kv_row_in_block(layout, is_v, slot, head);
}

// One element.
__device__ __forceinline__ long long kv_element_offset(const KvLayout& layout, int page, int layer, bool is_v,
                                                       int slot, int head, int dim) {
  // pool[page][layer][K, V][slot][head][dim]
  return kv_row_offset(layout, page, layer, is_v, slot, head) + dim;
}

}  // namespace g4kv
