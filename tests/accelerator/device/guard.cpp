// How PyTorch asks for devices, streams and events: the implementation behind torch.accelerator, torch.Stream and
// torch.Event.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "counters.h"
#include "event.h"
#include "interpreter.h"
#include "memory.h"

namespace sim {
namespace {

struct Event {
  MarkPtr mark;  // of the last record; under `launching`
  bool timing;
};

int index_of(c10::Device device) { return device.index() < 0 ? current_device() : device.index(); }

MarkPtr mark_of(void* event) {
  if (event == nullptr) return nullptr;
  std::lock_guard guard(launching);
  return static_cast<Event*>(event)->mark;
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return DEVICE_TYPE; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(settings.devices); }

  c10::Device getDevice() const override {
    return c10::Device(DEVICE_TYPE, static_cast<c10::DeviceIndex>(current_device()));
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < settings.devices, "there is no device ", device, ", only ", settings.devices);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device() = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto old = getDevice();
    setDevice(device);
    return old;
  }

  c10::Stream getStream(c10::Device device) const override { return current_stream(index_of(device)).handle(); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(index_of(device), 0).handle(); }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(index_of(device)).handle(); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto old = current_stream(stream.device_index()).handle();
    set_current_stream(stream_of(stream));
    return old;
  }
  bool queryStream(const c10::Stream& stream) const override { return stream_of(stream).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(stream_of(stream), "stream.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device < 0 ? current_device() : device, "device.synchronize");
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag flag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "the event belongs to sim:", static_cast<int>(device),
                ", the stream to sim:", static_cast<int>(stream.device_index()));
    counters.count("events_recorded");
    if (*event == nullptr) {
      counters.count("events_made");
      *event = new Event{nullptr, flag == c10::EventFlag::BACKEND_DEFAULT};
    }
    std::lock_guard guard(launching);
    static_cast<Event*>(*event)->mark = put_mark(stream_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    auto mark = mark_of(event);
    if (mark == nullptr) return;
    counters.count("stream_waits");
    std::lock_guard guard(launching);
    let_wait(stream_of(stream), mark);
  }
  bool queryEvent(void* event) const override {
    auto mark = mark_of(event);
    return mark == nullptr || mark->passed();
  }
  void synchronizeEvent(void* event) const override {
    auto mark = mark_of(event);
    if (mark == nullptr) return;
    counters.host_wait("event.synchronize");
    {
      ReleasedInterpreter released;
      mark->wait();
    }
    {
      std::lock_guard guard(launching);
      join(host_clock(), mark->clock);
    }
    raise_failure();
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto from = mark_of(first), to = mark_of(second);
    TORCH_CHECK(from != nullptr && to != nullptr, "both events must have been recorded");
    TORCH_CHECK(static_cast<Event*>(first)->timing && static_cast<Event*>(second)->timing,
                "both events must have been made with enable_timing=True");
    TORCH_CHECK(from->passed() && to->passed(), "both events must have been passed: synchronize first");
    return std::chrono::duration<double, std::milli>(to->time() - from->time()).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator().recordStream(data, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace
}  // namespace sim
