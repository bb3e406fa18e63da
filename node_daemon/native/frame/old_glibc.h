// Binds the functions that glibc 2.34 gave new versions to their oldest ones, so that a library built on a new system
// loads on one with glibc 2.28. Link it with libdl.so.2 (and libpthread.so.0) by name: there these functions lie in it.
#pragma once

#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver dladdr,dladdr@GLIBC_2.2.5");
__asm__(".symver dlclose,dlclose@GLIBC_2.2.5");
__asm__(".symver dlopen,dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym,dlsym@GLIBC_2.2.5");
__asm__(".symver pthread_attr_setstacksize,pthread_attr_setstacksize@GLIBC_2.2.5");
__asm__(".symver pthread_create,pthread_create@GLIBC_2.2.5");
__asm__(".symver pthread_sigmask,pthread_sigmask@GLIBC_2.2.5");
#endif
