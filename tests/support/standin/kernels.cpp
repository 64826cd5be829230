// The one kernel for all ops: it sees device memory as CPU memory, runs the CPU kernel, and maps the results back.
#include "kernels.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <mutex>
#include <unordered_map>

namespace standin {
namespace {

struct Info {
  std::string name;
  bool view = false, waits = false, seeded = false, indexing = false;
  int generator = -1;
  std::vector<bool> writes, devices, host_allowed;
};

const Info& info_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<const c10::FunctionSchema*, Info>();
  std::lock_guard<std::mutex> lock(mutex);
  auto [entry, is_new] = known->try_emplace(&op.schema());
  Info& info = entry->second;
  if (!is_new) return info;
  const auto& name = op.operator_name();
  info.name = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
  info.indexing = name.name == "aten::index" || name.name == "aten::_index_put_impl_" || name.name == "aten::_unsafe_index";
  info.waits = !info.indexing && (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape));
  info.seeded = op.hasTag(at::Tag::nondeterministic_seeded);
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = arguments[i];
    const auto* alias = argument.alias_info();
    std::string type = argument.type()->str();
    bool write = alias && alias->isWrite();
    if (alias && !write) info.view = true;
    // Running statistics are written, although the schema of a batch norm does not say so.
    if (argument.name().rfind("running_", 0) == 0 && info.name.find("functional") == std::string::npos) write = true;
    info.writes.push_back(write);
    info.devices.push_back(type.rfind("Device", 0) == 0);
    info.host_allowed.push_back(info.indexing && argument.name() == "indices");
    if (type.rfind("Generator", 0) == 0) info.generator = static_cast<int>(i);
  }
  return info;
}

struct Call {
  const Info& info;
  int device = -1;
  bool host_indices = false, mask_indices = false;
  std::vector<Use> uses;
  struct Seen {
    at::Tensor original, alias;
    void* memory;
  };
  std::vector<Seen> seen;
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> storages;  // of the device -> the same memory for the CPU
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> adopted;   // of the CPU -> of the device

  explicit Call(const Info& op) : info(op) {}

  void find_device(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != kDevice) return;
    int index = tensor.device().index();
    if (device >= 0 && device != index) refuse("standin:" + std::to_string(index));
    device = index;
  }

  [[noreturn]] void refuse(const std::string& other) const {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, standin:", device, " and ",
                other, "! (op ", info.name, ")");
  }

  void check(const at::Tensor& tensor, bool host_allowed) {
    if (!tensor.defined()) return;
    if (host_allowed) {
      host_indices |= tensor.device().is_cpu();
      mask_indices |= tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
      if (tensor.device().is_cpu()) return;
    }
    if (device >= 0 && tensor.device().type() != kDevice && tensor.dim() > 0) refuse(tensor.device().str());
  }

  at::Tensor alias(const at::Tensor& tensor, bool write) {
    if (!tensor.defined() || tensor.device().type() != kDevice) return tensor;
    if (!info.view) uses.push_back(use_of(tensor, write));
    for (const Seen& one : seen)
      if (one.original.is_same(tensor)) return one.alias;
    c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    c10::Storage cpu;
    for (auto& [known, made] : storages)
      if (known == storage) cpu = made;
    void* memory = storage->mutable_data();
    if (!cpu) {
      cpu = c10::Storage(c10::Storage::use_byte_size_t(), storage->nbytes(), c10::DataPtr(memory, c10::Device(c10::kCPU)),
                         c10::GetAllocator(c10::kCPU), true);
      storages.emplace_back(storage, cpu);
    }
    auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(cpu), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    made.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
    seen.push_back({tensor, made, memory});
    return made;
  }

  // An op may have given an output another size, and with it other memory.
  void map_resized(Point point) {
    for (Seen& one : seen) {
      auto* impl = one.original.unsafeGetTensorImpl();
      c10::StorageImpl* cpu = one.alias.storage().unsafeGetStorageImpl();
      const c10::Storage& held = one.original.storage();
      if (cpu->data() != one.memory && held.data() == one.memory) {
        c10::Storage changed = one.alias.storage();
        held.set_data_ptr_noswap(adopted_memory(device, changed));
        held.unsafeGetStorageImpl()->set_nbytes(changed.nbytes());
        written(*block_of(held.unsafeGetStorageImpl()), point, info.name);
      }
      if (impl->sizes() != one.alias.sizes() || impl->strides() != one.alias.strides()) {
        impl->set_storage_offset(one.alias.storage_offset());
        impl->set_sizes_and_strides(one.alias.sizes(), one.alias.strides());
      }
    }
  }

  at::Tensor back(const at::Tensor& result, Point point) {
    if (!result.defined() || !result.device().is_cpu()) return result;
    for (const Seen& one : seen)
      if (one.alias.is_same(result)) return one.original;
    c10::StorageImpl* cpu = result.storage().unsafeGetStorageImpl();
    c10::Storage storage;
    for (const Seen& one : seen)
      if (one.alias.storage().unsafeGetStorageImpl() == cpu) storage = one.original.storage();
    for (auto& [known, made] : adopted)
      if (known == cpu) storage = made;
    if (!storage) {
      storage = adopted_storage(device, result.storage());
      adopted.emplace_back(cpu, storage);
      written(*block_of(storage.unsafeGetStorageImpl()), point, info.name);
    }
    return device_tensor(storage, result.dtype(), result.storage_offset(), result.sizes(), result.strides());
  }
};

template <typename Visit>
void each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& one : value.toTensorList()) visit(one);
  } else if (value.isList()) {
    for (const c10::IValue& one : value.toListRef())
      if (one.isTensor()) visit(one.toTensor());
  }
}

template <typename Change>
c10::IValue changed(const c10::IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& one : value.toTensorList()) list.push_back(change(one));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor> one : value.toOptionalTensorList())
      list.push_back(one.has_value() ? std::optional<at::Tensor>(change(*one)) : std::nullopt);
    return list;
  }
  return value;
}

// CPU kernels without a generator argument draw from the default one of the CPU: it lends its place to that of the device.
struct LentGenerator {
  std::unique_lock<std::mutex> lock;
  at::Generator host = at::detail::getDefaultCPUGenerator(), device;
  at::Tensor kept;
  explicit LentGenerator(int index) : device(cpu_generator_of(default_generator(index))) {
    static std::mutex mutex;
    lock = std::unique_lock<std::mutex>(mutex);
    kept = host.get_state();
    host.set_state(device.get_state());
  }
  ~LentGenerator() {
    device.set_state(host.get_state());
    host.set_state(kept);
  }
};

bool index_waits(const Call& call, const torch::jit::Stack& arguments, size_t begin) {
  if (call.host_indices) return true;
  if (!call.mask_indices) return false;
  // Putting one value where a mask is true is a masked fill, which needs no shape from the device.
  bool put = call.info.name.find("put") != std::string::npos;
  return !(put && arguments[begin + 2].isTensor() && arguments[begin + 2].toTensor().numel() == 1);
}

}  // namespace

Use use_of(const at::Tensor& tensor, bool write) {
  size_t item = tensor.itemsize(), low = tensor.storage_offset() * item, high = low;
  if (tensor.numel() > 0) {
    int64_t last = 0;
    for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
    high = low + (last + 1) * item;
  }
  Block* block = block_of(tensor.storage().unsafeGetStorageImpl());
  TORCH_CHECK(block, "standin: the memory of this tensor was not allocated by the device");
  return {block, low, high, write};
}

at::Tensor cpu_view_of(const at::Tensor& tensor) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  c10::Storage cpu(c10::Storage::use_byte_size_t(), storage->nbytes(), c10::DataPtr(storage->mutable_data(), c10::Device(c10::kCPU)));
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(cpu), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  return made;
}

at::Tensor device_tensor(c10::Storage storage, caffe2::TypeMeta dtype, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
  made.unsafeGetTensorImpl()->set_storage_offset(offset);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return made;
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Info& info = info_of(op);
  const size_t arguments = op.schema().arguments().size(), results = op.schema().returns().size();
  const size_t begin = stack->size() - arguments;
  Call call(info);
  for (size_t i = 0; i < arguments; ++i) {
    const c10::IValue& value = (*stack)[begin + i];
    each_tensor(value, [&](const at::Tensor& one) { call.find_device(one); });
  }
  for (size_t i = 0; i < arguments; ++i) {
    c10::IValue& value = (*stack)[begin + i];
    if (!info.devices[i] || !value.isDevice() || value.toDevice().type() != kDevice) continue;
    if (call.device < 0) call.device = value.toDevice().has_index() ? value.toDevice().index() : current_device();
    value = c10::Device(c10::kCPU);
  }
  TORCH_CHECK(call.device >= 0, "standin: op ", info.name, " has no tensor and no device of standin among its arguments");
  for (size_t i = 0; i < arguments; ++i)
    each_tensor((*stack)[begin + i], [&](const at::Tensor& one) { call.check(one, info.host_allowed[i]); });
  bool waits = info.waits || (info.indexing && index_waits(call, *stack, begin));
  if (info.name == "aten::repeat_interleave.Tensor" && !(*stack)[begin + 1].isNone()) waits = false;
  if (info.generator >= 0) {
    c10::IValue& value = (*stack)[begin + info.generator];
    if (value.isNone()) {
      value = cpu_generator_of(default_generator(call.device));
    } else {
      const at::Generator given = value.toGenerator();
      TORCH_CHECK(given.device().type() == kDevice, "Expected a 'standin' device type for generator but found '",
                  given.device().str(), "' (op ", info.name, ")");
      value = cpu_generator_of(given);
    }
  }
  for (size_t i = 0; i < arguments; ++i) {
    c10::IValue& value = (*stack)[begin + i];
    value = changed(value, [&](const at::Tensor& one) { return call.alias(one, info.writes[i]); });
  }
  const int stream = current_stream(call.device);
  Point point{stream, 0};
  if (!info.view) point = launch(info.name, stream, call.uses);
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
    std::optional<LentGenerator> lent;
    if (info.seeded && info.generator < 0) lent.emplace(call.device);
    op.callBoxed(stack);
  }
  call.map_resized(point);
  for (size_t i = stack->size() - results; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    value = changed(value, [&](const at::Tensor& one) { return call.back(one, point); });
  }
  if (waits) host_waits(info.name, clock_of(stream));
}

}  // namespace standin
