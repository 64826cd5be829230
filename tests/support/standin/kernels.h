// Tensors of the stand-in device seen as CPU tensors on the same memory.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "memory.h"

namespace standin {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

Use use_of(const at::Tensor& tensor, bool write);
at::Tensor cpu_view_of(const at::Tensor& tensor);  // the same memory, as a CPU tensor that cannot be resized
at::Tensor device_tensor(c10::Storage storage, caffe2::TypeMeta dtype, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides);

// Runs an op on CPU views of its device tensors, and gives its results back on the device.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace standin
