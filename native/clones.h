#pragma once
#include <cstdlib>  // any header of the C library: it tells whether that library is glibc

// FEEDLINE_CLONES on a function: compiled once per vector width, the loader picks the widest that this CPU has.
// It needs ifunc, which glibc has; elsewhere, and where a sanitizer runs before the loader, there is the plain form only.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define FEEDLINE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FEEDLINE_CLONES
#endif
