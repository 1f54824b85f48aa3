// Which sources the library was built from, and which of the compiled instruction sets this processor has: 2 AVX-512 with BF16 and VBMI, 1 AVX2 with FMA, 0 neither.
#include <cstdint>

extern "C" __attribute__((visibility("default"))) int64_t hr_instruction_set() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  const bool has_512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni") &&
                       __builtin_cpu_supports("avx512bf16");
  return has_512 ? 2 : 1;
#else
  return 0;
#endif
}

extern "C" __attribute__((visibility("default"))) const char* hr_sources() { return HR_SOURCES; }
