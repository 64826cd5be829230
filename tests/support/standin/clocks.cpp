#include "clocks.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <stdexcept>

namespace standin {
namespace {

struct StreamState {
  int device;
  Clock clock;
};

struct Hazard {  // memory that was freed while another stream may still use it
  std::vector<Access> accesses;
  size_t size;
};

struct State {
  std::mutex mutex;
  std::vector<StreamState> streams;
  std::array<std::vector<int>, kMaxDevices> pool;
  std::array<size_t, kMaxDevices> next_of_pool{};
  Clock host;
  std::map<int, std::vector<Hazard>> hazards;  // by home stream
  std::vector<std::string> waits, races;
  bool raise = true;
  void (*on_wait)(const char*) = nullptr;
  void (*on_progress)() = nullptr;
  void (*on_device_wait)(int) = nullptr;

  State() {
    for (int device = 0; device < kMaxDevices; ++device) streams.push_back({device, {}});
  }
};

State& state() {
  static State* one = new State();  // never destroyed: tensors may be freed at exit
  return *one;
}

constexpr size_t kPool = 32;
thread_local std::array<int, kMaxDevices> current = [] {
  std::array<int, kMaxDevices> numbers{};
  for (int device = 0; device < kMaxDevices; ++device) numbers[device] = device;
  return numbers;
}();

void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

bool covers(const Clock& clock, Point point) {
  return static_cast<size_t>(point.stream) < clock.size() && clock[point.stream] >= point.tick;
}

int add_stream(State& s, int device) {
  s.streams.push_back({device, s.host});
  return static_cast<int>(s.streams.size()) - 1;
}

std::string described(const State& s, int stream) {
  return "standin:" + std::to_string(s.streams[stream].device) + "/" + std::to_string(stream_id(stream));
}

std::string conflict(State& s, const Clock& clock, int stream, const std::string& op, const Use& use) {
  for (const Access& old : use.block->accesses) {
    bool apart = old.high <= use.low || use.high <= old.low;
    if (apart || !(old.write || use.write) || old.point.stream == stream || covers(clock, old.point)) continue;
    return "standin: op " + op + " on stream " + described(s, stream) + (use.write ? " writes" : " reads") + " memory " +
        (old.write ? "written" : "read") + " by op " + old.op + " on stream " + described(s, old.point.stream) +
        " without an event between them";
  }
  return "";
}

void remember(State& s, const std::string& op, Point point, const Use& use) {
  auto& list = use.block->accesses;
  auto replaced = [&](const Access& old) {
    bool within = use.low <= old.low && old.high <= use.high;
    if (within && use.write) return true;  // it is ordered before this write, or the race was reported
    return within && !old.write && old.point.stream == point.stream;
  };
  list.erase(std::remove_if(list.begin(), list.end(), replaced), list.end());
  if (list.size() > 64)
    list.erase(std::remove_if(list.begin(), list.end(), [&](const Access& a) { return covers(s.host, a.point); }), list.end());
  list.push_back({use.low, use.high, use.write, point, op});
}

void found(State& s, const std::string& text, std::unique_lock<std::mutex>& lock) {
  s.races.push_back(text);
  if (!s.raise) return;
  lock.unlock();
  throw std::runtime_error(text);
}

}  // namespace

int default_stream(int device) { return device; }
int stream_number(int device, int64_t id) { return id == 0 ? device : static_cast<int>(id) + kMaxDevices - 1; }
int64_t stream_id(int stream) { return stream < kMaxDevices ? 0 : stream - kMaxDevices + 1; }

int device_of(int stream) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return state().streams.at(stream).device;
}

std::string stream_name(int stream) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return described(state(), stream);
}

int new_own_stream(int device) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return add_stream(state(), device);
}

int new_stream(int device) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  auto& pool = s.pool.at(device);
  if (pool.size() < kPool) {
    pool.push_back(add_stream(s, device));
    return pool.back();
  }
  return pool[s.next_of_pool[device]++ % kPool];
}

int current_stream(int device) { return current.at(device); }
void set_current_stream(int stream) { current.at(device_of(stream)) = stream; }

Clock clock_of(int stream) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  Clock& clock = s.streams.at(stream).clock;
  join(clock, s.host);
  return clock;
}

void stream_waits(int stream, const Clock& clock) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  join(s.streams.at(stream).clock, clock);
}

void host_waits(const std::string& what, const Clock& clock, bool counted) {
  State& s = state();
  void (*callback)(const char*);
  void (*progress)();
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    join(s.host, clock);
    if (counted) s.waits.push_back(what);
    callback = counted ? s.on_wait : nullptr;
    progress = s.on_progress;
  }
  if (callback) callback(what.c_str());
  if (progress) progress();
}

void host_waits_for_device(int device, const std::string& what) {
  State& s = state();
  Clock all;
  if (s.on_device_wait) s.on_device_wait(device);
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    for (const StreamState& stream : s.streams)
      if (stream.device == device) join(all, stream.clock);
  }
  host_waits(what, all);
}

bool host_knows(Point point) {
  std::lock_guard<std::mutex> lock(state().mutex);
  return covers(state().host, point);
}

Point launch(const std::string& op, int stream, const std::vector<Use>& uses) {
  State& s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  Clock& clock = s.streams.at(stream).clock;
  join(clock, s.host);
  for (const Use& use : uses) {
    std::string text = conflict(s, clock, stream, op, use);
    if (!text.empty()) {
      found(s, text, lock);
      break;
    }
  }
  if (clock.size() <= static_cast<size_t>(stream)) clock.resize(stream + 1);
  Point point{stream, ++clock[stream]};
  for (const Use& use : uses) remember(s, op, point, use);
  return point;
}

void written(Block& block, Point point, const std::string& op) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  remember(s, op, point, {&block, 0, block.size, true});
}

bool ordered(Point point, int stream) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return point.stream == stream || covers(s.host, point) || covers(s.streams.at(stream).clock, point);
}

void check_reuse(int device, int home, const std::string& op) {
  State& s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  auto entry = s.hazards.find(home);
  if (entry == s.hazards.end()) return;
  std::vector<Hazard> freed = std::move(entry->second);
  s.hazards.erase(entry);
  Clock& clock = s.streams.at(home).clock;
  join(clock, s.host);
  for (const Hazard& hazard : freed)
    for (const Access& access : hazard.accesses)
      if (!covers(clock, access.point)) {
        found(s, "standin: " + op + " on stream " + described(s, home) + " may reuse " + std::to_string(hazard.size) +
                  " bytes that were freed while op " + access.op + " on stream " + described(s, access.point.stream) +
                  " still used them: record_stream or an event is missing", lock);
        return;
      }
}

void forget(Block& block) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  Clock& clock = s.streams.at(block.home).clock;
  Hazard hazard{{}, block.size};
  for (const Access& access : block.accesses) {
    bool safe = access.point.stream == block.home || covers(clock, access.point) || covers(s.host, access.point) ||
        std::find(block.recorded.begin(), block.recorded.end(), access.point.stream) != block.recorded.end();
    if (!safe) hazard.accesses.push_back(access);
  }
  if (!hazard.accesses.empty()) s.hazards[block.home].push_back(std::move(hazard));
}

void record_use(Block& block, int stream) {
  std::lock_guard<std::mutex> lock(state().mutex);
  block.recorded.push_back(stream);
}

void add_race(const std::string& text) {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().races.push_back(text);
}

void race(const std::string& text) {
  add_race(text);
  throw std::runtime_error(text);
}

std::vector<std::string> counted_waits() {
  std::lock_guard<std::mutex> lock(state().mutex);
  return state().waits;
}
void reset_waits() {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().waits.clear();
}
std::vector<std::string> races() {
  std::lock_guard<std::mutex> lock(state().mutex);
  return state().races;
}
void reset_races() {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().races.clear();
  state().hazards.clear();
}
void raise_races(bool raise) { state().raise = raise; }
void on_wait(void (*callback)(const char*)) { state().on_wait = callback; }
void on_host_progress(void (*callback)()) { state().on_progress = callback; }
void on_device_wait(void (*callback)(int)) { state().on_device_wait = callback; }

}  // namespace standin
