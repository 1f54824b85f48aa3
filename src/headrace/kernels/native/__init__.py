"""Kernels in C++ for the CPU, one folder per operation: description, reference, kernel.

The package works without them. Where they are built, `library.py` loads one shared library that holds every kernel
once per instruction set and takes the best that the processor has. A kernel is called with raw pointers through
ctypes, which releases the interpreter's lock.

Three rules hold for all of them. A multiply-add rounds once, and every sum has one stated order, so the instruction
set never shows in the bits. A row's result is a function of that row alone. Weights keep their stored bits; they are
only laid out anew, in tiles of 16 output columns (`tiles.py`).
"""
