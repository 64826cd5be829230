// The process group of the stand-in device, with the rules of NCCL.
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <set>

#include "communicator.h"

namespace standin {
namespace {

using WorkHandle = c10::intrusive_ptr<c10d::Work>;

class Group final : public c10d::Backend {
 public:
  Group(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds timeout)
      : Backend(rank, size), store_(std::move(store)), timeout_(timeout) {
    init();
    board_.put = [this](const std::string& key, const std::string& value) { store_->set(key, value); };
    board_.has = [this](const std::string& key) { return store_->check({key}); };
    board_.get = [this](const std::string& key) { return store_->get_to_str(key); };
  }
  ~Group() override {
    abort();
    std::optional<pybind11::gil_scoped_release> without_gil;  // threads that end may need it to free tensors
    if (PyGILState_Check()) without_gil.emplace();
    comms_.clear();
  }

  const std::string getBackendName() const override { return "standin_ccl"; }
  c10::intrusive_ptr<Backend::Options> getBackendOptions() override {
    return c10::make_intrusive<Backend::Options>("standin_ccl", timeout_);
  }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }

  // Who waits for an op, or for a communicator to be made, goes on at once. May be called from any thread.
  void abort() override { aborted_->store(true); }
  // Groups that are bound to a device connect when they are made, all ranks together.
  void setGroupUid(const std::string& name) override {
    Backend::setGroupUid(name);
    if (!bound_device_id_) return;
    std::optional<pybind11::gil_scoped_release> without_gil;
    if (PyGILState_Check()) without_gil.emplace();
    collective(bound_device_id_->index());
  }
  // Blocks behind ops that are not done, as finalising a communicator of NCCL does.
  void shutdown() override {
    auto end = std::chrono::steady_clock::now() + timeout_;
    while (!aborted_->load() && !idle() && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    abort();
  }

  WorkHandle send(Tensors& tensors, int to, int) override { return point_to_point(tensors, to, true); }
  WorkHandle recv(Tensors& tensors, int from, int) override { return point_to_point(tensors, from, false); }

  void startCoalescing() override { coalescing_ = true; }
  WorkHandle endCoalescing() override {
    coalescing_ = false;
    std::vector<Step> steps = std::move(steps_);
    steps_.clear();
    if (steps.empty()) return nullptr;
    std::vector<Use> uses;
    Tensors held, outputs;
    for (const Step& step : steps) {
      uses.push_back(use_of(step.tensor, !step.is_send));
      held.push_back(step.tensor);
      if (!step.is_send) outputs.push_back(step.tensor);
    }
    int device = held[0].device().index();
    Communicator& comm = collective(device);
    auto run = [this, &comm, steps] { run_together(comm, steps); };
    return post(comm, OpType::COALESCED, "batch of sends and receives", uses, held, outputs, run);
  }

  WorkHandle broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const Tensor& tensor = only(tensors);
    int root = static_cast<int>(options.rootRank);
    Communicator& comm = collective(tensor.device().index());
    Tensor memory = bytes_of(tensor);
    auto run = [&comm, memory, root] {
      if (comm.me != root) return receive(comm, root, memory, "broadcast");
      for (int position = 0; position < comm.size; ++position)
        if (position != root) standin::send(comm, position, memory, "broadcast");
    };
    return post(comm, OpType::BROADCAST, "broadcast", {use_of(tensor, rank_ != root)}, {tensor}, {tensor}, run);
  }

  WorkHandle allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return all_reduce(only(tensors), options.reduceOp.op_, false);
  }
  WorkHandle allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    TORCH_CHECK(!tensors.empty(), "standin_ccl: no tensor");
    WorkHandle last;  // the ops of a communicator are done in their order
    for (Tensor& tensor : tensors) {
      check(tensor);
      last = all_reduce(tensor, options.reduceOp.op_, false);
    }
    return last;
  }

  WorkHandle reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const Tensor& tensor = only(tensors);
    int root = static_cast<int>(options.rootRank);
    auto op = options.reduceOp.op_;
    check_op(op);
    Communicator& comm = collective(tensor.device().index());
    Tensor memory = bytes_of(tensor);
    auto run = [&comm, memory, root, op] {
      Tensor sum = reduced(comm, memory, op, root, "reduce");
      if (comm.me == root) memory.copy_(sum);
    };
    return post(comm, OpType::REDUCE, "reduce", {use_of(tensor, rank_ == root)}, {tensor}, {tensor}, run);
  }

  WorkHandle allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    TORCH_CHECK(outputs.size() == 1 && static_cast<int>(outputs[0].size()) == size_, "standin_ccl: all_gather needs a tensor for each rank");
    return all_gather(only(inputs), outputs[0]);
  }
  WorkHandle _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions&) override {
    check(output);
    check(input);
    TORCH_CHECK(output.numel() == input.numel() * size_, "standin_ccl: output tensor size must be equal to world_size times input tensor size");
    return all_gather(input, output.view({-1}).chunk(size_));
  }
  WorkHandle allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    WorkHandle last;
    for (size_t i = 0; i < inputs.size(); ++i) last = _allgather_base(outputs[i], inputs[i], options);
    return last;
  }

  WorkHandle reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(inputs.size() == 1 && static_cast<int>(inputs[0].size()) == size_, "standin_ccl: reduce_scatter needs a tensor for each rank");
    return scatter_reduced(only(outputs), inputs[0], options.reduceOp.op_);
  }
  WorkHandle _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    check(output);
    check(input);
    TORCH_CHECK(input.numel() == output.numel() * size_, "standin_ccl: input tensor must be the same size as output size times world size");
    return scatter_reduced(output, input.view({-1}).chunk(size_), options.reduceOp.op_);
  }
  WorkHandle reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    WorkHandle last;
    for (size_t i = 0; i < inputs.size(); ++i) last = _reduce_scatter_base(outputs[i], inputs[i], options);
    return last;
  }

  WorkHandle gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    int root = static_cast<int>(options.rootRank);
    const Tensor& input = only(inputs);
    Tensors parts = rank_ == root ? outputs.at(0) : Tensors{};
    return between_root_and_all(input, parts, root, true);
  }
  WorkHandle scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    int root = static_cast<int>(options.rootRank);
    const Tensor& output = only(outputs);
    Tensors parts = rank_ == root ? inputs.at(0) : Tensors{};
    return between_root_and_all(output, parts, root, false);
  }

  WorkHandle barrier(const c10d::BarrierOptions& options) override {
    int device = current_device();
    if (bound_device_id_) device = bound_device_id_->index();
    if (!options.device_ids.empty()) device = static_cast<int>(options.device_ids[0]);
    if (options.device && options.device->type() == kDevice && options.device->has_index()) device = options.device->index();
    c10::Device place(kDevice, static_cast<c10::DeviceIndex>(device));
    Tensor one = at::empty({1}, at::TensorOptions().dtype(at::kByte).device(place)).zero_();
    return all_reduce(one, ReduceOp::MAX, true);
  }

 private:
  struct Step {
    Tensor tensor;
    int peer;
    bool is_send;
  };

  const Tensor& only(Tensors& tensors) const {
    TORCH_CHECK(tensors.size() == 1, "standin_ccl: expected one tensor, got ", tensors.size());
    check(tensors[0]);
    return tensors[0];
  }

  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [name, comm] : comms_)
      if (!comm->idle()) return false;
    return true;
  }

  // Made at first use, which blocks the host until the other members have come as far.
  Communicator& communicator(const std::string& name, int device, int me, int size) {
    std::unique_lock<std::mutex> lock(mutex_);
    made_.wait(lock, [&] { return making_.count(name) == 0; });  // another thread makes the same one
    TORCH_CHECK(!aborted_->load(), "standin_ccl: the process group was aborted");
    auto known = comms_.find(name);
    if (known != comms_.end()) {
      TORCH_CHECK(known->second->device == device, "standin_ccl: this communicator is on standin:", known->second->device,
                  ", the tensor on standin:", device);
      return *known->second;
    }
    making_.insert(name);
    lock.unlock();
    std::unique_ptr<Communicator> made;
    std::exception_ptr error;
    try {
      made = std::make_unique<Communicator>(board_, name, device, me, size, aborted_);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    making_.erase(name);
    made_.notify_all();
    if (error) std::rethrow_exception(error);
    return *(comms_[name] = std::move(made));
  }
  Communicator& collective(int device) { return communicator("all", device, rank_, size_); }

  WorkPtr post(Communicator& comm, OpType type, const std::string& name, const std::vector<Use>& uses, Tensors held, Tensors outputs,
               std::function<void()> run, bool is_barrier = false) {
    stream_waits(comm.stream, clock_of(current_stream(comm.device)));
    launch(name, comm.stream, uses);
    for (const Use& use : uses) record_use(*use.block, comm.stream);
    auto work = c10::make_intrusive<GroupWork>(rank_, type, comm.device, held, std::move(outputs), is_barrier);
    work->end = clock_of(comm.stream);
    work->stream = comm.stream;
    comm.post(work, [run = std::move(run), held = std::move(held)] { run(); });  // `held` keeps the memory until it is done
    return work;
  }

  WorkHandle point_to_point(Tensors& tensors, int peer, bool is_send) {
    const Tensor& tensor = only(tensors);
    TORCH_CHECK(peer != rank_ && 0 <= peer && peer < size_, "standin_ccl: rank ", rank_, " cannot send to or receive from rank ", peer);
    int device = tensor.device().index();
    if (coalescing_) {
      steps_.push_back({tensor, peer, is_send});
      return nullptr;  // the end of the batch gives the work of all
    }
    // Eager groups have one communicator for all; others have one for each pair of ranks.
    bool eager = bound_device_id_.has_value();
    int low = std::min(rank_, peer), high = std::max(rank_, peer);
    Communicator& comm = eager ? collective(device)
                               : communicator(std::to_string(low) + ":" + std::to_string(high), device, rank_ == low ? 0 : 1, 2);
    int position = eager ? peer : (peer == low ? 0 : 1);
    Tensor memory = bytes_of(tensor);
    std::string name = is_send ? "send" : "recv";
    auto run = [&comm, memory, position, is_send, name] {
      is_send ? standin::send(comm, position, memory, name) : receive(comm, position, memory, name);
    };
    return post(comm, is_send ? OpType::SEND : OpType::RECV, name, {use_of(tensor, !is_send)}, {tensor}, {tensor}, run);
  }

  void run_together(Communicator& comm, const std::vector<Step>& steps) {
    std::map<std::pair<int, bool>, std::vector<const Step*>> lanes;  // in order for each peer and direction
    for (const Step& step : steps) lanes[{step.peer, step.is_send}].push_back(&step);
    std::vector<std::thread> threads;
    std::atomic<bool> lost{false};
    for (auto& [lane, list] : lanes)
      threads.emplace_back([&comm, &lost, &list] {
        try {
          for (const Step* step : list) {
            Tensor memory = bytes_of(step->tensor);
            step->is_send ? standin::send(comm, step->peer, memory, "send") : receive(comm, step->peer, memory, "recv");
          }
        } catch (const Aborted&) {
          lost = true;
        }
      });
    for (std::thread& thread : threads) thread.join();
    if (lost) throw Aborted();
  }

  WorkPtr all_reduce(const Tensor& tensor, ReduceOp::RedOpType op, bool is_barrier) {
    check_op(op);
    Communicator& comm = collective(tensor.device().index());
    Tensor memory = bytes_of(tensor);
    auto run = [&comm, memory, op] {
      Tensor sum = reduced(comm, memory, op, 0, "all_reduce");
      if (comm.me != 0) return receive(comm, 0, memory, "all_reduce");
      memory.copy_(sum);
      for (int position = 1; position < comm.size; ++position) standin::send(comm, position, memory, "all_reduce");
    };
    return post(comm, is_barrier ? OpType::BARRIER : OpType::ALLREDUCE, is_barrier ? "barrier" : "all_reduce", {use_of(tensor, true)},
                {tensor}, {tensor}, run, is_barrier);
  }

  WorkPtr all_gather(const Tensor& input, const Tensors& outputs) {
    std::vector<Use> uses{use_of(input, false)};
    Tensors held{input}, places;
    for (const Tensor& output : outputs) {
      check(output);
      TORCH_CHECK(output.numel() == input.numel() && output.scalar_type() == input.scalar_type(),
                  "standin_ccl: all_gather needs outputs of the size and dtype of the input");
      uses.push_back(use_of(output, true));
      held.push_back(output);
      places.push_back(bytes_of(output));
    }
    Communicator& comm = collective(input.device().index());
    Tensor mine = bytes_of(input);
    auto run = [&comm, mine, places] {
      if (comm.me != 0) standin::send(comm, 0, mine, "all_gather");
      places[comm.me].view({-1}).copy_(mine.view({-1}));
      if (comm.me == 0)
        for (int position = 1; position < comm.size; ++position) receive(comm, position, places[position], "all_gather");
      for (int part = 0; part < comm.size; ++part)
        if (comm.me != 0) {
          receive(comm, 0, places[part], "all_gather");
        } else {
          for (int position = 1; position < comm.size; ++position) standin::send(comm, position, places[part], "all_gather");
        }
    };
    return post(comm, OpType::ALLGATHER, "all_gather", uses, held, outputs, run);
  }

  WorkPtr scatter_reduced(const Tensor& output, const Tensors& inputs, ReduceOp::RedOpType op) {
    check_op(op);
    std::vector<Use> uses{use_of(output, true)};
    Tensors held{output}, parts;
    for (const Tensor& input : inputs) {
      check(input);
      uses.push_back(use_of(input, false));
      held.push_back(input);
      parts.push_back(bytes_of(input));
    }
    Communicator& comm = collective(output.device().index());
    Tensor into = bytes_of(output);
    auto run = [&comm, parts, into, op] {
      for (int part = 0; part < comm.size; ++part) {
        Tensor sum = reduced(comm, parts[part], op, part, "reduce_scatter");
        if (comm.me == part) into.view({-1}).copy_(sum.view({-1}));
      }
    };
    return post(comm, OpType::REDUCE_SCATTER, "reduce_scatter", uses, held, {output}, run);
  }

  WorkPtr between_root_and_all(const Tensor& mine, const Tensors& parts, int root, bool to_root) {
    TORCH_CHECK(rank_ != root || static_cast<int>(parts.size()) == size_, "standin_ccl: the root needs a tensor for each rank");
    std::vector<Use> uses{use_of(mine, !to_root)};
    Tensors held{mine}, places;
    for (const Tensor& part : parts) {
      check(part);
      uses.push_back(use_of(part, to_root));
      held.push_back(part);
      places.push_back(bytes_of(part));
    }
    Communicator& comm = collective(mine.device().index());
    Tensor memory = bytes_of(mine);
    std::string name = to_root ? "gather" : "scatter";
    auto run = [&comm, memory, places, root, to_root, name] {
      if (comm.me != root) return to_root ? standin::send(comm, root, memory, name) : receive(comm, root, memory, name);
      for (int position = 0; position < comm.size; ++position) {
        const Tensor& part = places[position];
        if (position == root) {
          to_root ? part.view({-1}).copy_(memory.view({-1})) : memory.view({-1}).copy_(part.view({-1}));
        } else if (to_root) {
          receive(comm, position, part, name);
        } else {
          standin::send(comm, position, part, name);
        }
      }
    };
    Tensors outputs = to_root ? parts : Tensors{mine};
    return post(comm, to_root ? OpType::GATHER : OpType::SCATTER, name, uses, held, outputs, run);
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::chrono::milliseconds timeout_;
  Board board_;
  Flag aborted_ = std::make_shared<std::atomic<bool>>(false);
  std::mutex mutex_;
  std::condition_variable made_;
  std::set<std::string> making_;
  std::map<std::string, std::unique_ptr<Communicator>> comms_;
  bool coalescing_ = false;
  std::vector<Step> steps_;
};

}  // namespace
}  // namespace standin

extern "C" {

PyObject* standin_new_group(PyObject* store, int rank, int size, int64_t timeout) {
  try {
    standin::on_device_wait(&standin::finish_device);
    auto held = pybind11::handle(store).cast<c10::intrusive_ptr<c10d::Store>>();
    c10::intrusive_ptr<c10d::Backend> made = c10::make_intrusive<standin::Group>(held, rank, size, std::chrono::milliseconds(timeout));
    return pybind11::cast(made).release().ptr();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

const char* standin_failures() {
  thread_local std::string text;
  std::lock_guard<std::mutex> lock(standin::failures_mutex);
  text.clear();
  for (const std::string& line : standin::failures) text += line + "\n";
  return text.c_str();
}
void standin_reset_failures() {
  std::lock_guard<std::mutex> lock(standin::failures_mutex);
  standin::failures.clear();
}
}
