#include "quantise.h"

// x bfloat16 [rows, width] -> codes uint8 [rows, width], scales uint8 [rows, width / 32]
HR_EXPORT(hr_quantise)(const bf16* x, int64_t rows, int64_t width, uint8_t* codes, uint8_t* scales) {
  for (int64_t at = 0; at < rows * width; at += 32) {
    const Group group = quantise_group(load_bf16(x + at), load_bf16(x + at + 16));
    store_e4m3(codes + at, group.low);
    store_e4m3(codes + at + 16, group.high);
    scales[at / 32] = (uint8_t)group.exponent;
  }
  return 0;
}
