// All kernels of one instruction set; the build compiles this file once for each.
#include "quantise/kernel.cpp"
#include "product/kernel.cpp"
#include "streams/kernel.cpp"
#include "experts/kernel.cpp"
#include "rows/kernel.cpp"
#include "attention/kernel.cpp"
