// Arithmetic modulo primes q < 2^28 in 32-bit words: what all kernels of this folder share.
//
// The files are compiled together, in the order arithmetic, transforms, randomness, integers, ciphertexts, pairs, linear,
// with -DLOG_DEGREE=12|13|14. Arrays of ciphertexts are (n, p, k, N): n ciphertexts of p polynomials at k primes, in NTT
// form. Wherever an array is read at its first k primes only, the number of primes it has is a parameter of its own.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;

#define N (1 << LOG_DEGREE)
#define MOST_PRIMES 8
#define MOST_WORDS 8

// What a kernel needs to know of a prime.
struct Prime {
  u32 q;
  u32 one;          // ⌊2^32 / q⌋
  u32 n_inv;        // N^-1 mod q, for the inverse transform
  u32 n_inv_s;      // ⌊2^32·n_inv / q⌋
  u64 ratio;        // ⌊2^64 / q⌋
  u64 last;         // the largest 64-bit word below the last multiple of q
};

// A known factor w with ws = ⌊2^32·w / q⌋ (Shoup): products by it need no division.
typedef uint2 Factor;

__device__ __forceinline__ long thread_number() { return blockIdx.x * (long)blockDim.x + threadIdx.x; }

// x mod q for x < 2q: x - q wraps to something large where x is below q
__device__ __forceinline__ u32 once(u32 x, u32 q) { return min(x, x - q); }

// w·y mod q, below 2q, for any y
__device__ __forceinline__ u32 lazy_product(u32 y, Factor w, u32 q) { return w.x * y - __umulhi(w.y, y) * q; }

__device__ __forceinline__ u32 product(u32 y, Factor w, u32 q) { return once(lazy_product(y, w, q), q); }

// x mod q, below 2q, for any x
__device__ __forceinline__ u32 lazy(u32 x, u32 q, u32 one) { return x - __umulhi(x, one) * q; }

__device__ __forceinline__ u32 add(u32 x, u32 y, u32 q) { return once(x + y, q); }

__device__ __forceinline__ u32 subtract(u32 x, u32 y, u32 q) { return once(x + q - y, q); }

// x mod q for any 64-bit x (Barrett)
__device__ __forceinline__ u32 reduce(u64 x, Prime p) { return once((u32)(x - __umul64hi(x, p.ratio) * p.q), p.q); }

// a small signed number
__device__ __forceinline__ u32 residue_of_small(int v, u32 q) { return (u32)(v + ((v >> 31) & (int)q)); }
