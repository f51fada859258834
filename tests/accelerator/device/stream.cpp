#include "stream.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <thread>

#include "counters.h"
#include "interpreter.h"

namespace sim {
namespace {

std::mutex& failure_lock = *new std::mutex;
std::string& failure = *new std::string;

void keep_failure(const char* message) {
  std::lock_guard guard(failure_lock);
  if (failure.empty()) failure = message;
}

// Never destroyed: their threads wait for work until the process ends.
std::array<Stream, STREAMS>& streams() {
  static auto& all = *[] {
    auto* made = new std::array<Stream, STREAMS>;
    for (int number = 0; number < STREAMS; ++number) {
      auto& stream = (*made)[number];
      stream.device = number / (POOL + 1);
      stream.id = number % (POOL + 1);
      stream.number = number;
      stream.clock.resize(number + 1);
    }
    return made;
  }();
  return all;
}

std::array<int, MAX_DEVICES>& current_ids() {
  thread_local std::array<int, MAX_DEVICES> ids{};
  return ids;
}

}  // namespace

Clock& host_clock() {
  static auto& shared = *new Clock;
  thread_local Clock own;
  return settings.races == 2 ? own : shared;
}

void Stream::submit(std::function<void()> work) {
  std::lock_guard guard(lock_);
  queue_.push_back(std::move(work));
  ++submitted_;
  if (!started_) {
    started_ = true;
    std::thread([this] { this->work(); }).detach();
  }
  changed_.notify_all();
}

void Stream::work() {
  at::set_num_threads(1);  // sums must not depend on the number of cores
  while (true) {
    std::function<void()> work;
    int delay_us = 0;
    {
      std::unique_lock guard(lock_);
      changed_.wait(guard, [&] { return !queue_.empty(); });
      work = std::move(queue_.front());
      queue_.pop_front();
      if (settings.delay_us > 0 && std::bernoulli_distribution(settings.delay_probability)(random_))
        delay_us = std::uniform_int_distribution<>(1, settings.delay_us)(random_);
    }
    if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    try {
      work();
    } catch (const c10::Error& error) {
      keep_failure(error.what_without_backtrace());
    } catch (const std::exception& error) {
      keep_failure(error.what());
    }
    work = nullptr;  // what it holds goes before the work counts as done
    std::lock_guard guard(lock_);
    ++done_;
    changed_.notify_all();
  }
}

bool Stream::idle() {
  std::lock_guard guard(lock_);
  return done_ == submitted_;
}

void Stream::wait() {
  ReleasedInterpreter released;
  std::unique_lock guard(lock_);
  changed_.wait(guard, [this, until = submitted_] { return done_ >= until; });
}

void Stream::reseed() {
  std::lock_guard guard(lock_);
  random_.seed(settings.seed * 1000003 + number);
}

std::string Stream::name() const {
  return "sim:" + std::to_string(device) + (id == 0 ? " default stream" : " stream " + std::to_string(id));
}

c10::Stream Stream::handle() const {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(DEVICE_TYPE, static_cast<c10::DeviceIndex>(device)), id);
}

Stream& stream_number(int number) { return streams()[number]; }

Stream& stream_of(int device, int64_t id) { return streams()[device * (POOL + 1) + id]; }

Stream& stream_of(const c10::Stream& stream) { return stream_of(stream.device_index(), stream.id()); }

Stream& new_stream(int device) {
  static std::array<std::atomic<unsigned>, MAX_DEVICES> made{};
  return stream_of(device, 1 + made[device]++ % POOL);
}

int& current_device() {
  thread_local int device = 0;
  return device;
}

Stream& current_stream(int device) { return stream_of(device, current_ids()[device]); }

void set_current_stream(const Stream& stream) { current_ids()[stream.device] = stream.id; }

namespace {

void wait_and_learn(Stream& stream) {
  Clock clock;
  {
    std::lock_guard guard(launching);
    clock = stream.clock;
  }
  stream.wait();
  std::lock_guard guard(launching);
  join(host_clock(), clock);
}

}  // namespace

void synchronize(Stream& stream, const std::string& why) {
  counters.host_wait(why);
  wait_and_learn(stream);
  raise_failure();
}

void synchronize_device(int device, const std::string& why) {
  counters.host_wait(why);
  for (int id = 0; id <= POOL; ++id) wait_and_learn(stream_of(device, id));
  raise_failure();
}

void raise_failure() {
  std::string message;
  {
    std::lock_guard guard(failure_lock);
    std::swap(message, failure);
  }
  TORCH_CHECK(message.empty(), "a kernel that ran asynchronously on the simulated accelerator failed: ", message);
}

}  // namespace sim
