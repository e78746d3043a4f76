// What compilers call by themselves, for there is no library of C. The linker tells what is missing.
#ifndef MEMORY_H
#define MEMORY_H

#ifdef __ELF__
#define OWN_MEMORY EXTERN __attribute__((visibility("hidden")))
#else
#define OWN_MEMORY EXTERN
#endif

OWN_MEMORY void *memcpy(void *to, const void *from, __SIZE_TYPE__ size) {
  for (__SIZE_TYPE__ i = 0; i < size; i++) {
    ((volatile u8 *)to)[i] = ((const u8 *)from)[i];
  }
  return to;
}

OWN_MEMORY void *memmove(void *to, const void *from, __SIZE_TYPE__ size) {
  if (to <= from) return memcpy(to, from, size);
  while (size--) ((volatile u8 *)to)[size] = ((const u8 *)from)[size];
  return to;
}

#ifdef _WIN32
// What Windows calls when it loads the library.
EXTERN int DllMainCRTStartup(void *, u32, void *);
EXTERN int DllMainCRTStartup(void *library, u32 reason, void *reserved) {
  (void)library, (void)reason, (void)reserved;
  return 1;
}
#endif

#endif
