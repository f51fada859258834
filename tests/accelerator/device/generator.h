// Random numbers: one default generator for each device, with a seed and an offset, as CUDA's Philox has them.
//
// A kernel takes its numbers when it is launched, not when it runs: the launch takes the seed and the offset, and moves
// the offset. So what a kernel draws depends on the order of launches on a device, whatever its streams do. The numbers
// themselves come from a CPU generator that is seeded with both, and differ from CUDA's.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>

namespace sim {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);

// The CPU generator of one kernel; moves the generator that was asked for, or the device's.
at::Generator kernel_generator(const std::optional<at::Generator>& asked, int device);

}  // namespace sim
