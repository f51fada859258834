// Device memory: a caching allocator on the host's memory that hands freed memory out again at once.
//
// As on CUDA, a block belongs to the stream that was current when it was allocated. When it is freed, that stream may
// have it again at once, because what it does next comes later. If it was recorded on other streams (record_stream),
// it is free only when they have passed the point at which it was freed. Unlike on CUDA, blocks are never split, so a
// missing record_stream is met by the next tensor of the same size; and freed memory is overwritten (poison). There is
// a limit for each device: beyond it the cache is emptied, and then torch.OutOfMemoryError is raised.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <set>

#include "races.h"

namespace sim {

struct Block {
  char* address;
  size_t size;
  int device;
  int stream;           // the number of the stream that it belongs to
  std::set<int> uses;   // the numbers of the streams that it was recorded on
  History history;
};

c10::DeviceAllocator& device_allocator();

// Poison, also of pinned memory: floating-point numbers become a NaN, integers -1.
void poison(void* address, size_t size);

// Memory that kernels may read in whole words.
char* aligned_memory(size_t size);
size_t rounded(size_t bytes);

}  // namespace sim
