// Operators: each one is launched into the current stream, where the CPU's kernel runs on the device's memory.
//
// As on CUDA, the host waits only for operators whose results depend on values (nonzero, masked_select, equal, ...), and
// an error inside a kernel shows at the next wait. What the meta kernels refuse (wrong shapes) raises at the launch.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace sim {

// Runs an operator with its arguments on the stack, and leaves its results there.
void run_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace sim
