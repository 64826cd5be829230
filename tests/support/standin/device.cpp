// All of the device in one unit: the headers of torch, which take most of the compiler's time, are read once.
#include "clocks.cpp"
#include "memory.cpp"
#include "kernels.cpp"
#include "copies.cpp"
#include "autocast.cpp"
#include "wires.cpp"
#include "api.cpp"
