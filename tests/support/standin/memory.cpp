// The allocator, the device guard with its streams and events, the hooks and the generators.
#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>

namespace standin {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

struct Numbers {
  size_t limit = size_t{1} << 30, allocated = 0, peak = 0;
  int64_t ooms = 0, allocations = 0, frees = 0;
};
std::mutex numbers_mutex;
std::array<Numbers, kMaxDevices> numbers = [] {
  std::array<Numbers, kMaxDevices> all{};
  if (const char* text = std::getenv("STANDIN_MEMORY"))
    for (Numbers& one : all) one.limit = std::strtoull(text, nullptr, 10);
  return all;
}();

void count(int device, size_t bytes) {
  std::lock_guard<std::mutex> lock(numbers_mutex);
  Numbers& n = numbers.at(device);
  if (n.allocated + bytes > n.limit) {
    ++n.ooms;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "standin out of memory. Tried to allocate ", bytes, " bytes. standin:", device,
                     " has ", n.limit, " bytes, of which ", n.limit - std::min(n.limit, n.allocated), " are free.");
  }
  n.allocated += bytes;
  n.peak = std::max(n.peak, n.allocated);
  ++n.allocations;
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  forget(*block);
  {
    std::lock_guard<std::mutex> lock(numbers_mutex);
    numbers[block->device].allocated -= block->size;
    ++numbers[block->device].frees;
  }
  if (block->release) block->release(block->owner);
  delete block;
}

c10::DataPtr make_memory(int device, size_t bytes, void* memory, void* owner, void (*release)(void*)) {
  auto* block = new Block();
  block->device = device;
  block->home = current_stream(device);
  block->size = bytes;
  block->memory = memory;
  block->owner = owner;
  block->release = release;
  return {memory, block, &free_block, c10::Device(kType, static_cast<c10::DeviceIndex>(device))};
}

c10::DataPtr allocate_on(int device, size_t bytes) {
  count(device, bytes);
  try {
    check_reuse(device, current_stream(device), "an allocation");
  } catch (...) {
    std::lock_guard<std::mutex> lock(numbers_mutex);
    numbers[device].allocated -= bytes;
    throw;
  }
  void* memory = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
  return make_memory(device, bytes, memory, memory, &std::free);
}

struct StandinAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(current_device(), bytes); }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    if (memory.get_deleter() == &free_block)
      record_use(*static_cast<Block*>(memory.get_context()), stream_number(stream.device_index(), stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(numbers_mutex);
    const Numbers& n = numbers.at(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*bytes)[0].current = static_cast<int64_t>(n.allocated);
      (*bytes)[0].peak = static_cast<int64_t>(n.peak);
    }
    stats.allocation[0].current = n.allocations - n.frees;
    stats.allocation[0].allocated = n.allocations;
    stats.allocation[0].freed = n.frees;
    stats.num_ooms = n.ooms;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(numbers_mutex);
    const Numbers& n = numbers.at(device);
    return {n.limit - std::min(n.limit, n.allocated), n.limit};
  }
};
StandinAllocator allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator);

// Pinned memory: host memory of which the device knows the addresses.
std::mutex pinned_mutex;
std::map<const char*, size_t> pinned;

void free_pinned(void* memory) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned.erase(static_cast<const char*>(memory));
  std::free(memory);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[static_cast<const char*>(memory)] = bytes;
    return {memory, memory, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
PinnedAllocator pinned_allocator;

struct StandinGenerator final : c10::GeneratorImpl {
  at::Generator inner;
  explicit StandinGenerator(int device, at::Generator cpu = at::detail::createCPUGenerator())
      : GeneratorImpl(c10::Device(kType, static_cast<c10::DeviceIndex>(device)), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "a generator of standin has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "a generator of standin has no offset"); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(inner).seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new StandinGenerator(device().index(), inner.clone()); }
};

thread_local int the_device = 0;

struct Event {
  Clock clock;
  std::chrono::steady_clock::time_point time;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device device(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }
  static c10::Stream stream(int number, int index) { return c10::Stream(c10::Stream::UNSAFE, device(index), stream_id(number)); }
  static int number(const c10::Stream& s) { return stream_number(s.device_index(), s.id()); }
  static int index_of(c10::Device d) { return d.has_index() ? d.index() : the_device; }

  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device d) const override {
    int old = the_device;
    set_current_device(index_of(d));
    return device(old);
  }
  c10::Device getDevice() const override { return device(the_device); }
  void setDevice(c10::Device d) const override { set_current_device(index_of(d)); }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.has_index()) the_device = d.index();
  }
  c10::Stream getStream(c10::Device d) const override { return stream(current_stream(index_of(d)), index_of(d)); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(default_stream(index_of(d)), index_of(d)); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return stream(new_stream(index_of(d)), index_of(d)); }
  c10::Stream getNewStream(c10::Device d, int) const override { return stream(new_stream(index_of(d)), index_of(d)); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    c10::Stream old = getStream(s.device());
    set_current_stream(number(s));
    return old;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    *static_cast<Event*>(*event) = {clock_of(number(s)), std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) stream_waits(number(s), static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {  // work is done at once, and after asking the host knows
    if (event) host_waits("event.query", static_cast<Event*>(event)->clock, false);
    return true;
  }
  bool queryStream(const c10::Stream& s) const override {
    host_waits("stream.query", clock_of(number(s)), false);
    return true;
  }
  void synchronizeStream(const c10::Stream& s) const override { host_waits("stream.synchronize", clock_of(number(s))); }
  void synchronizeEvent(void* event) const override {
    if (event) host_waits("event.synchronize", static_cast<Event*>(event)->clock);
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    host_waits_for_device(index < 0 ? the_device : index, "device.synchronize");
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& s) const override { allocator.recordStream(memory, s); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "both events must be recorded before the time between them is read");
    return std::chrono::duration<double, std::milli>(static_cast<Event*>(second)->time - static_cast<Event*>(first)->time).count();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(the_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    int old = the_device;
    set_current_device(index);
    return static_cast<c10::DeviceIndex>(old);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? static_cast<c10::DeviceIndex>(the_device) : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<StandinGenerator>(index < 0 ? the_device : index);
  }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DataPtr memory = allocate_on(storage.device().index(), bytes);
    if (size_t kept = std::min(bytes, storage.nbytes())) std::memcpy(memory.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(memory));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace

int device_count() {
  static const int devices = [] {
    const char* text = std::getenv("STANDIN_DEVICES");
    return text ? std::min(std::max(std::atoi(text), 1), kMaxDevices) : 4;
  }();
  return devices;
}

int current_device() { return the_device; }

void set_current_device(int device) {
  TORCH_CHECK(0 <= device && device < device_count(), "standin: device index ", device, " is not one of the ", device_count(),
              " devices");
  the_device = device;
}

Block* block_of(const c10::StorageImpl* storage) {
  const c10::DataPtr& memory = const_cast<c10::StorageImpl*>(storage)->_mutable_data_ptr_no_checks();
  return memory.get_deleter() == &free_block ? static_cast<Block*>(memory.get_context()) : nullptr;
}

c10::Storage new_storage(int device, size_t bytes) {
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, allocate_on(device, bytes), &allocator, true);
}

c10::DataPtr adopted_memory(int device, c10::Storage cpu) {
  size_t bytes = cpu.nbytes();
  count(device, bytes);
  void* memory = cpu.mutable_data();
  auto* owner = new c10::Storage(std::move(cpu));
  c10::DataPtr made = make_memory(device, bytes, memory, owner, [](void* held) { delete static_cast<c10::Storage*>(held); });
  check_reuse(device, current_stream(device), "an allocation");
  return made;
}

c10::Storage adopted_storage(int device, c10::Storage cpu) {
  size_t bytes = cpu.nbytes();
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, adopted_memory(device, std::move(cpu)), &allocator, true);
}

c10::Allocator* device_allocator() { return &allocator; }

bool is_pinned(const void* memory) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned.upper_bound(static_cast<const char*>(memory));
  if (after == pinned.begin()) return false;
  --after;
  return static_cast<const char*>(memory) <= after->first + after->second;
}

void set_memory_limit(int device, size_t bytes) {
  std::lock_guard<std::mutex> lock(numbers_mutex);
  numbers.at(device).limit = bytes;
}
size_t memory_limit(int device) {
  std::lock_guard<std::mutex> lock(numbers_mutex);
  return numbers.at(device).limit;
}
size_t allocated_bytes(int device) {
  std::lock_guard<std::mutex> lock(numbers_mutex);
  return numbers.at(device).allocated;
}
size_t peak_bytes(int device) {
  std::lock_guard<std::mutex> lock(numbers_mutex);
  return numbers.at(device).peak;
}
void reset_peak(int device) {
  std::lock_guard<std::mutex> lock(numbers_mutex);
  numbers.at(device).peak = numbers.at(device).allocated;
}

const at::Generator& default_generator(int device) {
  static std::vector<at::Generator>* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int index = 0; index < device_count(); ++index) made->push_back(at::make_generator<StandinGenerator>(index));
    return made;
  }();
  return all->at(device < 0 ? the_device : device);
}

at::Generator cpu_generator_of(const at::Generator& generator) {
  if (generator.device().type() != kType) return generator;
  return static_cast<StandinGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
}

}  // namespace standin
