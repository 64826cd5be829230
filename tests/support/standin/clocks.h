// Order between streams: vector clocks, the accesses to memory, the waits of the host, and the races that were found.
// Nothing here knows torch, so that it compiles in a moment.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace standin {

constexpr int kMaxDevices = 16;

// Streams are numbered over all devices: the default streams first, then the others in the order they were made.
using Clock = std::vector<uint64_t>;
struct Point {
  int stream;
  uint64_t tick;
};

struct Access {
  size_t low, high;  // bytes within the block
  bool write;
  Point point;
  std::string op;
};

// One piece of device memory. `home` is the stream that was current when it was allocated.
struct Block {
  int device = 0;
  int home = 0;
  size_t size = 0;
  void* memory = nullptr;
  void (*release)(void*) = nullptr;  // frees `owner`
  void* owner = nullptr;
  std::vector<Access> accesses;
  std::vector<int> recorded;  // streams named by record_stream
};

struct Use {
  Block* block;
  size_t low, high;
  bool write;
};

// Streams.
int default_stream(int device);
int stream_number(int device, int64_t id);
int64_t stream_id(int stream);
int device_of(int stream);
std::string stream_name(int stream);
int new_stream(int device);       // a new one, or one of the oldest again when there are many
int new_own_stream(int device);   // never handed out again (communicators)
int current_stream(int device);   // of this thread
void set_current_stream(int stream);

// Ordering. All of these are safe from any thread.
Clock clock_of(int stream);                          // all that work launched on it from now on comes after
void stream_waits(int stream, const Clock& clock);   // later work of the stream comes after the clock
void host_waits(const std::string& what, const Clock& clock, bool counted = true);
void host_waits_for_device(int device, const std::string& what);
bool host_knows(Point point);

// Launches an op: checks all uses, raises std::runtime_error for a race, and remembers the uses.
Point launch(const std::string& op, int stream, const std::vector<Use>& uses);
void written(Block& block, Point point, const std::string& op);  // a fresh result of an op that was launched
bool ordered(Point point, int stream);                         // later work of the stream comes after the point
void check_reuse(int device, int home, const std::string& op);  // called by an allocation on the stream `home`
void forget(Block& block);                                      // the memory is freed
void record_use(Block& block, int stream);

void add_race(const std::string& text);
[[noreturn]] void race(const std::string& text);

// What the tests ask for.
std::vector<std::string> counted_waits();
void reset_waits();
std::vector<std::string> races();
void reset_races();
void raise_races(bool raise);
void on_wait(void (*callback)(const char*));  // called after each counted wait, without a lock
void on_host_progress(void (*callback)());    // called after the host has waited, without a lock
void on_device_wait(void (*callback)(int));   // called before the host waits for a device: blocks until its messages are there

}  // namespace standin
