// What every kernel says about a warp.
#pragma once

namespace g4kv {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

}  // namespace g4kv
