// What Python calls, through ctypes: plain C, so that no binding library has to be compiled.
#include <torch/csrc/Generator.h>

#include "memory.h"

namespace {
const char* joined(const std::vector<std::string>& lines) {
  thread_local std::string text;
  text.clear();
  for (const std::string& line : lines) text += line + "\n";
  return text.c_str();
}
}  // namespace

extern "C" {
int standin_device_count() { return standin::device_count(); }
int standin_current_device() { return standin::current_device(); }
const char* standin_host_waits() { return joined(standin::counted_waits()); }
void standin_reset_host_waits() { standin::reset_waits(); }
void standin_on_wait(void (*callback)(const char*)) { standin::on_wait(callback); }
const char* standin_races() { return joined(standin::races()); }
void standin_reset_races() { standin::reset_races(); }
void standin_raise_races(int raise) { standin::raise_races(raise != 0); }
void standin_set_memory_limit(int device, size_t bytes) { standin::set_memory_limit(device, bytes); }
size_t standin_memory_limit(int device) { return standin::memory_limit(device); }
size_t standin_allocated(int device) { return standin::allocated_bytes(device); }
size_t standin_peak(int device) { return standin::peak_bytes(device); }
void standin_reset_peak(int device) { standin::reset_peak(device); }
PyObject* standin_default_generator(int device) { return THPGenerator_Wrap(standin::default_generator(device)); }
}
