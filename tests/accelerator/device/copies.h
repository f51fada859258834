// Copies between devices and the host, and what else changes or reads a tensor's memory without being a kernel.
//
// As on CUDA, a copy between two devices runs on the source's current stream, between two waits: for the target's stream
// before, and of the target's stream after. A copy from pageable host memory is taken at once, and a copy from or to
// pinned memory makes the host wait only if it is asked to.
#pragma once

#include <ATen/core/Tensor.h>

namespace sim {

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking);
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to);
at::Scalar item(const at::Tensor& self);
const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format);
void resize_storage(const c10::Storage& storage, size_t bytes);
at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides);

}  // namespace sim
