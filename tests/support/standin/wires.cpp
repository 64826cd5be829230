#include "wires.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

namespace standin {
namespace {

struct Header {
  int64_t bytes;
  int32_t dtype, unused;
};

std::pair<sockaddr_un, socklen_t> address_of(const std::string& name) {  // in the abstract namespace: no file is left behind
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  size_t length = std::min(name.size(), sizeof(address.sun_path) - 1);
  std::memcpy(address.sun_path + 1, name.data(), length);
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length)};
}

int listening(const std::string& name) {
  int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  auto [address, length] = address_of(name);
  if (fd < 0 || ::bind(fd, reinterpret_cast<sockaddr*>(&address), length) != 0 || ::listen(fd, 64) != 0)
    throw std::runtime_error(std::string("standin_ccl: no socket: ") + std::strerror(errno));
  return fd;
}

int connected(const std::string& name) {
  int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  auto [address, length] = address_of(name);
  if (fd < 0 || ::connect(fd, reinterpret_cast<sockaddr*>(&address), length) != 0) {
    int error = errno;
    ::close(fd);
    throw std::runtime_error(std::string("standin_ccl: cannot connect: ") + std::strerror(error));
  }
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  return fd;
}

void until(const Flag& aborted, int fd, short events) {
  pollfd waited{fd, events, 0};
  while (true) {
    if (aborted->load()) throw Aborted();
    if (::poll(&waited, 1, 20) > 0) return;
  }
}

[[noreturn]] void silence(const Flag& aborted) {
  while (!aborted->load()) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  throw Aborted();
}

}  // namespace

Wires::Wires(const Board& board, const std::string& name, int me, int size, Flag aborted)
    : aborted_(std::move(aborted)), out_(size, -1), in_(size, -1) {
  std::string mine = "pipepart-standin-" + std::to_string(::getpid()) + "-" +
      std::to_string(std::chrono::steady_clock::now().time_since_epoch().count()) + "-" + std::to_string(me);
  int listener = listening(mine);
  try {
    board.put(name + "/" + std::to_string(me), mine);
    for (int other = 0; other < size; ++other) {
      if (other == me) continue;
      std::string key = name + "/" + std::to_string(other);
      for (int wait = 1; !board.has(key); wait = std::min(wait * 2, 20)) {
        if (aborted_->load()) throw Aborted();
        std::this_thread::sleep_for(std::chrono::milliseconds(wait));
      }
      out_[other] = connected(board.get(key));
      int32_t position = me;
      write(out_[other], &position, sizeof(position));
    }
    for (int met = 0; met < size - 1; ++met) {
      until(aborted_, listener, POLLIN);
      int fd = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (fd < 0) throw std::runtime_error(std::string("standin_ccl: accept: ") + std::strerror(errno));
      int32_t position = -1;
      read(fd, &position, sizeof(position));
      in_.at(position) = fd;
    }
  } catch (...) {
    ::close(listener);
    throw;
  }
  ::close(listener);
}

Wires::~Wires() {
  for (const auto& side : {out_, in_})
    for (int fd : side)
      if (fd >= 0) ::close(fd);
}

void Wires::write(int fd, const void* data, size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    until(aborted_, fd, POLLOUT);
    ssize_t n = ::send(fd, at, bytes, MSG_NOSIGNAL);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n < 0) silence(aborted_);
    at += n;
    bytes -= n;
  }
}

void Wires::read(int fd, void* data, size_t bytes) {
  char* at = static_cast<char*>(data);
  while (bytes > 0) {
    until(aborted_, fd, POLLIN);
    ssize_t n = ::recv(fd, at, bytes, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (n <= 0) silence(aborted_);
    at += n;
    bytes -= n;
  }
}

bool Wires::send(int to, const void* data, size_t bytes, int dtype) {
  Header header{static_cast<int64_t>(bytes), dtype, 0};
  write(out_[to], &header, sizeof(header));
  write(out_[to], data, bytes);
  char met = 0;
  read(out_[to], &met, 1);
  return met == 1;
}

std::string Wires::receive(int from, void* data, size_t bytes, int dtype) {
  Header header{};
  read(in_[from], &header, sizeof(header));
  bool right = header.bytes == static_cast<int64_t>(bytes) && header.dtype == dtype;
  char met = right ? 1 : 2;
  if (right) {
    read(in_[from], data, bytes);
    write(in_[from], &met, 1);
    return "";
  }
  std::vector<char> dropped(header.bytes);
  read(in_[from], dropped.data(), dropped.size());
  write(in_[from], &met, 1);
  return "got " + std::to_string(header.bytes) + " bytes of dtype " + std::to_string(header.dtype) + ", expected " +
      std::to_string(bytes) + " bytes of dtype " + std::to_string(dtype);
}

}  // namespace standin
