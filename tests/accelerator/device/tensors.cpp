#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/DeviceGuard.h>

namespace sim {

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == DEVICE_TYPE; }

at::Tensor new_tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, int device) {
  c10::DeviceGuard guard(c10::Device(DEVICE_TYPE, static_cast<c10::DeviceIndex>(device)));
  return at::detail::empty_strided_generic(
      sizes, strides, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

at::Tensor host_alias(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::DataPtr data(const_cast<void*>(storage.data()), c10::kCPU);
  c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), nullptr, false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(same), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return alias;
}

at::Tensor meta_alias(const at::Tensor& tensor) {
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

std::optional<Touch> touch_of(const at::Tensor& tensor, bool write) {
  auto* block = static_cast<Block*>(tensor.storage().data_ptr().get_context());
  if (block == nullptr || tensor.numel() == 0) return {};
  auto size = tensor.element_size();
  size_t low = tensor.storage_offset() * size, last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  bool looked_at = at::isFloatingType(tensor.scalar_type()) && tensor.is_non_overlapping_and_dense();
  return Touch{block, low, low + (last + 1) * size, write, looked_at ? static_cast<int>(size) : 0};
}

void add_touch(std::vector<Touch>& touches, const at::Tensor& tensor, bool write) {
  if (auto touch = touch_of(tensor, write)) touches.push_back(*touch);
}

c10::IValue with_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& replace,
                         c10::DeviceType place) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(replace(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(each.defined() ? replace(each) : each);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& each : value.toOptionalTensorVector())
      list.push_back(each.has_value() && each->defined() ? std::optional(replace(*each)) : each);
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == DEVICE_TYPE) return c10::Device(place);
  return value;
}

void for_each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  auto look = [&](const at::Tensor& tensor) {
    visit(tensor);
    return tensor;
  };
  with_tensors(value, look, c10::DeviceType::CPU);
}

}  // namespace sim
