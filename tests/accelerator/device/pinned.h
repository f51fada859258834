// Pinned host memory: copies between it and the device need not make the host wait.
//
// As on CUDA, a freed block is handed out again only when the streams that copied from or to it have passed that copy.
// It is poisoned then, so that a reader that did not wait sees it.
#pragma once

#include <c10/core/Allocator.h>

#include "stream.h"

namespace sim {

c10::Allocator& pinned_allocator();
bool is_pinned(const void* address);

// Says that the work that the stream has now uses the block with this address.
void record_pinned(const void* address, Stream& stream);

}  // namespace sim
