// The types of numbers, and what the library's functions take. No file of C is included from outside.
#ifndef TYPES_H
#define TYPES_H

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef signed short i16;
typedef unsigned int u32;
typedef signed int i32;
typedef unsigned long long u64;
typedef signed long long i64;
typedef float f32;
typedef double f64;

#define INLINE static inline __attribute__((always_inline))
#ifdef __cplusplus
#define EXTERN extern "C"
#define CONSTANT constexpr INLINE
#define _Static_assert static_assert
#else
#define EXTERN
#define CONSTANT INLINE
#endif
#ifdef _WIN32
#define VISIBLE __attribute__((dllexport))
#else
#define VISIBLE __attribute__((visibility("default")))
#endif

#ifdef __CUDACC_RTC__  // the compiler of GPUs
#define __builtin_memcpy memcpy
#define __builtin_fabs fabs
#define __builtin_popcount __popc
#define UNROLLED _Pragma("unroll")
#elif defined __clang__
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED
#endif

// A function that others call; with `LEVEL` its name ends in the level of processors it is made for.
#define JOIN_(name, level) dare_##name##_##level
#define JOIN(name, level) JOIN_(name, level)
#ifndef LEVEL
#define LEVEL any
#endif
#define ENTRY(result, name) EXTERN VISIBLE result JOIN(name, LEVEL)

// An array of NumPy. `columns` is the length of its last dimension; the kind says how weights are
// stored, and means nothing for other arrays.
typedef struct {
  void *data;
  i64 size, columns, kind;
} Array;
#define AT(type, array) ((type *)(array)->data)

enum Kind { F64, F32, F16, BF16, F8_E4M3, F8_E5M2 };
CONSTANT i64 width_of(enum Kind kind) { return kind == F64 ? 8 : kind == F32 ? 4 : kind < F8_E4M3 ? 2 : 1; }

// Do something with `K` as each kind, so that it is compiled for each; the page has one.
#ifdef ONLY_KIND
#define FOR_KIND(kind, ...) do { const enum Kind K = ONLY_KIND; (void)(kind); __VA_ARGS__; } while (0)
#else
#define FOR_KIND(kind, ...)                                            \
  switch (kind) {                                                      \
    case F64: { const enum Kind K = F64; __VA_ARGS__; break; }         \
    case F32: { const enum Kind K = F32; __VA_ARGS__; break; }         \
    case F16: { const enum Kind K = F16; __VA_ARGS__; break; }         \
    case BF16: { const enum Kind K = BF16; __VA_ARGS__; break; }       \
    case F8_E4M3: { const enum Kind K = F8_E4M3; __VA_ARGS__; break; } \
    default: { const enum Kind K = F8_E5M2; __VA_ARGS__; break; }      \
  }
#endif
// Do something with `K` as a kind and `L` as another, which is the same, or was decoded to F32.
#define FOR_KINDS(kind, other, ...)                             \
  FOR_KIND(kind, {                                              \
    if ((other) == K) { const enum Kind L = K; __VA_ARGS__; }   \
    else { const enum Kind L = F32; __VA_ARGS__; }              \
  })

// Do something at each place `i` of an array, in lanes: `count` of them, which is less than LANES at
// the end alone. It is compiled twice, so that the count is a constant before that.
#define EACH(size, ...)                              \
  do {                                               \
    i64 i = 0, rest = (size) % LANES;                \
    for (; i < (size) - rest; i += LANES) {          \
      enum { count = LANES };                        \
      __VA_ARGS__;                                   \
    }                                                \
    if (LANES > 1 && rest) {                         \
      i64 count = rest;                              \
      __VA_ARGS__;                                   \
    }                                                \
  } while (0)

// Do something with each tile of a whole: `size` places from `first` on.
#define EACH_TILE(whole, tile) \
  for (i64 first = 0, size; (size = least_i64(tile, (whole) - first)) > 0; first += tile)

// Scratch memory that the caller brings; a function that needs more says so in `core.py`.
enum { ROOM_BYTES = 512 << 10 };
#define FITS(room) _Static_assert(sizeof(room) <= ROOM_BYTES, "")

INLINE u32 bits_of_f32(f32 value) {
  u32 bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}
INLINE f32 f32_of_bits(u32 bits) {
  f32 value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
INLINE i64 least_i64(i64 a, i64 b) { return a < b ? a : b; }
INLINE i64 most_i64(i64 a, i64 b) { return a > b ? a : b; }
INLINE u32 most_u32(u32 a, u32 b) { return a > b ? a : b; }

#endif
