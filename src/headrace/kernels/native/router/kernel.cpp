#include "router.h"

// z [T, E] products of the router, replaced by scores; bias [E]; picked [T, K], weights [T, K]
HR_EXPORT(hr_route)
(float* z, const float* bias, int64_t rows, int64_t count, int64_t per_token, const double* scale, int64_t* picked,
 float* weights) {
  for (int64_t t = 0; t < rows; t++)
    route_row(z + t * count, bias, count, per_token, (float)*scale, picked + t * per_token, weights + t * per_token);
  return 0;
}
