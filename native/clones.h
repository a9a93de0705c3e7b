#pragma once
#include <cstdlib>  // any header of the C library defines __GLIBC__ if that library is glibc

// FEEDLINE_CLONES compiles a function once per vector width; the dynamic loader selects the widest form for this CPU.
// It needs ifunc, which glibc has. Elsewhere, and with sanitizers that start before the loader, only the plain form
// exists.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define FEEDLINE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FEEDLINE_CLONES
#endif
