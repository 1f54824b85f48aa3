// All kernels of one instruction set; the build compiles this file once for each.
#include "quantise/kernel.cpp"
#include "product/kernel.cpp"
