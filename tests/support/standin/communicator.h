// One communicator of the process group: its ops run one after the other, in the order in which they were posted.
#pragma once
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "kernels.h"
#include "wires.h"

namespace standin {

using at::Tensor;
using c10d::OpType;
using Tensors = std::vector<Tensor>;
using c10d::ReduceOp;

inline std::mutex failures_mutex;
inline std::vector<std::string> failures;

inline void add_failure(const std::string& text) {
  std::lock_guard<std::mutex> lock(failures_mutex);
  failures.push_back(text);
}

struct GroupWork final : c10d::Work {
  GroupWork(int rank, OpType type, int device, Tensors held, Tensors outputs, bool is_barrier)
      : Work(rank, type), device_(device), held_(std::move(held)), outputs_(std::move(outputs)), is_barrier_(is_barrier) {}

  bool isCompleted() override {
    std::lock_guard<std::mutex> lock(mutex_);
    return completed_;
  }
  bool isSuccess() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return completed_ && !lost_;
  }
  // Orders the current stream after the op. The host waits only since values are computed at once here; it is not told
  // whether the peer failed.
  bool wait(std::chrono::milliseconds) override {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      cv_.wait(lock, [&] { return completed_; });
      held_.clear();
    }
    synchronize();
    return true;
  }
  void synchronize() override {
    int stream = current_stream(device_);
    stream_waits(stream, end);
    if (is_barrier_) host_waits("barrier", clock_of(stream));
  }
  void blockCurrentStream() override { wait(kNoTimeout); }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!future_) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()),
          std::vector<c10::Device>{c10::Device(kDevice, static_cast<c10::DeviceIndex>(device_))});
      if (completed_) complete_future();
    }
    return future_;
  }
  void done(bool lost) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (completed_) return;
      completed_ = true;
      lost_ = lost;
      if (future_) complete_future();
    }
    cv_.notify_all();
  }

  // Blocks until it is done, and orders nothing.
  void finish() {
    std::unique_lock<std::mutex> lock(mutex_);
    cv_.wait(lock, [&] { return completed_; });
  }
  int device() const { return device_; }

  Clock end;
  int stream = -1;

 private:
  void complete_future() {
    c10::Stream old(c10::Stream::UNSAFE, c10::Device(kDevice, static_cast<c10::DeviceIndex>(device_)), stream_id(current_stream(device_)));
    set_current_stream(stream);
    future_->markCompleted(c10::IValue(outputs_));
    set_current_stream(stream_number(device_, old.id()));
  }
  int device_;
  Tensors held_, outputs_;
  bool is_barrier_, lost_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};
using WorkPtr = c10::intrusive_ptr<GroupWork>;

// All ops that were posted in this process and are not done.
inline std::mutex pending_mutex;
inline std::vector<WorkPtr> pending;

inline void finish_device(int device) {
  std::vector<WorkPtr> works;
  {
    std::lock_guard<std::mutex> lock(pending_mutex);
    for (const WorkPtr& work : pending)
      if (work->device() == device) works.push_back(work);
  }
  for (const WorkPtr& work : works) work->finish();
}

// One communicator: its ops run one after the other, on a stream of its own.
class Communicator {
 public:
  Communicator(const Board& board, const std::string& name, int device, int me, int size, Flag aborted)
      : device(device), me(me), size(size), stream(new_own_stream(device)), aborted_(aborted), wires(board, name, me, size, aborted) {
    thread_ = std::thread([this] { run(); });
  }
  ~Communicator() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }
  void post(WorkPtr work, std::function<void()> op) {
    {
      std::lock_guard<std::mutex> lock(pending_mutex);
      pending.push_back(work);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.emplace_back(std::move(work), std::move(op));
    changed_.notify_all();
  }
  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return queue_.empty();
  }

  const int device, me, size, stream;

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return closed_ || !queue_.empty(); });
      if (queue_.empty()) return;
      auto [work, op] = queue_.front();
      lock.unlock();
      bool lost = aborted_->load();
      try {
        if (!lost) op();
      } catch (const Aborted&) {
        lost = true;
      } catch (const std::exception& error) {
        add_failure(error.what());
        lost = true;
      }
      op = nullptr;
      work->done(lost);
      {
        std::lock_guard<std::mutex> guard(pending_mutex);
        pending.erase(std::remove(pending.begin(), pending.end(), work), pending.end());
      }
      work.reset();
      lock.lock();
      queue_.pop_front();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<WorkPtr, std::function<void()>>> queue_;
  bool closed_ = false;
  Flag aborted_;
  std::thread thread_;

 public:
  Wires wires;
};

inline void check_op(ReduceOp::RedOpType op) {
  bool known = op == ReduceOp::SUM || op == ReduceOp::AVG || op == ReduceOp::PRODUCT || op == ReduceOp::MIN || op == ReduceOp::MAX;
  TORCH_CHECK(known, "standin_ccl: only SUM, AVG, PRODUCT, MIN and MAX can be reduced");
}

inline void check(const Tensor& tensor) {
  TORCH_CHECK(tensor.device().type() == kDevice && !tensor.is_sparse(), "standin_ccl: Tensors must be standin and dense, got one on ",
              tensor.device());
  TORCH_CHECK(tensor.is_contiguous(), "standin_ccl: Tensors must be contiguous");
  switch (tensor.scalar_type()) {
    case at::kByte: case at::kChar: case at::kInt: case at::kLong: case at::kHalf: case at::kBFloat16: case at::kFloat:
    case at::kDouble: case at::kBool: return;
    default: TORCH_CHECK(false, "standin_ccl: unsupported data type ", tensor.scalar_type(), ": NCCL has no such type");
  }
}

inline int wire_dtype(const Tensor& tensor) {
  return static_cast<int>(tensor.scalar_type() == at::kBool ? at::kByte : tensor.scalar_type());
}

// The memory of a tensor, seen by the threads of communicators.
inline Tensor bytes_of(const Tensor& tensor) { return cpu_view_of(tensor); }

inline void reduce_into(Tensor& sum, const Tensor& other, ReduceOp::RedOpType op) {
  bool flags = sum.scalar_type() == at::kBool;
  switch (op) {
    case ReduceOp::SUM: case ReduceOp::AVG: flags ? sum.logical_or_(other) : sum.add_(other); return;
    case ReduceOp::PRODUCT: flags ? sum.logical_and_(other) : sum.mul_(other); return;
    case ReduceOp::MIN: sum.copy_(at::minimum(sum, other)); return;
    case ReduceOp::MAX: sum.copy_(at::maximum(sum, other)); return;
    default: return;  // refused when it was posted
  }
}

inline void receive(Communicator& comm, int from, const Tensor& into, const std::string& what) {
  std::string wrong = comm.wires.receive(from, into.mutable_data_ptr(), into.nbytes(), wire_dtype(into));
  if (!wrong.empty()) add_failure("standin_ccl: " + what + " from rank position " + std::to_string(from) + ": " + wrong);
}
inline void send(Communicator& comm, int to, const Tensor& from, const std::string& what) {
  if (!comm.wires.send(to, from.const_data_ptr(), from.nbytes(), wire_dtype(from)))
    add_failure("standin_ccl: " + what + " to rank position " + std::to_string(to) + ": the receiver expected another size or dtype");
}

// The reduction of the tensors of all members, in the order of their positions; on position `root` only.
inline Tensor reduced(Communicator& comm, const Tensor& mine, ReduceOp::RedOpType op, int root, const std::string& what) {
  if (comm.me != root) {
    send(comm, root, mine, what);
    return mine;
  }
  Tensor sum, other = at::empty_like(mine);
  for (int position = 0; position < comm.size; ++position) {
    if (position != root) receive(comm, position, other, what);
    const Tensor& next = position == root ? mine : other;
    if (sum.defined()) {
      reduce_into(sum, next, op);
    } else {
      sum = next.clone();
    }
  }
  if (op == ReduceOp::AVG) at::isIntegralType(sum.scalar_type(), true) ? sum.div_(comm.size, "trunc") : sum.div_(comm.size);
  return sum;
}

}  // namespace standin
