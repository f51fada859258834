// What Python sees of the device; tests/accelerator/simulated.py has the rest.
#include <torch/csrc/utils/pybind.h>

#include "counters.h"
#include "generator.h"
#include "hooks.h"
#include "interpreter.h"
#include "memory.h"
#include "races.h"
#include "stream.h"

namespace py = pybind11;

namespace sim {
namespace {

void synchronize_all() {
  for (int device = 0; device < MAX_DEVICES; ++device) synchronize_device(device, "synchronize_all");
}

void configure(int devices, double delay_probability, int delay_us, uint64_t seed, int races, int poison, bool stacks,
               std::array<size_t, MAX_DEVICES> memory_limits) {
  settings = {devices, delay_probability, delay_us, seed, races, poison, stacks, memory_limits};
  for (int number = 0; number < STREAMS; ++number) stream_number(number).reseed();
}

py::dict stats(int device) {
  auto from = device_allocator().getDeviceStats(static_cast<c10::DeviceIndex>(device));
  py::dict result;
  result["allocated"] = from.allocated_bytes[0].current;
  result["peak_allocated"] = from.allocated_bytes[0].peak;
  result["reserved"] = from.reserved_bytes[0].current;
  result["peak_reserved"] = from.reserved_bytes[0].peak;
  result["out_of_memory"] = from.num_ooms;
  return result;
}

template <typename T>
T under_lock(const T& value) {
  std::lock_guard guard(counters.lock);
  return value;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("MAX_DEVICES") = MAX_DEVICES;
  m.def("register_hooks", &register_hooks);
  m.def("configure", &configure);
  m.def("synchronize_all", &synchronize_all);
  m.def("interpreter_ends", &interpreter_ends);
  m.def("device_count", [] { return settings.devices; });
  m.def("current_device", [] { return current_device(); });
  m.def("set_device", [](int device) { current_device() = device; });
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("stats", &stats);
  m.def("take_races", &take_races);
  m.def("take_poison_reads", &take_poison_reads);
  m.def("counts", [] { return under_lock(counters.counts); });
  m.def("host_waits", [] { return under_lock(counters.host_waits); });
  m.def("reset_counts", [] { counters.reset(); });
}

}  // namespace sim
