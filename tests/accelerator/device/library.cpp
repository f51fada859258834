// Which operator does what on the device: nearly all are launched with the CPU's kernel; the others are here.
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "copies.h"
#include "operators.h"
#include "tensors.h"

namespace sim {
namespace {

using Sizes = at::IntArrayRef;

c10::DeviceIndex index_of(std::optional<at::Device> device) {
  return static_cast<c10::DeviceIndex>(device && device->index() >= 0 ? device->index() : current_device());
}

at::Tensor empty(Sizes sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::Device(DEVICE_TYPE, index_of(device)));
  return at::detail::empty_generic(sizes, &device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(Sizes sizes, Sizes strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  return new_tensor(sizes, strides, c10::dtype_or_default(dtype), index_of(device));
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  auto elements = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage(self, std::move(source), 0, {elements}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

// The CPU has no kernel of its own for it, and the composite one would not draw on this device.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1.0 / (1 - p)), mask};
}

// Convolutions of devices outside PyTorch come here, and are launched as the operators of the CPU.
template <typename... Arguments>
torch::jit::Stack run_as(const c10::OperatorHandle& op, Arguments&&... arguments) {
  torch::jit::Stack stack{c10::IValue(std::forward<Arguments>(arguments))...};
  run_operator(op, &stack);
  return stack;
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       Sizes stride, Sizes padding, Sizes dilation, bool transposed, Sizes output_padding,
                       int64_t groups) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  return run_as(op, input, weight, bias, stride.vec(), padding.vec(), dilation.vec(), transposed, output_padding.vec(),
                groups)[0].toTensor();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, Sizes stride, Sizes padding,
    Sizes dilation, bool transposed, Sizes output_padding, int64_t groups, std::array<bool, 3> mask) {
  static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  std::optional<std::vector<int64_t>> bias_sizes{{gradient.size(1)}};
  auto stack = run_as(op, gradient, input, weight, bias_sizes, stride.vec(), padding.vec(), dilation.vec(), transposed,
                      output_padding.vec(), groups, c10::List<bool>{mask[0], mask[1], mask[2]});
  auto tensor = [&](int i) { return stack[i].isTensor() ? stack[i].toTensor() : at::Tensor(); };
  return {tensor(0), tensor(1), tensor(2)};
}

}  // namespace

// As on CUDA, operators that draw have kernels of their own, which can be wrapped.
void add_random_operators(torch::Library& m) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.getNamespace() != std::optional<std::string_view>("aten")) continue;
    auto op = dispatcher.findSchemaOrThrow(name.name.c_str(), name.overload_name.c_str());
    if (!op.hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    for (const auto& argument : op.schema().arguments()) {
      if (argument.name() != "generator") continue;
      auto inside = name.name.substr(std::string("aten::").size());
      if (!name.overload_name.empty()) inside += "." + name.overload_name;
      m.impl(inside.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_operator>());
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>()); }

TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", native_dropout);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  // These have composite kernels, whose sums differ from those of the CPU's.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&run_operator>());
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&run_operator>());
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  add_random_operators(m);
}

}  // namespace sim
