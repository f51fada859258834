// What PyTorch asks of a device type outside of streams: how many there are, generators, pinned memory, resizing.
#pragma once

namespace sim {

// Makes PyTorch use the device. Once in a process.
void register_hooks();

}  // namespace sim
