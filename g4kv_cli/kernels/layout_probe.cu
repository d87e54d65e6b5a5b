// Computes pool offsets with kv_offsets.cuh for listed coordinates, so that the host can compare every one of them
// with its own derivation. Touches no pool: the offsets may lie far past any memory there is.
#include "kv_offsets.cuh"

namespace g4kv {

constexpr int kCoordinateAxes = 6;  // page, layer, kv (0 = K, 1 = V), slot, head, dim
constexpr int kOffsetKinds = 3;     // the element, its head row, its K or V block

// The Python twin is cases/layout_probe.py:LayoutProbeParameters; kv_layout_struct_probe reports the offsets.
struct LayoutProbeParams {
  KvLayout layout;
  const int* coordinates;  // [count][kCoordinateAxes]
  long long* offsets;      // [count][kOffsetKinds]
  int count;
};

static_assert(sizeof(LayoutProbeParams) == 72, "cases/layout_probe.py states this size");

}  // namespace g4kv

// One thread a coordinate.
extern "C" __global__ void kv_layout_probe(const g4kv::LayoutProbeParams params) {
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= params.count) return;

  // coordinates[index][page, layer, kv, slot, head, dim]
  const int* coordinate = params.coordinates + (long long)index * g4kv::kCoordinateAxes;
  const int page = coordinate[0];
  const int layer = coordinate[1];
  const bool is_v = coordinate[2] != 0;
  const int slot = coordinate[3];
  const int head = coordinate[4];
  const int dim = coordinate[5];

  // offsets[index][element, row, block]
  long long* offsets = params.offsets + (long long)index * g4kv::kOffsetKinds;
  offsets[0] = g4kv::kv_element_offset(params.layout, page, layer, is_v, slot, head, dim);
  offsets[1] = g4kv::kv_row_offset(params.layout, page, layer, is_v, slot, head);
  offsets[2] = is_v ? g4kv::kv_layer_v_offset(params.layout, page, layer)
                    : g4kv::kv_layer_k_offset(params.layout, page, layer);
}

// What the compiler made of the structs that travel by value, in bytes: size, then every field's
// offset; after them the fields' values.
extern "C" __global__ void kv_layout_struct_probe(const g4kv::LayoutProbeParams params) {
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  // offsets[23]
  long long* report = params.offsets;
  const char* base = reinterpret_cast<const char*>(&params);
  const char* layout = reinterpret_cast<const char*>(&params.layout);
  report[0] = sizeof(g4kv::KvLayout);
  report[1] = reinterpret_cast<const char*>(&params.layout.kv_block_len) - layout;
  report[2] = reinterpret_cast<const char*>(&params.layout.layer_stride) - layout;
  report[3] = reinterpret_cast<const char*>(&params.layout.page_stride) - layout;
  report[4] = reinterpret_cast<const char*>(&params.layout.page_size) - layout;
  report[5] = reinterpret_cast<const char*>(&params.layout.num_layers) - layout;
  report[6] = reinterpret_cast<const char*>(&params.layout.num_kv_heads) - layout;
  report[7] = reinterpret_cast<const char*>(&params.layout.head_dim) - layout;
  report[8] = reinterpret_cast<const char*>(&params.layout.k_dim) - layout;
  report[9] = sizeof(g4kv::LayoutProbeParams);
  report[10] = layout - base;
  report[11] = reinterpret_cast<const char*>(&params.coordinates) - base;
  report[12] = reinterpret_cast<const char*>(&params.offsets) - base;
  report[13] = reinterpret_cast<const char*>(&params.count) - base;
  // The values as they arrived: a twin with two fields exchanged has the right size and still the wrong meaning.
  report[14] = params.layout.kv_block_len;
  report[15] = params.layout.layer_stride;
  report[16] = params.layout.page_stride;
  report[17] = params.layout.page_size;
  report[18] = params.layout.num_layers;
  report[19] = params.layout.num_kv_heads;
  report[20] = params.layout.head_dim;
  report[21] = params.layout.k_dim;
  report[22] = params.count;
}
