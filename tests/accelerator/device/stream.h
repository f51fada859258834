// Streams: each is a queue whose work one thread does in order, some of it after a delay.
//
// As on CUDA, the host goes on at once; work of different streams is not ordered but by events; each device has a
// default stream and a pool of 32, so that the 33rd new stream is the first one again. Unlike CUDA's legacy default
// stream, this one waits for no other stream.
#pragma once

#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <string>

#include "clock.h"
#include "settings.h"

namespace sim {

constexpr auto DEVICE_TYPE = c10::DeviceType::PrivateUse1;
constexpr int POOL = 32;
constexpr int STREAMS = MAX_DEVICES * (POOL + 1);

// Held while something is launched, so that all agree on one order of launches. Clocks and histories change under it.
inline std::mutex& launching = *new std::mutex;

class Stream {
 public:
  int device = 0;
  int id = 0;      // 0 is the device's default stream
  int number = 0;  // among the streams of all devices
  Clock clock;     // what the work launched last comes after; under `launching`

  void submit(std::function<void()> work);
  bool idle();
  void wait();  // until what has been submitted is done; the interpreter lock is released
  void reseed();
  std::string name() const;
  c10::Stream handle() const;

 private:
  void work();

  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  uint64_t submitted_ = 0;
  uint64_t done_ = 0;
  bool started_ = false;
  std::mt19937_64 random_;
};

Stream& stream_number(int number);
Stream& stream_of(int device, int64_t id);
Stream& stream_of(const c10::Stream& stream);
Stream& new_stream(int device);

// This thread's current device, and its current stream on each device.
int& current_device();
Stream& current_stream(int device);
void set_current_stream(const Stream& stream);

// The host waits for a stream, or for all of a device, and learns what came before. Raises the error of a kernel.
void synchronize(Stream& stream, const std::string& why);
void synchronize_device(int device, const std::string& why);

// Raises what the first failed kernel raised. As on CUDA, that may be long after its launch; unlike there, the device
// stays usable.
void raise_failure();

}  // namespace sim
