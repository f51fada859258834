// Tensors of the device as tensors of other devices: the CPU's, on the same memory, and the meta device's.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <optional>

#include "launch.h"

namespace sim {

bool is_ours(const at::Tensor& tensor);

at::Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, int device);

// The same memory as a CPU tensor, for kernels. It does not keep the memory alive.
at::Tensor host_alias(const at::Tensor& tensor);

// The same shape without memory.
at::Tensor meta_alias(const at::Tensor& tensor);

// What a kernel that gets this tensor accesses; nothing if it is empty.
std::optional<Touch> touch_of(const at::Tensor& tensor, bool write);
void add_touch(std::vector<Touch>& touches, const at::Tensor& tensor, bool write);

// An operator's argument or result with each of its tensors replaced, and the device by one of another type.
c10::IValue with_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& replace,
                         c10::DeviceType place);
void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit);

}  // namespace sim
