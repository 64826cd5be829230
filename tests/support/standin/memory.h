// Device memory, pinned memory and generators of the stand-in device.
#pragma once
#include <ATen/core/Generator.h>
#include <c10/core/Storage.h>

#include "clocks.h"

namespace standin {

int device_count();
int current_device();
void set_current_device(int device);

Block* block_of(const c10::StorageImpl* storage);                 // nullptr for other storages
c10::Storage new_storage(int device, size_t bytes);               // counted, in host memory
c10::Storage adopted_storage(int device, c10::Storage cpu);       // device memory that is the memory of a CPU storage
c10::DataPtr adopted_memory(int device, c10::Storage cpu);
c10::Allocator* device_allocator();
bool is_pinned(const void* memory);

void set_memory_limit(int device, size_t bytes);
size_t memory_limit(int device);
size_t allocated_bytes(int device);
size_t peak_bytes(int device);
void reset_peak(int device);

const at::Generator& default_generator(int device);
at::Generator cpu_generator_of(const at::Generator& generator);   // the generator that CPU kernels draw from

}  // namespace standin
