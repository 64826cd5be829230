// Ops that know the device: making tensors, copies between host and device, sharing memory, cells of recurrent nets.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>

#include <limits>
#include <list>
#include <mutex>

#include "kernels.h"

namespace standin {
namespace {

using at::Tensor;

// Copies between pinned memory and the device that the host has not waited for. What comes from the device is put into
// the host's memory only when the host knows that it is there; until then the host reads garbage. What goes to the device
// must not be overwritten by the host before that.
struct Late {
  Tensor host, values;  // values: what the device wrote; undefined for a copy to the device
  uint64_t sum;
  Point point;
  int device;
};
std::mutex late_mutex;
std::list<Late>& late() {
  static auto* all = new std::list<Late>();
  return *all;
}

std::pair<const unsigned char*, const unsigned char*> bytes_of(const Tensor& host) {
  int64_t items = host.numel() > 0 ? 1 : 0;
  for (int64_t d = 0; items && d < host.dim(); ++d) items += (host.size(d) - 1) * host.stride(d);
  const auto* begin = static_cast<const unsigned char*>(host.const_data_ptr());
  return {begin, begin + items * host.itemsize()};
}

uint64_t sum_of(const Tensor& host) {
  uint64_t sum = 1469598103934665603ull;
  auto [begin, end] = bytes_of(host);
  for (; begin != end; ++begin) sum = (sum ^ *begin) * 1099511628211ull;
  return sum;
}

bool overlap(const Tensor& one, const Tensor& other) {
  auto [begin, end] = bytes_of(one);
  auto [other_begin, other_end] = bytes_of(other);
  return begin < other_end && other_begin < end;
}

void settle(const Late& one) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (one.values.defined()) {
    one.host.copy_(one.values);
  } else if (sum_of(one.host) != one.sum) {
    race("standin: the host wrote over pinned memory before its copy to standin:" + std::to_string(one.device) + " was done");
  }
}

void settle_known() {
  std::list<Late> known;
  {
    std::lock_guard<std::mutex> lock(late_mutex);
    for (auto one = late().begin(); one != late().end();) {
      auto next = std::next(one);
      if (host_knows(one->point)) known.splice(known.end(), late(), one);
      one = next;
    }
  }
  for (const Late& one : known) settle(one);
}

void settle_for(const Tensor& host, int stream) {  // the stream is about to read or write this memory of the host
  std::list<Late> ready;
  {
    std::lock_guard<std::mutex> lock(late_mutex);
    for (auto one = late().begin(); one != late().end();) {
      auto next = std::next(one);
      if (overlap(one->host, host)) {
        if (!ordered(one->point, stream)) race("standin: a copy uses pinned memory that another stream still copies");
        ready.splice(ready.end(), late(), one);
      }
      one = next;
    }
  }
  for (const Late& one : ready) settle(one);
}

void add_late(Late one) {
  std::list<Late> old;
  {
    std::lock_guard<std::mutex> lock(late_mutex);
    late().push_back(std::move(one));
    size_t to_device = 0;
    for (const Late& each : late()) to_device += !each.values.defined();
    for (auto each = late().begin(); to_device > 16 && each != late().end();) {
      auto next = std::next(each);
      if (!each->values.defined()) {
        old.splice(old.end(), late(), each);
        --to_device;
      }
      each = next;
    }
  }
  for (const Late& each : old) settle(each);
}

void copy_to_device(const Tensor& from, const Tensor& to, bool non_blocking) {
  int stream = current_stream(to.device().index());
  bool free = non_blocking && is_pinned(from.storage().data());
  if (free) settle_for(from, stream);
  Point point = launch("copy cpu -> " + to.device().str(), stream, {use_of(to, true)});
  cpu_view_of(to).copy_(from);
  if (free) {
    add_late({from.detach(), {}, sum_of(from), point, to.device().index()});
  } else {
    host_waits("copy cpu -> " + to.device().str(), clock_of(stream));
  }
}

void copy_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  int stream = current_stream(from.device().index());
  std::string name = "copy " + from.device().str() + " -> cpu";
  bool free = non_blocking && is_pinned(to.storage().data());
  if (free) settle_for(to, stream);
  Point point = launch(name, stream, {use_of(from, false)});
  if (!free) {
    host_waits(name, clock_of(stream));
    to.copy_(cpu_view_of(from));
    return;
  }
  Tensor values = cpu_view_of(from).clone();
  if (at::isFloatingType(to.scalar_type())) {
    to.fill_(std::numeric_limits<double>::quiet_NaN());
  } else if (to.scalar_type() == at::kBool) {
    to.copy_(values.logical_not());
  } else {
    to.fill_(to.scalar_type() == at::kByte ? 251 : -5);
  }
  add_late({to.detach(), values, 0, point, from.device().index()});
}

void copy_on_devices(const Tensor& from, const Tensor& to) {
  int here = current_stream(from.device().index()), there = current_stream(to.device().index());
  stream_waits(here, clock_of(there));
  launch("copy " + from.device().str() + " -> " + to.device().str(), here, {use_of(from, false), use_of(to, true)});
  cpu_view_of(to).copy_(cpu_view_of(from));
  stream_waits(there, clock_of(here));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  if (to.numel() == 0) return to;
  if (from.device().type() != kDevice) {
    TORCH_CHECK(from.device().is_cpu(), "standin: cannot copy from ", from.device());
    copy_to_device(from, to, non_blocking);
  } else if (to.device().type() != kDevice) {
    TORCH_CHECK(to.device().is_cpu(), "standin: cannot copy to ", to.device());
    copy_to_host(from, to, non_blocking);
  } else {
    copy_on_devices(from, to);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
             std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "standin has dense tensors only, not ", c10::layout_or_default(layout));
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

Tensor& set_sized(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device() || source.nbytes() == 0, "standin: set_ of a tensor on ", self.device(),
              " with memory on ", source.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (size.size() == stride.size()) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  int64_t items = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_sized(self, std::move(source), 0, {items}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_sized(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_empty(Tensor& self) { return set_sized(self, new_storage(self.device().index(), 0), 0, {0}, {1}); }

void record_stream(Tensor& self, c10::Stream stream) {
  record_use(*use_of(self, false).block, stream_number(stream.device_index(), stream.id()));
}

int64_t fused_sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return 0;  // the mathematical form
}

// Cells of recurrent nets: torch asks devices other than the CPU for fused ones.
Tensor with_bias(Tensor gates, const std::optional<Tensor>& bias) { return bias && bias->defined() ? gates.add(*bias) : gates; }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden, const Tensor& cx,
                                             const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  auto parts = with_bias(hidden, hidden_bias).add(with_bias(input, input_bias)).chunk(4, 1);
  Tensor in = parts[0].sigmoid(), forget = parts[1].sigmoid(), cell = parts[2].tanh(), out = parts[3].sigmoid();
  Tensor cy = forget.mul(cx).add(in.mul(cell));
  Tensor workspace = input.new_empty(input.sizes());
  auto kept = workspace.chunk(4, 1);
  kept[0].copy_(in), kept[1].copy_(forget), kept[2].copy_(cell), kept[3].copy_(out);
  return {out.mul(cy.tanh()), cy, workspace};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const std::optional<Tensor>& grad_hy, const std::optional<Tensor>& grad_cy,
                                                      const Tensor& cx, const Tensor& cy, const Tensor& workspace, bool has_bias) {
  bool of_hy = grad_hy && grad_hy->defined(), of_cy = grad_cy && grad_cy->defined();
  if (!of_hy && !of_cy) return {};
  auto kept = workspace.chunk(4, 1);
  const Tensor &in = kept[0], &forget = kept[1], &cell = kept[2], &out = kept[3];
  Tensor tanh = cy.tanh(), grad_out, through;
  if (of_hy) {
    grad_out = grad_hy->mul(tanh);
    through = grad_hy->mul(out).mul(tanh.mul(tanh).neg().add(1));
  } else {
    grad_out = cy.new_zeros(cy.sizes());
  }
  if (of_cy) through = through.defined() ? through.add(*grad_cy) : *grad_cy;
  auto by_sigmoid = [](const Tensor& grad, const Tensor& y) { return grad.mul(y.neg().add(1).mul(y)); };
  Tensor gates = workspace.new_empty(workspace.sizes());
  auto parts = gates.chunk(4, 1);
  parts[0].copy_(by_sigmoid(through.mul(cell), in));
  parts[1].copy_(by_sigmoid(through.mul(cx), forget));
  parts[2].copy_(through.mul(in).mul(cell.mul(cell).neg().add(1)));
  parts[3].copy_(by_sigmoid(grad_out, out));
  return {gates, through.mul(forget), has_bias ? gates.sum(at::IntArrayRef{0}) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& hx,
                                    const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  auto of_input = with_bias(input, input_bias).chunk(3, 1), of_hidden = with_bias(hidden, hidden_bias).chunk(3, 1);
  Tensor reset = of_hidden[0].add(of_input[0]).sigmoid(), update = of_hidden[1].add(of_input[1]).sigmoid();
  Tensor fresh = of_input[2].add(of_hidden[2].mul(reset)).tanh();
  Tensor workspace = hx.new_empty({hx.size(0), hx.size(1) * 5});
  auto kept = workspace.chunk(5, 1);
  kept[0].copy_(reset), kept[1].copy_(update), kept[2].copy_(fresh), kept[3].copy_(hx), kept[4].copy_(of_hidden[2]);
  return {hx.sub(fresh).mul(update).add(fresh), workspace};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad, const Tensor& workspace, bool has_bias) {
  auto kept = workspace.chunk(5, 1);
  const Tensor &reset = kept[0], &update = kept[1], &fresh = kept[2], &hx = kept[3], &hidden = kept[4];
  auto by_sigmoid = [](const Tensor& g, const Tensor& y) { return g.mul(y.neg().add(1).mul(y)); };
  Tensor of_fresh = grad.mul(update.neg().add(1)).mul(fresh.mul(fresh).neg().add(1));
  Tensor of_update = by_sigmoid(grad.mul(hx.sub(fresh)), update), of_reset = by_sigmoid(of_fresh.mul(hidden), reset);
  Tensor to_input = grad.new_empty({grad.size(0), grad.size(1) * 3}), to_hidden = grad.new_empty({grad.size(0), grad.size(1) * 3});
  auto a = to_input.chunk(3, 1), b = to_hidden.chunk(3, 1);
  a[0].copy_(of_reset), a[1].copy_(of_update), a[2].copy_(of_fresh);
  b[0].copy_(of_reset), b[1].copy_(of_update), b[2].copy_(of_fresh.mul(reset));
  Tensor none;
  return {to_input, to_hidden, grad.mul(update), has_bias ? to_input.sum(at::IntArrayRef{0}) : none,
          has_bias ? to_hidden.sum(at::IntArrayRef{0}) : none};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_sized);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_empty);
  m.impl("record_stream", &record_stream);
  m.impl("_fused_sdp_choice", &fused_sdp_choice);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

// Every other op with a kernel for the CPU runs that kernel, rather than a decomposition with other rounding.
const bool registered = [] {
  on_host_progress(&settle_known);
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    bool whole = name.name == "aten::convolution" || name.name == "aten::convolution_backward" ||
        name.name.rfind("aten::_foreach_", 0) == 0;
    if (name.name == "aten::_efficientzerotensor" || name.name.find("sparse") != std::string::npos) continue;
    if (!whole && !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    std::string text = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(text.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
  return true;
}();

}  // namespace
}  // namespace standin
