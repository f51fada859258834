#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Utils.h>
#include <ATen/ops/empty.h>
#include <c10/core/GeneratorImpl.h>

#include <vector>

#include "stream.h"

namespace sim {
namespace {

constexpr int64_t STATE_BYTES = 16;  // seed and offset

class GeneratorImpl final : public c10::GeneratorImpl {
 public:
  explicit GeneratorImpl(int device)
      : c10::GeneratorImpl(c10::Device(DEVICE_TYPE, static_cast<c10::DeviceIndex>(device)),
                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }

  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.device().is_cpu() && state.dtype() == caffe2::TypeMeta::Make<uint8_t>() &&
                    state.numel() == STATE_BYTES && state.is_contiguous(),
                "expected the state of a generator of the simulated accelerator: ", STATE_BYTES, " bytes on the CPU");
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0];
    offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({STATE_BYTES}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* words = static_cast<uint64_t*>(state.mutable_data_ptr());
    words[0] = seed_;
    words[1] = offset_;
    return state.getIntrusivePtr();
  }

  // A number for one kernel: a mixture of seed and offset (the finalizer of SplitMix64).
  uint64_t next() {
    uint64_t mixed = seed_ * 0x9E3779B97F4A7C15 + offset_++;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
    return mixed ^ (mixed >> 31);
  }

 private:
  GeneratorImpl* clone_impl() const override {
    auto* copy = new GeneratorImpl(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

}  // namespace

at::Generator new_generator(int device) { return at::make_generator<GeneratorImpl>(device); }

const at::Generator& default_generator(int device) {
  static const auto& all = *[] {
    auto* made = new std::vector<at::Generator>;
    for (int each = 0; each < MAX_DEVICES; ++each) made->push_back(new_generator(each));
    return made;
  }();
  return all[device < 0 ? current_device() : device];
}

at::Generator kernel_generator(const std::optional<at::Generator>& asked, int device) {
  const at::Generator& source = asked.has_value() && asked->defined() ? *asked : default_generator(device);
  TORCH_CHECK(source.device().type() == DEVICE_TYPE, "expected a generator on sim:", device, ", got one on ",
              source.device());
  auto* own = source.get<GeneratorImpl>();
  std::lock_guard guard(own->mutex_);
  return at::make_generator<at::CPUGeneratorImpl>(own->next());
}

}  // namespace sim
