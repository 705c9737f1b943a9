// Linear layers: residues as float64, whose sums are exact below 2^53, and back. Four values a thread.

extern "C" __global__ void to_double(double* out, const u32* x, long count) {
  long i = thread_number() * 4;
  if (i >= count) return;
  uint4 v = *(const uint4*)(x + i);
  *(double2*)(out + i) = make_double2(v.x, v.y);
  *(double2*)(out + i + 2) = make_double2(v.z, v.w);
}

__device__ __forceinline__ u32 of_double(double y, double q, double inverse) {
  double z = y - floor(y * inverse) * q;
  z = z < 0 ? z + q : z;
  z = z >= q ? z - q : z;
  return (u32)z;
}

// (rows, k, N)
extern "C" __global__ void from_double(u32* out, const double* y, const Prime* primes, int k, long count) {
  long i = thread_number() * 4;
  if (i >= count) return;
  double q = primes[(i >> LOG_DEGREE) % k].q, inverse = 1.0 / q;
  double2 a = *(const double2*)(y + i), b = *(const double2*)(y + i + 2);
  *(uint4*)(out + i) = make_uint4(of_double(a.x, q, inverse), of_double(a.y, q, inverse), of_double(b.x, q, inverse),
                                  of_double(b.y, q, inverse));
}
