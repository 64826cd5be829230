// Byte streams between the ranks of one communicator, on one host. A silent or lost peer is never noticed here: who waits
// for it waits until the communicator is aborted, as with NCCL.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace standin {

struct Aborted : std::runtime_error {
  Aborted() : std::runtime_error("standin_ccl: the communicator was aborted") {}
};

using Flag = std::shared_ptr<std::atomic<bool>>;

// What the wires need of a store.
struct Board {
  std::function<void(const std::string&, const std::string&)> put;
  std::function<bool(const std::string&)> has;
  std::function<std::string(const std::string&)> get;
};

class Wires {
 public:
  // Blocks until all `size` members have arrived, or `aborted` is set. `me` is a position among the members.
  Wires(const Board& board, const std::string& name, int me, int size, Flag aborted);
  ~Wires();
  // Returns when the receiver has met this send with a receive. False: the receiver expected something else.
  bool send(int to, const void* data, size_t bytes, int dtype);
  // An empty text, or how the message differs from what was expected (the memory is left alone then).
  std::string receive(int from, void* data, size_t bytes, int dtype);

 private:
  void write(int fd, const void* data, size_t bytes);
  void read(int fd, void* data, size_t bytes);
  Flag aborted_;
  std::vector<int> out_, in_;  // by position: what I send to it, what it sends to me
};

}  // namespace standin
