#include "operators.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <exception>

#include "counters.h"
#include "generator.h"
#include "shapes.h"
#include "tensors.h"

namespace sim {
namespace {

using Values = std::vector<c10::IValue>;

bool begins(const std::string& text, const char* with) { return text.rfind(with, 0) == 0; }

// Operators that also take the host's tensors, as on CUDA; others take those without dimensions only.
bool takes_host_tensors(const std::string& name) {
  for (const char* with : {"aten::index", "aten::_index_put", "aten::_foreach", "aten::_amp", "aten::_fused"})
    if (begins(name, with)) return true;
  return false;
}

// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Values given)
      : op_(op), signature_(signature_of(op)), given_(std::move(given)), device_(place()),
        stream_(current_stream(device_)) {
    for (size_t i = 0; i < given_.size(); ++i) on_host_.push_back(on_host(i));
  }

  Values run() {
    if (!signature_.returns_new && !signature_.has_out) return queued(nullptr);
    auto shapes = shapes_of(op_, signature_, given_);
    return shapes == nullptr ? waited_for() : queued(shapes.get());
  }

 private:
  // All tensors must be on one device.
  int place() const {
    int device = -1;
    for (const auto& value : given_) {
      if (device < 0 && value.isDevice() && value.toDevice().type() == DEVICE_TYPE) device = value.toDevice().index();
      for_each_tensor(value, [&](const at::Tensor& tensor) {
        if (!is_ours(tensor)) {
          TORCH_CHECK(tensor.dim() == 0 || takes_host_tensors(signature_.name),
                      "Expected all tensors to be on the same device, but ", signature_.name, " got one on ",
                      tensor.device(), " and others on the simulated accelerator");
          return;
        }
        TORCH_CHECK(device < 0 || device == tensor.device().index(),
                    "Expected all tensors to be on the same device, but ", signature_.name, " got some on sim:", device,
                    " and ", tensor.device());
        device = tensor.device().index();
      });
    }
    return device < 0 ? current_device() : device;
  }

  // An argument for the CPU's kernel. The host's tensors are copied: the caller may change them before it runs.
  c10::IValue on_host(size_t i) {
    if (signature_.generator[i]) {
      std::optional<at::Generator> asked;
      if (given_[i].isGenerator()) asked = given_[i].toGenerator();
      return kernel_generator(asked, device_);
    }
    auto replace = [&](const at::Tensor& tensor) {
      if (!is_ours(tensor)) return tensor.clone();
      add_touch(touches_, tensor, signature_.written[i]);
      return host_alias(tensor);
    };
    return with_tensors(given_[i], replace, c10::DeviceType::CPU);
  }

  // The kernel runs when its stream gets to it.
  Values queued(const Shapes* shapes) {
    if (shapes != nullptr) resize_out(*shapes);
    Values results;
    std::vector<std::vector<at::Tensor>> targets;  // for each result the memory that the kernel's tensors go to
    for (size_t r = 0; r < signature_.returned.size(); ++r) {
      targets.emplace_back();
      int same = signature_.returned[r];
      auto make = [&](const at::Tensor& like) {
        auto made = new_tensor(like.sizes(), like.strides(), like.scalar_type(), device_);
        add_touch(touches_, made, true);
        targets.back().push_back(host_alias(made));
        return made;
      };
      results.push_back(same >= 0 ? given_[same] : with_tensors(shapes->results[r], make, DEVICE_TYPE));
    }
    launch(stream_, signature_.name, touches_, [op = op_, on_host = on_host_, targets = std::move(targets)]() mutable {
      at::AutoDispatchBelowADInplaceOrView below;
      Values made = std::move(on_host);
      op.callBoxed(&made);
      for (size_t r = 0; r < targets.size(); ++r) {
        auto target = targets[r].begin();
        for_each_tensor(made[r], [&](const at::Tensor& tensor) {
          if (target == targets[r].end()) return;
          // The CPU's kernel may leave empty what other devices keep for the backward.
          if (tensor.numel() == target->numel())
            target->copy_(tensor);
          else
            target->zero_();
          ++target;
        });
      }
    });
    return results;
  }

  void resize_out(const Shapes& shapes) {
    for (size_t i = 0; i < given_.size(); ++i) {
      if (!signature_.out[i] || !given_[i].isTensor()) continue;
      auto out = given_[i].toTensor();
      const auto& wanted = shapes.arguments[i].toTensor();
      if (out.sizes().equals(wanted.sizes())) continue;
      out.resize_(wanted.sizes());
      on_host_[i] = host_alias(out);
      add_touch(touches_, out, true);
    }
  }

  // The host waits for the kernel, and the results' memory is made afterwards.
  Values waited_for() {
    Values made = on_host_;
    for (size_t i = 0; i < given_.size(); ++i)
      if (signature_.out[i] && given_[i].isTensor())
        made[i] = at::empty({0}, given_[i].toTensor().options().device(at::kCPU));
    std::exception_ptr failure;
    launch(stream_, signature_.name, touches_, [&] {
      try {
        at::AutoDispatchBelowADInplaceOrView below;
        op_.callBoxed(&made);
      } catch (...) {
        failure = std::current_exception();
      }
    });
    synchronize(stream_, signature_.name);
    if (failure) std::rethrow_exception(failure);
    auto upload = [&](const at::Tensor& tensor) {
      auto uploaded = new_tensor(tensor.sizes(), tensor.strides(), tensor.scalar_type(), device_);
      uploaded.copy_(tensor, true);
      return uploaded;
    };
    Values results;
    for (size_t r = 0; r < signature_.returned.size(); ++r) {
      int same = signature_.returned[r];
      if (same >= 0 && signature_.out[same]) {
        auto out = given_[same].toTensor();
        out.resize_(made[r].toTensor().sizes());
        out.copy_(made[r].toTensor(), true);
      }
      results.push_back(same >= 0 ? given_[same] : with_tensors(made[r], upload, DEVICE_TYPE));
    }
    return results;
  }

  const c10::OperatorHandle& op_;
  const Signature& signature_;
  Values given_;
  int device_;
  Stream& stream_;
  std::vector<Touch> touches_;
  Values on_host_;
};

}  // namespace

void run_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  size_t count = op.schema().arguments().size();
  Values given(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  torch::jit::drop(*stack, count);
  for (auto& result : Call(op, std::move(given)).run()) stack->push_back(std::move(result));
}

}  // namespace sim
