// What compilers call by themselves, for there is no library of C.
#ifndef MEMORY_H
#define MEMORY_H

#ifdef __ELF__
#define OWN_MEMORY __attribute__((visibility("hidden")))
#else
#define OWN_MEMORY
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

OWN_MEMORY void *memset(void *to, int value, __SIZE_TYPE__ size) {
  for (__SIZE_TYPE__ i = 0; i < size; i++) ((volatile u8 *)to)[i] = (u8)value;
  return to;
}

#endif
