#include "copies.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>

#include "event.h"
#include "pinned.h"
#include "tensors.h"

namespace sim {
namespace {

std::function<void()> copying(at::Tensor from, at::Tensor to) {
  return [from = std::move(from), to = std::move(to)] {
    at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  };
}

void order(Stream& later, Stream& earlier) {
  if (&later == &earlier) return;
  std::lock_guard guard(launching);
  let_wait(later, put_mark(earlier));
}

void between_devices(const at::Tensor& from, const at::Tensor& to, const std::vector<Touch>& touches) {
  auto& source = current_stream(from.device().index());
  auto& target = current_stream(to.device().index());
  order(source, target);
  launch(source, "a copy", touches, copying(host_alias(from), host_alias(to)));
  order(target, source);
}

void from_host(const at::Tensor& from, const at::Tensor& to, const std::vector<Touch>& touches, bool non_blocking) {
  auto& stream = current_stream(to.device().index());
  if (non_blocking && is_pinned(from.const_data_ptr())) {
    launch(stream, "a copy from pinned memory", touches, copying(from.detach(), host_alias(to)));
    record_pinned(from.const_data_ptr(), stream);
    return;
  }
  launch(stream, "a copy from the host", touches, copying(from.clone(), host_alias(to)));
  if (!non_blocking) synchronize(stream, "a copy from the host");
}

void to_host(const at::Tensor& from, const at::Tensor& to, const std::vector<Touch>& touches, bool non_blocking) {
  auto& stream = current_stream(from.device().index());
  launch(stream, "a copy to the host", touches, copying(host_alias(from), to.detach()));
  if (non_blocking && is_pinned(to.const_data_ptr()))
    record_pinned(to.const_data_ptr(), stream);
  else
    synchronize(stream, "a copy to the host");
}

}  // namespace

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  std::vector<Touch> touches;
  if (is_ours(from)) add_touch(touches, from, false);
  if (is_ours(to)) add_touch(touches, to, true);
  if (is_ours(from) && is_ours(to))
    between_devices(from, to, touches);
  else if (is_ours(to))
    from_host(from, to, touches, non_blocking);
  else
    to_host(from, to, touches, non_blocking);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const at::Tensor& self) {
  auto& stream = current_stream(self.device().index());
  std::vector<Touch> touches;
  add_touch(touches, self, false);
  at::Scalar value;
  launch(stream, "item", touches, [&value, same = host_alias(self)] { value = at::_local_scalar_dense(same); });
  synchronize(stream, "item");
  return value;
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (format.has_value()) impl->empty_tensor_restride(*format);
  size_t needed = (self.storage_offset() + self.numel()) * self.element_size();
  if (self.numel() > 0 && self.storage().nbytes() < needed) resize_storage(self.storage(), needed);
  return self;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  c10::DeviceGuard guard(storage.device());
  c10::DataPtr data = device_allocator().allocate(bytes);
  size_t common = std::min(bytes, impl->nbytes());
  if (common > 0) {
    auto *old = static_cast<Block*>(impl->data_ptr().get_context()), *made = static_cast<Block*>(data.get_context());
    launch(current_stream(storage.device().index()), "resize_", {{old, 0, common, false}, {made, 0, common, true}},
           [to = made->address, from = old->address, common] { std::memcpy(to, from, common); });
  }
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(bytes);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (strides.size() == sizes.size()) {
    impl->set_sizes_and_strides(sizes, strides, offset);
  } else {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset);
  }
  return self;
}

}  // namespace sim
